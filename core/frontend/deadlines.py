"""Deadlines of requests with a `timeout`, by the clock of the frontend."""

from __future__ import annotations

import heapq
from collections.abc import Callable

GRACE_S = 0.25
"""How long after its deadline a request is ended here, because its engine has not ended it."""

_MOST_STALE = 64


class Deadlines:
    """When requests have to end, whatever their engine does.

    An engine ends a request in time by itself. One that is restarted, hangs, or takes no messages
    does not, so the frontend ends the request shortly after.

    Attributes:
        is_used: whether any request had a deadline so far.
    """

    def __init__(self, clock: Callable[[], float], is_live: Callable[[str], bool]) -> None:
        """Watch no request; `clock` is in seconds."""
        self._clock, self._is_live = clock, is_live
        self.is_used = False
        self._heap: list[tuple[float, str]] = []
        self._num_checked = _MOST_STALE

    def add(self, request_id: str, timeout_s: float) -> None:
        """Watch a request, which has so many seconds left."""
        self.is_used = True
        heapq.heappush(self._heap, (self._clock() + timeout_s + GRACE_S, request_id))
        if len(self._heap) > 2 * self._num_checked:  # many have ended before their time
            self._heap = [entry for entry in self._heap if self._is_live(entry[1])]
            heapq.heapify(self._heap)
            self._num_checked = max(len(self._heap), _MOST_STALE)

    def seconds_left(self) -> float | None:
        """Return the seconds until the next request has to end; None if no request has a limit."""
        while self._heap and not self._is_live(self._heap[0][1]):
            heapq.heappop(self._heap)
        return max(self._heap[0][0] - self._clock(), 0.0) if self._heap else None

    def pop_expired(self) -> list[str]:
        """Return the ids of the requests that have to end now, and watch them no more."""
        expired = []
        while self.seconds_left() == 0.0:
            expired.append(heapq.heappop(self._heap)[1])
        return expired
