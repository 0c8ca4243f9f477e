"""Starts child processes of tests by forking a process with loaded imports.

An engine process takes 1.5 to 2 seconds of processor time to import; a fork takes milliseconds.
The fork becomes a child of the test's process and behaves like a started one: it has the same
environment, standard descriptors and working directory, and is in a session of its own. Where
that could not be the same (other environment, other program, other interpreter options), and in
tests marked `fresh_process`, the engine process is started as always.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_ABOVE = 2048  # the descriptors of any test
# Torch, Ray and scikit-learn, which sentence-transformers imports, set theirs at their import; but
# engine processes do not import the last two. Those of tests themselves begin with TESTS_.
_CHANGING = (
    *("HARDPOINT__", "PYTEST_", "TESTS_", "TORCHINDUCTOR_CACHE_DIR", "KMP_", "RAY_"),
    "PYTHONBREAKPOINT",  # which Ray sets, too
    *("NOTIFY_SOCKET", "WATCHDOG_"),  # which a server removes
)

FORKED_RANKS = "TESTS_FORKED_RANKS"
"""Environment variable: engine processes start their ranks by forks, too."""

RunProgram = Callable[[dict[str, Any], list[int]], None]

_ONE_REQUEST = threading.Lock()
"""Held while this process adopts a fork, of whichever server."""


class ForkedProcess(subprocess.Popen):
    """A process of the fork server with the interface of a child process."""

    def __init__(self, command: list[str], pid: int) -> None:
        """Take over the child process `pid`."""
        self.args = command
        self.pid = pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


class ForkServer:
    """The test's side of the fork server."""

    def __init__(self, run_program: RunProgram | None = None) -> None:
        """Start the server; it ends with this process.

        Args:
            run_program: makes the server a fork of this process, which has no threads and has
                imported what engine processes need; it is called in forks that are to be
                programs, with the request and its descriptors.
        """
        from hardpoint.process.child_processes import process
        from hardpoint.process.child_processes.launch import Interpreter

        interpreter = Interpreter.current()
        self._command = [*interpreter.command, str(Path(process.__file__).with_name("__main__.py"))]
        self._environment = _fixed(os.environ)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.set_inheritable(False)
        if run_program is not None:
            self._popen: subprocess.Popen = self._fork_server(theirs, run_program)
        elif (python := _shared_python(interpreter.flags)) is not None:
            self._popen = ForkedProcess([], python.fork_server(theirs, interpreter.path))
        else:
            self._popen = subprocess.Popen(
                [*interpreter.command, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=one_thread(os.environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            self._control.send(json.dumps(interpreter.path).encode())
        theirs.close()

    def _fork_server(self, control: socket.socket, run_program: RunProgram) -> ForkedProcess:
        """Fork this process; the fork serves, and its own forks are engine processes, or programs
        that the requests name.
        """
        if pid := os.fork():
            return ForkedProcess([], pid)
        self._control.close()
        os.setsid()
        os.chdir("/")
        # Else who reads what the program writes would wait for the end of this process, too.
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        os.close(nothing)
        request, descriptors = fork_on_request(control)
        if "arguments" in request:
            run_program(request, descriptors)
        else:
            _become(request, descriptors)
            _run_child()
        sys.exit()

    def has_read(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with this environment would have imported the same.

        Forks get the `sys.path` that they ask for.
        """
        return reads_alike(environment, self._environment) and self._popen.poll() is None

    def serves(self, command: list[str], options: dict[str, Any]) -> bool:
        """Whether a fork equals the process that these arguments of `Popen` start."""
        return (
            command[:-3] == self._command
            and {name for name, value in options.items() if value is not None} - {"stderr"}
            == {"stdin", "cwd", "pass_fds", "start_new_session"}
            and not self.changed_variables()
            and self._popen.poll() is None
        )

    def changed_variables(self) -> list[str]:
        """Return the names of environment variables that differ from those of the server."""
        pairs = _fixed(os.environ).items() ^ self._environment.items()
        return sorted({name for name, _ in pairs})

    def fork(self, command: list[str], options: dict[str, Any]) -> ForkedProcess:
        """Return a new child process, which has the descriptors of the options of `Popen`."""
        passed = list(options["pass_fds"])
        request = {
            "cwd": os.path.abspath(options["cwd"]),
            "environment": dict(os.environ),
            "argv": command[-4:],
            "descriptors": [1, 2, *passed],
        }
        stderr = options.get("stderr")
        streams = [1, 2 if stderr is None else stderr]
        pid = request_fork(self._control, request, [*streams, *passed])
        return ForkedProcess(command, pid)

    def fork_program(
        self,
        arguments: list[str],
        cwd: str,
        environment: dict[str, str],
        descriptors: dict[int, int],
        has_session: bool,
    ) -> int:
        """Return the process id of a fork that runs `python *arguments`."""
        return request_program(self._control, arguments, cwd, environment, descriptors, has_session)


class EngineStarts:
    """Decides how the engine processes of tests are started; stands in for `subprocess.Popen`.

    Attributes:
        forks: whether the current test may have forked ones.
        not_forked: numbers of processes that were started, by the environment variables that
            tests or imports had changed.
    """

    def __init__(self) -> None:
        """Prepare; the server starts with the first engine process."""
        self.forks = False
        self.not_forked: Counter[str] = Counter()
        self._server: ForkServer | None = None
        self._lock = threading.Lock()

    def install(self) -> None:
        """Take the place of `Popen` for the module that starts engine processes."""
        from hardpoint.process.child_processes import process

        module = types.ModuleType("subprocess")
        vars(module).update(vars(subprocess))
        module.Popen = self
        process.subprocess = module

    def start_server(self) -> None:
        """Start the server, unless it runs."""
        with self._lock:
            self._server = self._server or ForkServer()

    def fork_server(self, run_program: RunProgram) -> ForkServer:
        """Let this process, which has no threads yet, start its engine processes by forks."""
        self._server = ForkServer(run_program)
        self.forks = True
        self.install()
        return self._server

    def __call__(self, command: list[str], **options: Any) -> subprocess.Popen:
        if self.forks:
            self.start_server()
            if self._server.serves(command, options):
                return self._server.fork(command, options)
            if changed := self._server.changed_variables():
                self.not_forked[", ".join(changed)] += 1
        return subprocess.Popen(command, **options)


STARTS = EngineStarts()


def _fixed(environment: dict[str, str]) -> dict[str, str]:
    """Return the files that a process may have read while it imported."""
    return {name: value for name, value in environment.items() if not name.startswith(_CHANGING)}


def reads_alike(first_output: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether processes with these environments import the same, but for `sys.path`."""
    first, second = ({**_fixed(each), "PYTHONPATH": ""} for each in (first_output, other))
    return first == second


def _shared_python(flags: list[str]) -> Any:
    """Return the interpreter that runs the programs of tests; None if it is of another kind."""
    from support.process.forked_python import forked_python

    python = forked_python()
    has_options = bool({*flags} - {"-B"})
    is_alike = reads_alike(os.environ, python.environment) and not has_options
    return python if is_alike else None


def one_thread(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server: numpy starts no threads of OpenBLAS at its import."""
    return {**environment, "OPENBLAS_NUM_THREADS": "1"}


def request_program(
    control: socket.socket,
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    descriptors: dict[int, int],
    has_session: bool,
    *,
    is_torn_down: bool = False,
) -> int:
    """Return the process id of a fork that runs a program with descriptors of these numbers."""
    request = {
        "arguments": arguments,
        "cwd": cwd,
        "environment": environment,
        "descriptors": list(descriptors),
        "has_session": has_session,
        "is_torn_down": is_torn_down,
    }
    return request_fork(control, request, list(descriptors.values()))


def request_fork(control: socket.socket, request: object, descriptors: list[int]) -> int:
    """Return the process id of a fork for a request, which is a child of this process."""
    with _ONE_REQUEST:
        # The fork is orphaned by the server, and so becomes a child of this process.
        _be_subreaper(True)
        try:
            socket.send_fds(control, [json.dumps(request).encode()], descriptors)
            pid = int(control.recv(64))
            assert control.recv(64) == b"orphaned"
        finally:
            _be_subreaper(False)
    return pid


def _be_subreaper(on: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def import_builtins() -> None:
    """Import the built-in components that are enabled by default: each engine needs most of them.

    That takes half a second of processor time.
    """
    from hardpoint.host.registry.plugin_set import resolve_plugins
    from hardpoint.plugins import EngineConfig

    plugins = resolve_plugins(EngineConfig())
    for entry in plugins.manifest.entries:
        plugins.target(entry)


def run_engine_once() -> None:
    """Run an engine in this process: forks share its loaded, checked and cached data."""
    from hardpoint import LLM
    from hardpoint.testing import scripted_config, write_scripted_model

    for name in os.environ.keys() - _fixed(os.environ).keys():  # those of the test that starts it
        del os.environ[name]
    with tempfile.TemporaryDirectory() as folder:
        config = scripted_config(write_scripted_model(Path(folder) / "model"))
        with LLM(config=config) as llm:
            llm.generate("warm")


def fork_on_request(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; return it with its descriptors, in the forks alone."""
    for finalizer in list(vars(weakref.finalize)["_registry"]):
        # Those of torch take 30 ms at the end of each fork.
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # forks need not visit, and so copy, these objects
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 16)
        if not data:
            os._exit(0)
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                control.send(str(pid).encode())
                os._exit(0)
            control.close()
            return json.loads(data), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        control.send(b"orphaned")


def number_descriptors(descriptors: list[int], numbers: list[int]) -> None:
    """Give the descriptors these numbers."""
    # First above all numbers that are asked for, so that none takes the place of another.
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, wanted in zip(above, numbers, strict=True):
        os.dup2(descriptor, wanted)
        os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be as a process that was started with the command of the request."""
    os.setsid()
    number_descriptors(descriptors, request["descriptors"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["argv"]
    importlib.invalidate_caches()
    delay_if_stressed()


def delay_if_stressed() -> None:
    """Delay this child process as `scripts/test --stress` delays its parent."""
    if "HARDPOINT_TEST_STRESS" in os.environ:
        importlib.import_module("support.stress").install_in_child()


def _run_child() -> None:
    from hardpoint.process.child_processes.__main__ import main

    if os.environ.pop(FORKED_RANKS, ""):
        STARTS.fork_server(lambda request, descriptors: None)
    run_and_leave(main)


def run_and_leave(run: Callable[[], object]) -> None:
    """Run a program, and end as an interpreter does, but leave its modules as they are.

    To take apart what a fork shares with its parent copies all of it, which takes 0.2 to 0.3
    seconds of processor time. An exception ends the process as ever.
    """
    code: object = None
    try:
        run()
    except SystemExit as end:
        code = end.code
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    for module, name in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        getattr(module, name)()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed
            stream.flush()
    os._exit((code or 0) & 0xFF)


def serve_engines(control: socket.socket) -> None:
    """Fork for each engine process that is asked for, and be it in the forks."""
    importlib.import_module("hardpoint.process.child_processes.child")
    importlib.import_module("hardpoint.process.engine.run")
    importlib.import_module("hardpoint.testing.scripted")
    import_builtins()
    run_engine_once()
    _become(*fork_on_request(control))
    _run_child()


if __name__ == "__main__":
    _control = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(_control.recv(1 << 20))
    importlib.import_module("support.installed_metadata").read_metadata_once()
    importlib.import_module("support.checked_builtins").check_builtins_once()
    serve_engines(_control)
