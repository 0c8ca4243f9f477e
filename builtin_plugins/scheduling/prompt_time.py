"""The time of a step that requests which generate leave for prompts, and how fast these are."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from hardpoint.plugins import SchedulerContext

from .live_request import SchedulerRequest

_UNTRAINED_BLOCKS = 4
"""Blocks of prompts that a step computes while their cost is unknown."""

_PATIENCE_S = 2.0
"""Age at which a prompt may slow down others twice as much as a new one."""


def is_prompt(request: SchedulerRequest) -> bool:
    """Return whether a running request has more to compute than the token that follows its last."""
    known = request.num_tokens + request.num_output_placeholders
    return known - request.num_computed_tokens > 1


class PromptTime:
    """Gives the time of a step to prompts, one after the other; the first gets a block at least."""

    def __init__(
        self,
        context: SchedulerContext,
        streams: Collection[SchedulerRequest],
        drafts: int,
        now: float,
        max_slowdown: float,
    ) -> None:
        """Compute the time that requests that generate leave for prompts.

        Args:
            streams: the requests that generate, in this step.
            now: seconds on the scheduler's clock.
            max_slowdown: how many times the time of the streams the step may take at first.
        """
        self._cost = context.step_cost()
        self._block_size = context.kv_cache.block_size
        self._limit = context.limits.step_milliseconds
        self._now = now
        self._max_slowdown = max_slowdown
        self._streams = self._cost.milliseconds(
            single_queries=len(streams),
            context=sum(request.num_computed_tokens + 1 for request in streams),
            drafts=drafts,
        )
        self._prompts = 0.0
        self._is_used = False

    @property
    def is_used_up(self) -> bool:
        """Whether a prompt that begins gets no token, however long it has waited."""
        return not self._within(self._limit, 0, self._block_size)

    def num_tokens(self, request: SchedulerRequest, computed: int, wanted: int) -> int:
        """Return how many of the `wanted` tokens after `computed` others a prompt can get.

        If it does not get all, it ends with a block.
        """
        age = max(self._now - request.arrival_time, 0.0)
        slowdown = self._max_slowdown * (1 + age / _PATIENCE_S)
        return self._within(min(self._limit, slowdown * self._streams), computed, wanted)

    def _within(self, limit: float, computed: int, wanted: int) -> int:
        if self._cost.is_trained:
            left = limit - self._streams - self._prompts
            fit = self._cost.prompt_tokens_within(left, computed, wanted)
        else:
            fit = 0 if self._is_used else min(wanted, _UNTRAINED_BLOCKS * self._block_size)
        if fit == wanted:
            return wanted
        fit -= (computed + fit) % self._block_size
        if fit > 0:
            return fit
        return 0 if self._is_used else min(wanted, self._block_size - computed % self._block_size)

    def spend(self, computed: int, tokens: int) -> None:
        """Take the time of a prompt that gets tokens."""
        self._is_used = True
        self._prompts += self._cost.prompt_milliseconds(tokens, computed)


_WINDOW_S = 10.0


class PrefillMeter:
    """Measures the prompt tokens of steps while prompts wait."""

    def __init__(self) -> None:
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
