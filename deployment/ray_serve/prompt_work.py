"""The prompt work that waits at an engine, in seconds, for autoscaling."""

from __future__ import annotations

import time
from collections.abc import Callable

from hardpoint.replicas.statistics import PrefillRate

_HALF_LIFE_S = 30.0
"""Of busy time, after which a measurement of the rate counts half."""


class PromptWork:
    """Counts prompt tokens of requests without an output, and measures how fast they are computed.

    The rate is prompt tokens per second of the time in which any waited or was computed. What the
    cache has is counted as well, in both: so the seconds stay right for a workload that reuses
    prefixes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, int] = {}
        self._num_waiting = 0
        self._busy_since = 0.0
        self._rate = PrefillRate(_HALF_LIFE_S)

    def add(self, request_id: str, num_tokens: int) -> None:
        """Count a request that is sent to the engine."""
        self._measure(0)
        self._waiting[request_id] = num_tokens
        self._num_waiting += num_tokens

    def computed(self, request_id: str) -> None:
        """Count the prompt of a request as computed."""
        self._pop(request_id, is_computed=True)

    def remove(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._pop(request_id, is_computed=False)

    def _pop(self, request_id: str, *, is_computed: bool) -> None:
        if (num_tokens := self._waiting.get(request_id)) is None:
            return
        self._measure(num_tokens if is_computed else 0)
        del self._waiting[request_id]
        self._num_waiting -= num_tokens

    def _measure(self, num_computed: int) -> None:
        now = self._clock()
        if self._waiting:
            self._rate.add(num_computed, now - self._busy_since)
        self._busy_since = now

    @property
    def waiting_seconds(self) -> float:
        """The work of the prompts that wait or are computed, in seconds of this engine.

        Before a first prompt was computed, it is the time since the first one came.
        """
        if not self._waiting:
            return 0.0
        if not self._rate.per_second:
            return self._rate.busy_seconds + self._clock() - self._busy_since
        self._measure(0)
        return self._num_waiting / self._rate.per_second
