"""A virtual clock with its scheduled actions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class Timeline:
    """A clock that moves from one action to the next, and not while one is done.

    Of two things at the same time, that which was planned first comes first, so that a simulation
    is the same in every run.
    """

    def __init__(self) -> None:
        """Begin at 0 seconds with nothing planned."""
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._num_planned = 0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now

    @property
    def next_time(self) -> float:
        """When the next thing happens, in seconds; infinite if nothing is planned."""
        return self._events[0][0] if self._events else math.inf

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Plan an action for a time; a past time means now."""
        self._num_planned += 1
        heapq.heappush(self._events, (max(seconds, self._now), self._num_planned, action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Plan an action for so many seconds from now."""
        self.at(self._now + seconds, action)

    def move_to(self, seconds: float) -> None:
        """Move the clock forwards; nothing may be planned before."""
        self._now = seconds

    def step(self) -> None:
        """Move the clock to the next action, and do it."""
        self._now, _, action = heapq.heappop(self._events)
        action()
