"""Runs Python programs in forks of an interpreter that has imported Hardpoint and torch.

Importing them takes 2 seconds of processor time, and tests run about a hundred programs. A fork has
the program's own `__main__`, arguments, `sys.path`, environment and working directory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from support.checked_builtins import check_builtins_once
from support.installed_metadata import read_metadata_once
from support.process.fork_server import (
    STARTS,
    ForkServer,
    delay_if_stressed,
    fork_on_request,
    import_builtins,
    number_descriptors,
    one_thread,
    request_fork,
    request_program,
    run_and_leave,
    serve_engines,
)

_IMPORTED = (
    "hardpoint.process.build",
    "hardpoint.process.engine.run",
    "hardpoint.llm",
    "hypothesis",
    "pytest",
)


Fork = Callable[[list[str], str, dict[str, str], dict[int, int], bool], int]
"""Starts a program with arguments, a folder, an environment, descriptors by the numbers that they
get, and whether it is in a session of its own; returns its process id."""


class ForkedPython:
    """The test's side: one interpreter, which forks for each program.

    Attributes:
        environment: the one that it was started with.
    """

    def __init__(self) -> None:
        """Start the interpreter; it ends with this process."""
        self.environment = dict(os.environ)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "support.process.forked_python", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
            env=one_thread(os.environ),
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()

    def run(
        self,
        arguments: list[str],
        cwd: Path,
        environment: dict[str, str],
        timeout_s: float = 300,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run `python *arguments`, where these begin with -c, -m or a file.

        Raises:
            subprocess.TimeoutExpired: it was killed.
        """
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(stdin.encode())
            files[0].seek(0)
            streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
            fork = functools.partial(self.fork, is_torn_down=False)
            program = _ForkedPopen(fork, arguments, cwd=cwd, env=environment, **streams)
            try:
                code = program.wait(timeout_s)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
                raise
            for file in files[1:]:
                file.seek(0)
            outputs = [file.read().decode() for file in files[1:]]
        return subprocess.CompletedProcess(arguments, code, *outputs)

    def popen(
        self, arguments: list[str], *, is_torn_down: bool = True, **options: Any
    ) -> subprocess.Popen:
        """Start `python *arguments`, where these begin with -c, -m or a file.

        Args:
            is_torn_down: as of `fork`.
            options: `cwd`, `env`, `pass_fds`, `start_new_session`, streams and their encoding, as
                of `subprocess.Popen`.
        """
        fork = functools.partial(self.fork, is_torn_down=is_torn_down)
        return _ForkedPopen(fork, arguments, **options)

    def fork(
        self,
        arguments: list[str],
        cwd: str,
        environment: dict[str, str],
        descriptors: dict[int, int],
        has_session: bool,
        *,
        is_torn_down: bool = True,
    ) -> int:
        """Return the process id of a fork that runs a program with these descriptors.

        `is_torn_down`: whether its modules are taken apart at its end.
        """
        return request_program(
            self._control,
            arguments,
            cwd,
            environment,
            descriptors,
            has_session,
            is_torn_down=is_torn_down,
        )

    def fork_server(self, control: socket.socket, path: list[str]) -> int:
        """Return the process id of a fork that serves engine processes.

        Args:
            control: its end of the socket for requests.
            path: `sys.path` of the engine processes.
        """
        request = {"environment": dict(os.environ), "path": path}
        return request_fork(self._control, request, [control.fileno()])


class _Forked(subprocess.Popen):
    """A program that is a fork of the interpreter, or may be one."""

    def fork(self, fork: Fork, args: list[str], *options: Any) -> None:
        """Fork instead of starting a program; the options are the same as of `_execute_child`."""
        passed, cwd, environment = options[3:6]
        stdin, _, _, stdout, _, stderr = pipes = options[9:15]
        has_session = options[20]
        streams = enumerate((stdin, stdout, stderr))
        descriptors = {n: n if descriptor == -1 else descriptor for n, descriptor in streams}
        descriptors |= {descriptor: descriptor for descriptor in passed}
        environment = dict(os.environ if environment is None else environment)
        self.pid = fork(args[1:], str(cwd or Path.cwd()), environment, descriptors, has_session)
        self._child_created = True
        self._close_pipe_fds(*pipes)


class _ForkedPopen(_Forked):
    """A program that is a fork of the interpreter."""

    def __init__(self, fork: Fork, arguments: list[str], **options: Any) -> None:
        self._fork = fork
        super().__init__([sys.executable, *arguments], **options)

    def _execute_child(self, args: list[str], *options: Any) -> None:
        self.fork(self._fork, args, *options)


@cache
def forked_python() -> ForkedPython:
    """Return this process's interpreter."""
    return ForkedPython()


def _serve(control: socket.socket) -> None:
    """Fork for each program, and run it in the forks."""
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base = [path for path in sys.path[1:] if path not in added]
    for name in _IMPORTED:
        importlib.import_module(name)
    read_metadata_once()
    check_builtins_once()
    import_builtins()
    _run_request(base, *fork_on_request(control))


def _run_request(base: list[str], request: dict[str, Any], descriptors: list[int]) -> None:
    """Run the program of a request, or a server; `base` is the end of the program's `sys.path`."""
    if "path" in request:
        _be_server(request, socket.socket(fileno=descriptors[0]))
        return
    if request["has_session"]:
        os.setsid()
    number_descriptors(descriptors, request["descriptors"])
    _open_streams(unbuffered=bool(request["environment"].get("PYTHONUNBUFFERED")))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [path for path in paths if path] + base
    importlib.invalidate_caches()
    delay_if_stressed()
    _fork_servers(STARTS.fork_server(functools.partial(_run_request, base)))
    if request["is_torn_down"]:
        _run(request["arguments"])
    else:
        run_and_leave(functools.partial(_run, request["arguments"]))


def _be_server(request: dict[str, Any], control: socket.socket) -> None:
    """Serve engine processes, as a process that was started to do so."""
    os.setsid()
    os.chdir("/")
    os.environ.clear()
    os.environ.update(one_thread(request["environment"]))
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    serve_engines(control)


def _fork_servers(forks: ForkServer) -> None:
    """Let this program start `hardpoint serve` by forks, as `hardpoint.testing.serve` does."""

    class Popen(_Forked):
        def _execute_child(self, args: list[str], *options: Any) -> None:
            environment = dict(os.environ if options[5] is None else options[5])
            is_server = args[:4] == [sys.executable, "-m", "hardpoint", "serve"]
            if is_server and forks.has_read(environment):
                self.fork(forks.fork_program, args, *options)
            else:
                super()._execute_child(args, *options)

    subprocess.Popen = Popen


def _open_streams(*, unbuffered: bool) -> None:
    """Open the standard streams again: the interpreter's are other kinds of files."""
    for name, descriptor in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        file = open(  # noqa: SIM115 - open to the end
            descriptor,
            "r" if name == "stdin" else "w",
            encoding=old.encoding,
            errors=old.errors,
            closefd=False,
        )
        if name == "stderr" or (unbuffered and name == "stdout"):
            file.reconfigure(write_through=True)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def _run(arguments: list[str]) -> None:
    """Be as an interpreter that was started with these arguments."""
    kind, *others = arguments
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-m":
        import runpy

        sys.argv[:] = others
        sys.path.insert(0, os.getcwd())
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        text, file = others[0], "<string>"
        sys.argv[:] = ["-c", *others[1:]]
        sys.path.insert(0, "")
    else:
        text, file = Path(kind).read_text(), os.path.abspath(kind)
        sys.argv[:] = arguments
        sys.path.insert(0, os.path.dirname(file))
        main.__file__ = file
    exec(compile(text, file, "exec"), vars(main))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
