"""Waiting for an event that a test needs, instead of assuming that it has happened by now."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 60.0


def wait_until(
    condition: Callable[[], object], limit_s: float = PATIENCE_S, what: str = "it to come to that"
) -> float:
    """Wait for a condition; return the seconds it took, or fail."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, f"waited {limit_s} s for {what}"
        time.sleep(0.005)
    return time.monotonic() - began


async def until(condition: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """Wait for a condition while the event loop goes on, or fail."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, f"waited {limit_s} s for {what}"
        await asyncio.sleep(0.005)


def call_interrupted(call: Callable[[], object], times: int = 300) -> None:
    """Call a function until a signal handler has raised KeyboardInterrupt so many times."""
    raised = 0

    def interrupt(*_: object) -> None:
        nonlocal raised
        raised += 1  # a callback of the garbage collector loses the exception
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(times):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, (10 + number % 40) * 1e-6)
                while raised == number:
                    call()
    finally:
        signal.signal(signal.SIGALRM, before)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def others_sleep() -> bool:
    """Whether no other thread of this process runs, ZMQ's own among them, where Linux tells."""
    states = set()
    for stat in Path("/proc/self/task").glob("*/stat"):
        if stat.parent.name != str(threading.get_native_id()):
            with contextlib.suppress(OSError):  # it has just ended
                states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states <= {"S"}


class HeldSteps:
    """Steps of requests with the plugin `slow` that take long, until they are let go."""

    def __init__(self, folder: Path) -> None:
        """Hold them; the folder gets two files."""
        self._begun, self._held = folder / "begun", folder / "held"
        self._held.touch()

    def slow(self, seconds: float = 60.0) -> dict[str, Any]:
        """Return `plugin_args` of such a request; each of its steps takes so long at most."""
        arguments = {"seconds": seconds, "begun": str(self._begun), "held": str(self._held)}
        return {"slow": arguments}

    def have_begun(self) -> bool:
        """Whether one of them has."""
        return self._begun.exists()

    def let_go(self) -> None:
        """Let them take no more time."""
        self._held.unlink(missing_ok=True)
