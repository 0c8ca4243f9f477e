"""A timer that writes the stacks of all threads when a step takes too long."""

from __future__ import annotations

import faulthandler
import time
from typing import Protocol

_SLACK = 0.1  # of the limit
_STDERR = 2  # not `sys.stderr`, which a plugin may set to anything


class WatchRecord(Protocol):
    """Records when the time of a step began that may end the process."""

    def begin_watch(self, now: float, limit_s: float) -> None:
        """Record that a step that begins now and takes longer ends the process."""


class Watchdog:
    """Writes the stacks of all threads to stderr when a step takes too long.

    A step is reported after 1 to 1.1 times the limit. The timer is faulthandler's, outside of the
    interpreter, so that it works whatever the step hangs in.
    """

    # Setting the timer costs more than a small step, so it is set again only once a tenth of its
    # time has passed.

    def __init__(
        self,
        limit_s: float,
        *,
        exits: bool = False,
        activity: WatchRecord | None = None,
        later_s: float = 0.0,
    ) -> None:
        """Create a watchdog that is stopped.

        Args:
            limit_s: 0 switches it off.
            exits: whether a step that takes longer also ends the process, at once.
            activity: records when the time of a step began that may end the process.
            later_s: left to what ends such a step by itself, before the process is ended.
        """
        self._limit_s = limit_s
        self._later_s = later_s if exits else 0.0
        self._activity = activity if exits else None
        self._exits = exits
        self._set_at: float | None = None

    def start_step(self) -> None:
        """Start the time of a step."""
        if not self._limit_s:
            return
        now = time.monotonic()
        if self._set_at is None or now - self._set_at > self._limit_s * _SLACK:
            timeout = self._limit_s * (1 + _SLACK) + self._later_s
            faulthandler.dump_traceback_later(timeout, exit=self._exits, file=_STDERR)
            self._set_at = now
            if self._activity is not None:
                self._activity.begin_watch(now, self._limit_s)

    def stop(self) -> None:
        """Stop until the next step."""
        if self._set_at is not None:
            faulthandler.cancel_dump_traceback_later()
            self._set_at = None
