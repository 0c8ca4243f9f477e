"""The time of a step that is left for prompts, beside requests that generate."""

from __future__ import annotations

from .live_request import LiveRequest
from .step import Step
from .tracker import RequestTracker

_UNTRAINED_BLOCKS = 4
"""Blocks of prompts that a step computes while it is not known what they cost."""


def is_prompt(request: LiveRequest) -> bool:
    """Return whether a running request has more to compute than the token that follows its last."""
    known = request.num_tokens + request.num_output_placeholders
    return known - request.num_computed_tokens > 1


def limit_prompts(tracker: RequestTracker, step: Step) -> None:
    """Limit the time of prompts in a step that has tokens of all requests that generate.

    There is no limit if none generates.
    """
    if all(is_prompt(request) for request in tracker.running.values()):
        return
    step.prompt_time = PromptTime(tracker, step)


class PromptTime:
    """Gives the time of a step to prompts, one after the other; the first gets a block at least."""

    def __init__(self, tracker: RequestTracker, step: Step) -> None:
        """Leave what the requests of the step do not take."""
        self._cost = tracker.context.step_cost()
        self._block_size = tracker.cache.block_size
        context = sum(request.num_computed_tokens for request in step.running.values())
        streams = self._cost.milliseconds(
            single_queries=len(step.running), context=context + len(step.running)
        )
        self._left = tracker.limits.step_milliseconds - streams
        self._is_used = False

    @property
    def is_used_up(self) -> bool:
        """Whether a prompt that begins gets no token."""
        return not self.num_tokens(0, self._block_size)

    def num_tokens(self, computed: int, wanted: int) -> int:
        """Return how many of the `wanted` tokens after `computed` others a prompt can get.

        If it does not get all, it ends with a block.
        """
        if self._cost.is_trained:
            most = self._cost.prompt_tokens_within(self._left, computed, wanted)
        else:
            most = 0 if self._is_used else min(wanted, _UNTRAINED_BLOCKS * self._block_size)
        if most == wanted:
            return wanted
        most -= (computed + most) % self._block_size
        if most > 0:
            return most
        return 0 if self._is_used else min(wanted, self._block_size - computed % self._block_size)

    def spend(self, computed: int, tokens: int) -> None:
        """Take the time of a prompt that gets tokens."""
        self._is_used = True
        self._left -= self._cost.prompt_milliseconds(tokens, computed)
