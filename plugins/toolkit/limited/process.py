"""A program in a process with limits, which answers one request after the other."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint.errors import EngineClosedError, HardpointError

from . import program as limited_program
from .fair_lock import FairLock
from .program import read_frame, write_frame

_START_SECONDS = 60.0


class LimitedProcess:
    """Runs a program in a process of its own, which starts with the first request.

    Usable from several threads, which wait for each other by a `FairLock`. A process that took too
    much time or memory ends, and the next request starts another one; a fork of the caller starts
    its own.
    """

    def __init__(
        self,
        program: str | Path,
        purpose: str,
        *,
        seconds: float,
        max_bytes: int,
        max_answer_bytes: int,
        needs: str,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Start nothing.

        Args:
            program: path of a file with a function `start`; see `program`.
            purpose: its task, for messages: "to decode images".
            seconds: time limit of a request.
            max_bytes: memory that the process may use.
            max_answer_bytes: maximum size of an answer.
            needs: package that the program imports, for messages.
            settings: plain data that `start` gets.
        """
        self._program, self._purpose, self._needs = str(program), purpose, needs
        self._seconds, self._max_bytes = seconds, max_bytes
        self._max_answer_bytes = max_answer_bytes
        self._settings = dict(settings or {})
        self._locks: dict[int, FairLock] = {}  # by process: a fork copies one that may be taken
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = self._is_idle = False
        self._owner = 0  # the process that started it; a fork of it starts another one

    def ask(self, *parts: bytes, owner: str = "") -> bytes | None:
        """Return the answer to a request; None if it took too much time or memory.

        Args:
            parts: parts of the request, which are sent one after the other.
            owner: whom the request is of; owners have turns.

        Raises:
            HardpointError: no process can be started.
            EngineClosedError: it was closed, perhaps while others were answered.
        """
        with self._lock.turn(owner):
            if self._is_closed:
                raise EngineClosedError(f"the process {self._purpose} was closed")
            if self._owner != os.getpid():
                self._process = None
            # A process that may still answer an earlier request would give that answer to this one.
            if self._process is None or not self._is_idle or self._process.poll() is not None:
                self._end()
                self._start()
            return self._exchange(parts, self._seconds)

    @property
    def _lock(self) -> FairLock:
        return self._locks.setdefault(os.getpid(), FairLock())

    @property
    def pid(self) -> int | None:
        """The id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process after the request that it answers; there is no other one after it."""
        self._is_closed = True
        with self._lock.turn(""):
            self._end()

    def _start(self) -> None:
        self._is_idle = False
        if not sys.executable:
            raise HardpointError(
                f"sys.executable: expected the path of a Python interpreter {self._purpose} with, "
                f"got none"
            )
        settings = {
            "path": sys.path,
            "program": self._program,
            "seconds": self._seconds,
            "max_bytes": self._max_bytes,
            "settings": self._settings,
        }
        command = [sys.executable, "-I", str(limited_program.__file__), json.dumps(settings)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
            )
        except (OSError, ValueError) as cause:
            raise HardpointError(
                f"a process {self._purpose}: {command[0]} did not start: {cause}"
            ) from cause
        self._owner = os.getpid()
        if self._exchange(None, _START_SECONDS) is None:
            raise HardpointError(
                f"a process {self._purpose}: {command[0]} did not start it; is {self._needs} "
                f"installed there?"
            )

    def _exchange(self, parts: tuple[bytes, ...] | None, seconds: float) -> bytes | None:
        """Send a request, if there is one, and return the answer.

        None, and the process is ended, if none came.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        answer: bytes | None = None
        self._is_idle = False
        try:
            timer.start()
            if parts is not None:
                write_frame(process.stdin, *parts)
            answer = read_frame(process.stdout, self._max_answer_bytes)
        except OSError:  # it has ended
            return None
        except RuntimeError as cause:  # no thread is left
            raise HardpointError(f"a process {self._purpose} has no time limit: {cause}") from cause
        finally:
            timer.cancel()
            if answer is None:  # an interrupt leaves half an answer, too
                self._end()
        self._is_idle = True
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            with contextlib.suppress(OSError):  # unread input is lost
                process.communicate()
