"""How fast prompts are computed: tokens per second, measured lately."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 10.0


class PrefillRate:
    """Measures the prompt tokens of steps while prompts wait."""

    def __init__(self) -> None:
        """Know no rate."""
        self._steps: deque[tuple[float, int]] = deque()  # time of a plan, and its tokens
        self._num_tokens = 0  # of all but the last one, which is still under way
        self._last: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of the last seconds in which prompts were computed; None before any."""
        if len(self._steps) > 1 and self._num_tokens:
            seconds = self._steps[-1][0] - self._steps[0][0]
            return self._num_tokens / seconds if seconds > 0 else self._last
        return self._last

    def record(self, now: float, num_tokens: int) -> None:
        """Record a step that is planned; the time until the next one is its own.

        Args:
            now: seconds.
            num_tokens: tokens of prompts in it; after a step without any, a new measurement begins.
        """
        if self._steps:
            self._num_tokens += self._steps[-1][1]
        elif not num_tokens:
            return
        self._steps.append((now, num_tokens))
        while len(self._steps) > 2 and now - self._steps[1][0] > _WINDOW_S:
            self._num_tokens -= self._steps.popleft()[1]
        if not num_tokens:
            self._last = self.tokens_per_second
            self.rest()

    def rest(self) -> None:
        """Begin a new measurement: the time that has passed was no step's."""
        self._last = self.tokens_per_second
        self._steps.clear()
        self._num_tokens = 0
