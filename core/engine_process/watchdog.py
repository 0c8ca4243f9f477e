"""Tells of steps that hang."""

from __future__ import annotations

import faulthandler
import time

__all__ = ["Watchdog"]

_SLACK = 0.1


class Watchdog:
    """Has the stacks of all threads written to stderr when a step takes too long.

    It does so from outside of Python, so that it works whatever the step hangs in. Setting its
    timer costs more than a small step, so the timer is set anew only when a tenth of its time is
    over: a step is reported after 1 to 1.1 times the limit.
    """

    def __init__(self, seconds: float, *, exits: bool = False) -> None:
        """Watch nothing yet.

        Args:
            seconds: the limit; 0 watches nothing at all.
            exits: whether a step that takes longer also ends the process, at once.
        """
        self._seconds = seconds
        self._exits = exits
        self._set_at: float | None = None

    def step_begins(self) -> None:
        """Give the step that begins its time."""
        if not self._seconds:
            return
        now = time.monotonic()
        if self._set_at is None or now - self._set_at > self._seconds * _SLACK:
            timeout = self._seconds * (1 + _SLACK)
            faulthandler.dump_traceback_later(timeout, exit=self._exits)
            self._set_at = now

    def rest(self) -> None:
        """Watch nothing until the next step."""
        if self._set_at is not None:
            faulthandler.cancel_dump_traceback_later()
            self._set_at = None
