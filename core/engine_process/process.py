"""The parent's side of an engine process: starting it, hearing of its end, ending it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
import weakref
from pathlib import Path

import msgspec

from hardpoint.plugins import HardpointError, errors
from hardpoint.plugins.errors import EngineDeadError

from .__main__ import LENGTH
from .launch import Interpreter, Launch


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of another process.

    Attributes:
        types: its class and that class's bases, nearest first, as `module:name`.
        message: its text.
        notes: what was added to it.
        traceback: with causes, without its last lines, which are class and message.
    """

    types: list[str]
    message: str
    notes: list[str]
    traceback: str

    @classmethod
    def of(cls, frame: bytes) -> Failure | None:
        """Return what a frame of the launch socket says, None if it is not complete."""
        if len(frame) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(frame)
        body = frame[LENGTH.size : LENGTH.size + length]
        return msgspec.convert(json.loads(body), cls) if len(body) == length else None

    def error(self, pid: int) -> HardpointError:
        """Return it as the same class of Hardpoint's tree; its traceback is a note.

        Classes that a plugin made are taken as the class of the tree that they derive from, and
        all others as EngineDeadError.
        """
        known = {f"{errors.__name__}:{name}": getattr(errors, name) for name in errors.__all__}
        own = next((known[name] for name in self.types if name in known), None)
        if own is not None:
            error: HardpointError = own(self.message)
        else:
            name = self.types[0].removeprefix("builtins:").replace(":", ".")
            error = EngineDeadError(
                f"the engine process (pid {pid}) failed: {name}: {self.message}"
            )
        for note in self.notes:
            error.add_note(note)
        error.add_note(f"In the engine process (pid {pid}):\n{self.traceback.rstrip()}")
        return error


_PROGRAM = Path(__file__).with_name("__main__.py")
_SEND_TIMEOUT_S = 60.0
_GRACE_S = 5.0
_ENDING_S = 5.0


class EngineProcess:
    """A running child process.

    It is in a session of its own: Ctrl-C in the terminal reaches the parent alone, which decides
    what becomes of the engine. It ends when the parent ends in whatever way, when `close` is
    called, and when this object is collected.

    A process forked from the parent has a copy of this object that does nothing to the child.
    """

    def __init__(self, popen: subprocess.Popen[bytes], channel: socket.socket) -> None:
        """Take over a child and the parent's end of its launch socket; `start` makes both."""
        self._popen = popen
        self._channel = channel
        self._pidfd = _open_pidfd(popen.pid)
        self._owner = os.getpid()
        self._heard = bytearray()
        self._deaf = False
        self._receive_lock = threading.Lock()
        self._release = weakref.finalize(
            self, _release, popen, channel, self._pidfd, self._owner, _GRACE_S
        )

    @classmethod
    def start(
        cls, launch: Launch, interpreter: Interpreter | None = None, *, program: Path = _PROGRAM
    ) -> EngineProcess:
        """Start a child and give it its launch; return before it is ready.

        Args:
            launch: what the engine needs.
            interpreter, program: as for `spawn`.

        Raises:
            EngineDeadError: it cannot be started, or does not take its launch.
        """
        process = cls.spawn(interpreter, program=program)
        process.launch(launch)
        return process

    @classmethod
    def spawn(
        cls, interpreter: Interpreter | None = None, *, program: Path = _PROGRAM
    ) -> EngineProcess:
        """Start a child, which imports what it will need while it waits for its launch.

        Args:
            interpreter: what to start; None is one like this process's own.
            program: what the child runs, a file that calls `main` of its `__main__`.

        Raises:
            EngineDeadError: it cannot be started.
        """
        interpreter = interpreter or Interpreter.current()
        ours, theirs = (_above_standard(end) for end in socket.socketpair())
        command = [*interpreter.command, str(program), "--launch-fd", str(theirs.fileno())]
        try:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                cwd=interpreter.directory or "/",  # MKL, for one, does not load from nowhere
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as cause:
            ours.close()
            raise EngineDeadError(f"the engine process could not be started: {cause}") from cause
        finally:
            theirs.close()
        process = cls(popen, ours)
        process._tell(interpreter.encode())
        return process

    def launch(self, launch: Launch) -> None:
        """Tell the child what it is to do; it is closed if it does not listen.

        Raises:
            EngineDeadError: it does not take its launch.
        """
        self._tell(launch.encode())

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._popen.pid

    @property
    def sentinels(self) -> list[int]:
        """Descriptors to poll; one becomes readable when `failure` has something to tell."""
        return [self._channel.fileno(), *([] if self._pidfd is None else [self._pidfd])]

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of a signal, or None while it runs."""
        # Not `poll`, which says None while another thread is about to find out.
        return self.wait(0)

    @property
    def description(self) -> str:
        """The state in words, such as `the engine process (pid 7) exited with code 3`."""
        return f"the engine process (pid {self.pid}) {_ending(self.returncode)}"

    @property
    def reported(self) -> bool:
        """Whether it was heard from the child itself that it fails."""
        return Failure.of(bytes(self._heard)) is not None

    def failure(self) -> HardpointError | None:
        """Return why the child serves no more, or None if it is well, as far as is known.

        It is what was raised in the child if it could say so, with the child's traceback as a
        note; else how it ended. Safe in any thread.
        """
        with self._receive_lock:
            return self._failure()

    def _failure(self) -> HardpointError | None:
        if (failure := self._heard_failure()) is not None:
            return failure
        # One that has closed its end is about to be gone.
        if self.wait(_ENDING_S if self._deaf else 0) is not None:
            return self._heard_failure() or EngineDeadError(self.description)
        if self._deaf:
            return EngineDeadError(
                f"the engine process (pid {self.pid}) does not serve any more, and does not end"
            )
        return None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; return the exit code, or None if it did not come in time."""
        if self._pidfd is None or self._popen.returncode is not None:
            try:
                return self._popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        ended = poller.poll(None if timeout_s is None else timeout_s * 1000)
        return self._popen.wait() if ended else None

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        self._popen.terminate()

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        self._popen.kill()

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Let go of the child, which then ends itself; kill it after `grace_s` seconds."""
        if self._release.detach():
            _release(self._popen, self._channel, self._pidfd, self._owner, grace_s)

    def _tell(self, frame: bytes) -> None:
        """Send a frame; a child that ended meanwhile is found by `failure`."""
        self._channel.settimeout(_SEND_TIMEOUT_S)
        try:
            self._channel.sendall(LENGTH.pack(len(frame)) + frame)
        except TimeoutError:
            self.close(grace_s=0)
            raise EngineDeadError(
                f"the engine process (pid {self.pid}) did not take its launch within "
                f"{_SEND_TIMEOUT_S:.0f} s"
            ) from None
        except (BrokenPipeError, ConnectionResetError):
            pass
        self._channel.setblocking(False)

    def _heard_failure(self) -> HardpointError | None:
        """Return what the child has said was raised in it."""
        self._listen()
        failure = Failure.of(bytes(self._heard))
        return None if failure is None else failure.error(self.pid)

    def _listen(self) -> None:
        """Take in what the child has said."""
        while not self._deaf:
            try:
                part = self._channel.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            self._heard += part
            self._deaf = not part


def _release(
    popen: subprocess.Popen[bytes],
    channel: socket.socket,
    pidfd: int | None,
    owner: int,
    grace_s: float,
) -> None:
    """End a child and give back what it took."""
    if os.getpid() != owner:
        popen.returncode = 0  # it is not ours to wait for
    else:
        # Closing alone would not do: a forked process may hold the socket open.
        try:
            channel.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        try:
            popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
    channel.close()
    if pidfd is not None:
        os.close(pidfd)


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor of a process, or None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _above_standard(end: socket.socket) -> socket.socket:
    """Return a socket whose descriptor is none of 0, 1 and 2, which a program may have closed."""
    if end.fileno() > 2:
        return end
    higher = _above_standard(end.dup())
    end.close()
    return higher


def _ending(code: int | None) -> str:
    if code is None:
        return "is running"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"
