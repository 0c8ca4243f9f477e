"""Runs Python programs in forks of an interpreter that has imported Hardpoint and torch.

Importing them takes 2 seconds of processor time, and tests run about a hundred programs. A fork has
the program's own `__main__`, arguments, `sys.path`, environment and working directory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from functools import cache
from pathlib import Path

_IMPORTED = ("hardpoint.core.build", "hardpoint.core.engine_process.run", "pytest", "hypothesis")


class ForkedPython:
    """The test's side: one interpreter, which runs one program at a time."""

    def __init__(self) -> None:
        """Start the interpreter; it ends with this process."""
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._popen = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            # numpy starts OpenBLAS's threads when it is imported; torch starts its own on use.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
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
        request = {"arguments": arguments, "cwd": str(cwd), "environment": environment}
        with self._lock, contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(stdin.encode())
            files[0].seek(0)
            frames = [json.dumps(request).encode()]
            socket.send_fds(self._control, frames, [file.fileno() for file in files])
            pid = int(self._control.recv(64))
            self._control.settimeout(timeout_s)
            try:
                code = int(self._control.recv(64))
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._control.settimeout(None)
                self._control.recv(64)
                raise subprocess.TimeoutExpired(arguments, timeout_s) from None
            finally:
                self._control.settimeout(None)
            for file in files[1:]:
                file.seek(0)
            outputs = [file.read().decode() for file in files[1:]]
        return subprocess.CompletedProcess(arguments, code, *outputs)


@cache
def forked_python() -> ForkedPython:
    """Return this process's interpreter."""
    return ForkedPython()


def _serve(control: socket.socket) -> list[str]:
    """Run a fork per request; return a program's arguments in the forks alone."""
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base = [path for path in sys.path[1:] if path not in added]
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forks need not visit, and so copy, these objects
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not data:
            os._exit(0)
        request = json.loads(data)
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
        if (pid := os.fork()) == 0:
            control.close()
            for descriptor, standard in zip(descriptors, (0, 1, 2), strict=True):
                os.dup2(descriptor, standard)
                os.close(descriptor)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["environment"])
            paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            sys.path[:] = [path for path in paths if path] + base
            importlib.invalidate_caches()
            return request["arguments"]
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())
        control.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


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
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
