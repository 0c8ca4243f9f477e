"""The cost of a step, for schedulers that limit the time of steps."""

from __future__ import annotations

import math

import msgspec

__all__ = ["StepCost"]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a step in milliseconds: a sum over its work, fitted to measured steps.

    A prompt here is any request that computes more than one token, besides drafts to verify.

    Attributes:
        step: time of any step, before its work.
        single_query: time of each request that computes one token.
        context_token: time of each token that these attend to.
        prompt: time of each prompt.
        prompt_token: time of each token of a prompt.
        prompt_pair: time of each token that a token of a prompt attends to.
        draft: time of each draft that is verified; 0 before there were any.
        is_trained: whether steps with prompts and steps with single queries were measured; before
            that the other attributes mean nothing.
        error: moving mean of the relative error of predictions, 0.1 is 10 %; None before the first.
    """

    step: float = 0.0
    single_query: float = 0.0
    context_token: float = 0.0
    prompt: float = 0.0
    prompt_token: float = 0.0
    prompt_pair: float = 0.0
    is_trained: bool = False
    error: float | None = None
    draft: float = 0.0

    def milliseconds(
        self,
        *,
        single_queries: int = 0,
        context: int = 0,
        prompts: int = 0,
        prompt_tokens: int = 0,
        prompt_pairs: float = 0,
        drafts: int = 0,
    ) -> float:
        """Return the time of a step.

        Args:
            single_queries: number of requests that compute one token, drafts aside.
            context: number of tokens that these attend to, together.
            prompts: number of prompts.
            prompt_tokens: number of tokens of prompts.
            prompt_pairs: sum over these of the number of tokens that each attends to.
            drafts: number of drafts.
        """
        return (
            self.step
            + self.single_query * single_queries
            + self.context_token * context
            + self.prompt * prompts
            + self.prompt_token * prompt_tokens
            + self.prompt_pair * prompt_pairs
            + self.draft * drafts
        )

    def prompt_milliseconds(self, tokens: int, computed: int) -> float:
        """Return the time that `tokens` tokens of a prompt, after `computed` others, add."""
        pairs = tokens * (computed + tokens / 2)
        return self.prompt + self.prompt_token * tokens + self.prompt_pair * pairs

    def prompt_tokens_within(self, milliseconds: float, computed: int, limit: int) -> int:
        """Return how many tokens of a prompt add at most so many milliseconds to a step.

        Args:
            milliseconds: may be negative.
            computed: tokens of the prompt that are computed.
            limit: the greatest number to return.
        """
        left = milliseconds - self.prompt
        if left <= 0:
            return 0
        linear = self.prompt_token + self.prompt_pair * computed
        # tokens * linear + tokens ** 2 * prompt_pair / 2 <= left, in a form without cancellation.
        root = linear + math.sqrt(linear * linear + 2 * self.prompt_pair * left)
        return limit if limit * root <= 2 * left else int(2 * left / root)
