"""Detects an engine process that hangs, from outside, by its recorded activity."""

from __future__ import annotations

import time
from collections.abc import Callable

from hardpoint.host.boundary.activity import Activity

LONGEST_INTERVAL_S = 1.0


class HangWatch:
    """Adds up the time without progress of an engine process.

    Only time in which this process itself ran counts, so that one that was suspended, or a machine
    that slept, ends no engine.

    Args:
        process_limit_s: time without a sign of life of its process; 0 is no limit.
        step_limit_s: time in one step; 0 is no limit.

    Attributes:
        interval_s: time between two checks; None if nothing is to be checked.
    """

    def __init__(
        self,
        activity: Activity,
        process_limit_s: float,
        step_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = [limit for limit in (process_limit_s, step_limit_s) if limit]
        self.interval_s = min(LONGEST_INTERVAL_S, min(limits) / 4) if limits else None
        self._activity, self._clock = activity, clock
        self._process_limit_s, self._step_limit_s = process_limit_s, step_limit_s
        self._silent_s = self._step_s = 0.0
        self._beats, self._turns = activity.progress()
        self._checked = clock()

    def check(self) -> str | None:
        """Return why the engine counts as hung, with the plugin that runs; None if it does not."""
        now = self._clock()
        passed = min(now - self._checked, 2 * (self.interval_s or 0.0))
        self._checked = now
        beats, turns = self._activity.progress()
        is_in_step = turns % 2 == 1
        self._silent_s = self._silent_s + passed if beats == self._beats else 0.0
        self._step_s = self._step_s + passed if is_in_step and turns == self._turns else 0.0
        self._beats, self._turns = beats, turns
        during = self._activity.snapshot().during
        if 0 < self._process_limit_s < self._silent_s:
            limit = f"{self._process_limit_s:g} s (engine.hung_process_seconds)"
            return f"hangs: it gave no sign of life for {limit}{during}"
        if 0 < self._step_limit_s < self._step_s:
            limit = f"{self._step_limit_s:g} s (engine.hung_step_seconds)"
            return f"hangs: a step takes longer than {limit}{during}"
        return None
