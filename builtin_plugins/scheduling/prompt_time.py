"""The time of a step that requests which generate leave for prompts."""

from __future__ import annotations

from collections.abc import Collection

from hardpoint.plugins import SchedulerContext

from .live_request import LiveRequest

_UNTRAINED_BLOCKS = 4
"""Blocks of prompts that a step computes while it is not known what they cost."""

_PATIENCE_S = 2.0
"""Age at which a prompt may slow down others twice as much as a new one."""


def is_prompt(request: LiveRequest) -> bool:
    """Return whether a running request has more to compute than the token that follows its last."""
    known = request.num_tokens + request.num_output_placeholders
    return known - request.num_computed_tokens > 1


class PromptTime:
    """Gives the time of a step to prompts, one after the other; the first gets a block at least."""

    def __init__(
        self,
        context: SchedulerContext,
        streams: Collection[LiveRequest],
        drafts: int,
        now: float,
        max_slowdown: float,
    ) -> None:
        """Leave what the requests that generate do not take.

        Args:
            context: the scheduler's.
            streams: the requests that generate, in this step.
            drafts: number of their drafts.
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

    def num_tokens(self, request: LiveRequest, computed: int, wanted: int) -> int:
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
