"""The time that steps take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from hardpoint.plugins import SchedulerOutput


class StepTime(NamedTuple):
    """The time of a step, in seconds.

    Attributes:
        total: from its start to its results.
        own: the same without the time in which results of the step before it were awaited.
    """

    total: float
    own: float


class StepTimes:
    """Measures the time of each step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._began: dict[int, float] = {}
        self._ended = float("-inf")

    def begins(self, plan: SchedulerOutput) -> None:
        """Record the start of a step."""
        self._began[plan.step] = self._clock()

    def ends(self, plan: SchedulerOutput) -> StepTime:
        """Return the time of a step whose results were processed."""
        began, now = self._began[plan.step], self._clock()
        # Results come in order, so steps before this one have ended or were lost.
        self._began = {step: start for step, start in self._began.items() if step > plan.step}
        time = StepTime(now - began, now - max(began, self._ended))
        self._ended = now
        return time
