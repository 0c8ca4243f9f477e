"""The watchdog of the executor "multiproc": finds a step that takes too long."""

from __future__ import annotations

import contextlib
import faulthandler
import time
from collections.abc import Sequence

from hardpoint.plugins import ExecutorContext

from .multiproc_pending import PendingCall

_SLACK = 0.1  # of the limit: workers write their stacks after so much more, at the latest
_TICK_S = 0.1
_LEAVE_S = 1.0  # for ranks that wait for others to leave the step, once they are notified


class StepWatchdog:
    """Watchdog of steps, if a step that takes too long is to be ended. Used by one thread.

    Attributes:
        late: a call of a step that has taken too long.
    """

    def __init__(self, context: ExecutorContext) -> None:
        self._limit_s = context.watchdog_seconds if context.watchdog_exits else 0.0
        self._is_pipeline = context.parallel.pipeline > 1
        self._answered_at = 0.0
        self._over_at = 0.0
        self.late: PendingCall | None = None

    @property
    def reason(self) -> str:
        """The failure as text."""
        method = self.late.method if self.late is not None else "a step"
        return f"{method} took longer than {self._limit_s:g} s (engine.watchdog_seconds)"

    @property
    def is_over(self) -> bool:
        """Whether the ranks have had their time to leave a step that is late."""
        return self.late is not None and time.monotonic() >= self._over_at

    def wakes_at(self) -> list[float]:
        """Return when to look again."""
        if not self._limit_s:
            return []
        now = time.monotonic()
        return [now + min(self._limit_s * _SLACK, 1.0) if self.late is None else self._over_at]

    def answered(self) -> None:
        """Begin the time of the next step of a pipeline, in which steps wait for each other."""
        if self._is_pipeline and self._limit_s:
            self._answered_at = time.monotonic()

    def begin(self, calls: Sequence[PendingCall]) -> bool:
        """Return whether one of the calls under way is found to be late now; write the stacks."""
        if not self._limit_s or self.late is not None:
            return False
        steps = [call for call in calls if call.is_step]
        first = min(steps, key=lambda call: call.began, default=None)
        now = time.monotonic()
        if first is None:
            return False
        duration = now - max(first.began, self._answered_at)
        if duration <= self._limit_s * (1 + _SLACK) + _TICK_S:
            return False
        self.late, self._over_at = first, now + _LEAVE_S
        with contextlib.suppress(Exception):  # the program has no stderr
            faulthandler.dump_traceback()
        return True
