"""The parent's side of a child process: start it, watch it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self, TextIO

import msgspec

from hardpoint import errors
from hardpoint.errors import EngineDeadError
from hardpoint.host.system.control_groups import oom_kills
from hardpoint.plugins import HardpointError

from .__main__ import LENGTH
from .children import add_child
from .error_output import ErrorOutput, above_standard
from .launch import ChildLaunch, Interpreter


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of an exception that ended another process.

    Attributes:
        types: the classes of its MRO, as `module:name`.
        message: its text.
        notes: those of `add_note`.
        traceback: with causes, without its last lines, which are class and message.
    """

    types: list[str]
    message: str
    notes: list[str]
    traceback: str

    @classmethod
    def of(cls, frame: bytes) -> FailureReport | None:
        """Return the report in a frame of the launch socket, None if the frame is incomplete."""
        if len(frame) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(frame)
        body = frame[LENGTH.size : LENGTH.size + length]
        return msgspec.convert(json.loads(body), cls) if len(body) == length else None

    def error(self, process: str) -> HardpointError:
        """Return an error of the nearest class of Hardpoint's tree, with the traceback as a note.

        It is an EngineDeadError if no class of the MRO is in the tree.

        Args:
            process: names the process in messages.
        """
        known = {f"{errors.__name__}:{name}": getattr(errors, name) for name in errors.__all__}
        known_class = next((known[name] for name in self.types if name in known), None)
        if known_class is not None:
            error: HardpointError = known_class(self.message)
        else:
            name = self.types[0].removeprefix("builtins:").replace(":", ".")
            error = EngineDeadError(f"the {process} failed: {name}: {self.message}")
        for note in self.notes:
            error.add_note(note)
        error.add_note(f"In the {process}:\n{self.traceback.rstrip()}")
        return error


_PROGRAM = Path(__file__).with_name("__main__.py")
_SEND_TIMEOUT_S = 60.0
_GRACE_S = 5.0  # for the child to end itself, before it is killed
_EXIT_TIMEOUT_S = 5.0  # for the child to exit, after it has closed its end of the launch socket


class ChildProcess:
    """A running child process.

    It runs in a session of its own, so that Ctrl-C in the terminal reaches the parent alone. It
    ends when the parent ends in whatever way, when `close` is called, and when this object is
    collected. The copy of this object in a process that the parent forked does nothing.

    Attributes:
        title: names it in messages.
        run: the function that it runs by default, `package.module:function`; imported while the
            child waits for its launch, and called with the encoded launch and a ParentWatch.
        keeps_output: whether its death is reported with the last lines that it wrote to stderr.
        started_at: when it was started, in seconds of `time.monotonic`.
        passed_fds: in the child, the numbers of the descriptors that `spawn` passed.
    """

    title: ClassVar[str] = "child process"
    run: ClassVar[str]
    keeps_output: ClassVar[bool] = False
    passed_fds: tuple[int, ...] = ()

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        channel: socket.socket,
        output: ErrorOutput | None = None,
    ) -> None:
        """Take over a child and the parent's end of its launch socket, both from `spawn`.

        Args:
            channel: the launch socket.
            output: what it writes to stderr; None if it has the program's own.
        """
        self._popen = popen
        self.started_at = time.monotonic()
        self._channel = channel
        self._output = output
        self._pidfd = _open_pidfd(popen.pid)
        self._oom_kills = oom_kills()
        self._owner = os.getpid()
        add_child(self)
        self._received = bytearray()
        self._eof = False
        self._receive_lock = threading.Lock()
        self._release = weakref.finalize(
            self, _release, popen, channel, self._pidfd, self._owner, _GRACE_S, output
        )

    @classmethod
    def start(
        cls,
        launch: ChildLaunch,
        interpreter: Interpreter | None = None,
        *,
        program: Path = _PROGRAM,
    ) -> Self:
        """Start a child and send its launch; return before it is ready.

        Args:
            launch: the launch message.
            interpreter, program: as for `spawn`.

        Raises:
            EngineDeadError: it cannot be started, or does not take its launch.
        """
        process = cls.spawn(interpreter, program=program)
        process.launch(launch)
        return process

    @classmethod
    def spawn(
        cls,
        interpreter: Interpreter | None = None,
        *,
        program: Path = _PROGRAM,
        pass_fds: Sequence[int] = (),
        launch_seconds: float = 0.0,
    ) -> Self:
        """Start a child, which imports its modules while it waits for its launch.

        Args:
            interpreter: to start; None is one like this process's own.
            pass_fds: descriptors of which the child gets duplicates, with the numbers of
                `passed_fds`: those of stdin, stdout and stderr may be among them here.
            program: the file that the child runs, which calls `main` of `__main__.py`.
            launch_seconds: time limit of the launch, if it is longer than the child's default.

        Raises:
            EngineDeadError: it cannot be started.
        """
        interpreter = interpreter or Interpreter.current()
        ours, theirs = socket_pair()
        command = [*interpreter.command, str(program), "--launch-fd", str(theirs.fileno())]
        command.append(cls.run)
        stderr = _inherited_output(sys.__stderr__, 2)
        output = ErrorOutput(2 if stderr is None else None) if cls.keeps_output else None
        try:
            with contextlib.ExitStack() as duplicates:
                passed = []
                for descriptor in pass_fds:
                    passed.append(above_standard(descriptor))
                    duplicates.callback(os.close, passed[-1])
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    cwd=interpreter.directory or "/",  # MKL does not load without a directory
                    pass_fds=(theirs.fileno(), *passed),
                    start_new_session=True,
                    stdout=_inherited_output(sys.__stdout__, 1),
                    stderr=stderr if output is None else output.theirs,
                )
        except OSError as cause:
            ours.close()
            if output is not None:
                output.close()
            raise EngineDeadError(f"the {cls.title} could not be started: {cause}") from cause
        finally:
            theirs.close()
        if output is not None:
            output.start()
        process = cls(popen, ours, output)
        process.passed_fds = tuple(passed)
        process._send(interpreter.encode(launch_seconds))
        return process

    def launch(self, launch: ChildLaunch) -> None:
        """Send the launch; close the child if it does not read it.

        Raises:
            EngineDeadError: it does not take its launch.
        """
        self._send(launch.encode())

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._popen.pid

    @property
    def sentinels(self) -> list[int]:
        """Descriptors to poll; one becomes readable when `failure` may return an error."""
        return [self._channel.fileno(), *([] if self._pidfd is None else [self._pidfd])]

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of a signal, or None while it runs."""
        # Not `Popen.poll`, which returns None while another thread is in `Popen.wait`.
        return self.wait(0)

    @property
    def has_ended(self) -> bool:
        """Whether it does not run any more."""
        return self.returncode is not None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it; only on Linux."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    @property
    def label(self) -> str:
        """Its kind and its process id, for messages."""
        return f"{self.title} (pid {self.pid})"

    @property
    def description(self) -> str:
        """The state as text, such as `the engine process (pid 7) exited with code 3`."""
        code = self.returncode
        written = self._output.last() if self._output is not None and code is not None else ""
        last = f"; the last lines of its stderr:\n{written}" if written else ""
        return f"the {self.label} {self.ending}{last}"

    @property
    def ending(self) -> str:
        """How it ended, with the counts of the cgroup; these may be of another process of it."""
        code = self.returncode
        if code != -signal.SIGKILL or self._oom_kills is None:
            return ending(code)
        count = (oom_kills() or 0) - self._oom_kills
        if count <= 0:
            return ending(code)
        killed = "1 process that it killed" if count == 1 else f"{count} processes that it killed"
        return (
            f"{ending(code)}, probably by the kernel to get memory: since it started, the cgroup "
            f"has counted {killed} (oom_kill)"
        )

    @property
    def reported(self) -> bool:
        """Whether the child itself has reported its failure, as far as `failure` has read."""
        return FailureReport.of(bytes(self._received)) is not None

    def failure(self) -> HardpointError | None:
        """Return the error that the child reported, else its exit status; None while it serves.

        A reported error has the child's traceback as a note. Safe in any thread.
        """
        with self._receive_lock:
            return self._failure()

    def _failure(self) -> HardpointError | None:
        if (failure := self._reported_failure()) is not None:
            return failure
        # A child that has closed its end of the socket is about to exit.
        if self.wait(_EXIT_TIMEOUT_S if self._eof else 0) is not None:
            return self._reported_failure() or EngineDeadError(self.description)
        if self._eof:
            return EngineDeadError(f"the {self.label} does not serve any more, and does not end")
        return None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the exit; return the exit code, or None after the timeout."""
        return _exit_code(self._popen, self._pidfd, timeout_s)

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        self._popen.terminate()

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        self._popen.kill()

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Close the launch socket, which ends the child; kill it after `grace_s` seconds."""
        if self._release.detach():
            _release(self._popen, self._channel, self._pidfd, self._owner, grace_s, self._output)

    def _send(self, frame: bytes) -> None:
        """Send a frame; if the child has ended, `failure` will return that."""
        self._channel.settimeout(_SEND_TIMEOUT_S)
        try:
            self._channel.sendall(LENGTH.pack(len(frame)) + frame)
        except TimeoutError:
            self.close(grace_s=0)
            raise EngineDeadError(
                f"the {self.label} did not take its launch within {_SEND_TIMEOUT_S:.0f} s"
            ) from None
        except (BrokenPipeError, ConnectionResetError):
            pass
        self._channel.setblocking(False)

    def _reported_failure(self) -> HardpointError | None:
        self._receive()
        failure = FailureReport.of(bytes(self._received))
        return None if failure is None else failure.error(self.label)

    def _receive(self) -> None:
        """Read the messages of the child, without waiting."""
        while not self._eof:
            try:
                part = self._channel.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            self._received += part
            self._eof = not part


def _release(
    popen: subprocess.Popen[bytes],
    channel: socket.socket,
    pidfd: int | None,
    owner: int,
    grace_s: float,
    output: ErrorOutput | None,
) -> None:
    if os.getpid() != owner:
        popen.returncode = 0  # a fork cannot wait for it
        output = None
    else:
        # Closing is not enough: a forked process may hold the socket open.
        try:
            channel.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if _exit_code(popen, pidfd, grace_s) is None:
            popen.kill()
            popen.wait()
    channel.close()
    if pidfd is not None:
        os.close(pidfd)
    if output is not None:
        output.close()


def _exit_code(
    popen: subprocess.Popen[bytes], pidfd: int | None, timeout_s: float | None
) -> int | None:
    if pidfd is not None and popen.returncode is None:  # `Popen.wait` sleeps up to 50 ms at a time
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(None if timeout_s is None else timeout_s * 1000):
            return None
        timeout_s = None
    try:
        return popen.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets with descriptors above 2."""
    first, second = socket.socketpair()
    with first, second:
        return (
            socket.socket(fileno=above_standard(first.fileno())),
            socket.socket(fileno=above_standard(second.fileno())),
        )


def _inherited_output(stream: TextIO | None, descriptor: int) -> int | None:
    # Another file may have got its descriptor, and the engine would write its log into that.
    return None if stream is not None and _is_open(descriptor) else subprocess.DEVNULL


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


_CRASHES = {
    signal.Signals[name]
    for name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS")
    if name in signal.Signals.__members__
}
"""Signals by which a process ends because of what it does itself."""


def was_killed(code: int | None) -> bool:
    """Return whether a process with an exit code was ended by a signal that others send."""
    return code is not None and code < 0 and -code not in _CRASHES


def ending(code: int | None) -> str:
    """Return the end of a process as text, by its exit code; None stands for a running process."""
    if code is None:
        return "is running"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"
