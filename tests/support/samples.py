"""Mechanisms that test plugins share: contract numbers, time, and resources that they leave."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

_OF_BASE: Any = object()


class Sample:
    """States a contract in each subclass: the loader reads it from a class, not from its bases.

    `class Right(Sample, Pooler, contract=1)` states it for whatever derives from `Right`, and
    `contract=None` leaves one class without it.
    """

    def __init_subclass__(cls, *, contract: int | None = _OF_BASE, **options: Any) -> None:
        """State the given contract, or the contract of the bases."""
        super().__init_subclass__(**options)
        if contract is _OF_BASE:
            contract = getattr(cls, "contract", None)
        if contract is not None:
            cls.contract = contract


class ScriptedClock:
    """A clock that slow samples advance: they are slow on every machine, and cost no time."""

    def __init__(self) -> None:
        """Begin at 0."""
        self._spent = 0.0

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        self._spent += seconds

    def spent(self) -> float:
        """Return the seconds that samples spent, for suites that measure costs."""
        return self._spent

    def passed(self) -> float:
        """Return passed seconds plus the seconds spent by samples, for suites that wait."""
        return time.monotonic() + self._spent


CLOCK = ScriptedClock()
spend = CLOCK.spend

_LEFT: list[tuple[threading.Thread, threading.Event]] = []


def leave_thread(name: str | None = None) -> None:
    """Start a thread that runs until `end_threads`, for samples that leave theirs behind."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name=name, daemon=True)
    _LEFT.append((thread, ended))
    thread.start()


def end_threads() -> None:
    """End the threads that were left."""
    while _LEFT:
        thread, ended = _LEFT.pop()
        ended.set()
        thread.join()


_FILES: list[IO[bytes]] = []
_PATHS: set[Path] = set()
_PROCESSES: list[subprocess.Popen[bytes]] = []


def leave_file() -> None:
    """Open a file, and keep it open until `remove_left`."""
    _FILES.append(tempfile.TemporaryFile())  # noqa: SIM115


def leave_path(path: Path) -> None:
    """Write a file that is there until `remove_left`."""
    path.write_text("left")
    _PATHS.add(path)


def leave_process() -> None:
    """Start a program that runs until `remove_left`."""
    program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    _PROCESSES.append(subprocess.Popen(program, stdin=subprocess.PIPE))


def remove_left() -> None:
    """Remove the files, and end the processes, that were left."""
    while _FILES:
        _FILES.pop().close()
    while _PATHS:
        _PATHS.pop().unlink()
    while _PROCESSES:
        process = _PROCESSES.pop()
        process.stdin.close()
        process.wait()
