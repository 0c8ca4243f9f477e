"""The time limit of an engine's start, from the start of its process to its ready response."""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

from hardpoint.errors import EngineDeadError

__all__ = ["StartBudget"]

_SETTING = "engine.start_timeout_seconds"
_STDLIB = sysconfig.get_path("stdlib")
_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = ("site-packages", "dist-packages")  # which may be folders of the standard library's

_log = logging.getLogger("hardpoint")


class StartBudget:
    """The time that a program has until its engine process is launched, of the whole limit.

    When the limit has passed, the code that runs in the starting thread is logged and kept for the
    error. The code itself is not interrupted, because Python has no safe way to do that.

    Attributes:
        passed: set once the limit has passed and the code is recorded.
    """

    def __init__(self, limit_s: float) -> None:
        """Begin; the calling thread starts the engine."""
        self.limit_s = limit_s
        self._began = time.monotonic()
        self._thread = threading.get_ident()
        self._place = ""
        self.passed = threading.Event()
        self._timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), self._record)
        self._timer.daemon = True
        self._timer.start()

    def check(self) -> None:
        """Check that the limit has not passed.

        Raises:
            EngineDeadError: it has; the message names the code that ran when it passed.
        """
        elapsed = time.monotonic() - self._began
        if elapsed <= self.limit_s:
            return
        self.passed.wait()
        raise EngineDeadError(
            f"the program took {elapsed:.0f} s to prepare the launch of the engine process, of "
            f"{self.limit_s:g} s for the whole start ({_SETTING}){self._place}"
        )

    def cancel(self) -> None:
        """End the watch."""
        self._timer.cancel()

    def _record(self) -> None:
        frame = sys._current_frames().get(self._thread)
        self._place = "" if frame is None else f"; slow was {_place(frame)}"
        _log.warning(
            "the engine process is not launched after %g s (%s)%s",
            self.limit_s,
            _SETTING,
            self._place,
        )
        self.passed.set()


def _place(frame: FrameType) -> str:
    """Return the innermost code of a plugin or library that Hardpoint calls, else the innermost."""
    frames = [frame]
    while (caller := frames[-1].f_back) is not None:
        frames.append(caller)
    files = [caller_frame.f_code.co_filename for caller_frame in frames]
    outermost = max((i for i, file in enumerate(files) if file.startswith(_PACKAGE)), default=0)
    slow = next((i for i, file in enumerate(files[:outermost]) if _is_foreign(file)), 0)
    code = frames[slow].f_code
    return f"{code.co_qualname}() in {code.co_filename}:{frames[slow].f_lineno}"


def _is_foreign(file: str) -> bool:
    """Return whether a file is of neither Hardpoint nor Python's standard library."""
    if file.startswith((_PACKAGE, "<")):
        return False
    return not file.startswith(_STDLIB) or any(name in file for name in _INSTALLED)
