"""Poolers that make a vector for each token of a prompt, or for some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from hardpoint import plugins
from hardpoint.plugins import Meta, Pooler, PromptPooler


class All(Pooler):
    """The hidden states of all tokens."""

    contract = 1
    per_token = True

    def start(self, prompt_token_ids: Sequence[int], arguments: Any) -> PromptPooler:  # noqa: ARG002
        """Return the pooling of a prompt."""
        return _KeptRows(len(prompt_token_ids), self.context, range(len(prompt_token_ids)))


class Step(Pooler):
    """The hidden states at the ends of the steps of a text, for process reward models."""

    contract = 1
    per_token = True

    class Arguments(plugins.Arguments):
        """Arguments of a request.

        Attributes:
            step_tag_id: token that ends a step; None returns all tokens.
        """

        step_tag_id: Annotated[int, Meta(ge=0)] | None = None

    def start(self, prompt_token_ids: Sequence[int], arguments: Any) -> PromptPooler:
        """Return the pooling of a prompt."""
        tag = arguments.step_tag_id
        positions = [
            position for position, token in enumerate(prompt_token_ids) if tag in (None, token)
        ]
        return _KeptRows(len(prompt_token_ids), self.context, positions)


class _KeptRows(PromptPooler):
    """Keeps the hidden states of chosen positions."""

    def __init__(
        self, num_tokens: int, context: plugins.PoolerContext, positions: Sequence[int]
    ) -> None:
        """Keep the vectors of `positions`, in their order, of so many tokens."""
        self._places = torch.full((num_tokens,), -1, dtype=torch.int64)
        self._places[list(positions)] = torch.arange(len(positions))
        self._shape = len(positions), context.hidden_size
        self._kept: torch.Tensor | None = None
        self._seen = 0

    def update(self, hidden: torch.Tensor) -> None:
        if self._kept is None:
            self._kept = hidden.new_empty(self._shape)
        places = self._places[self._seen : self._seen + len(hidden)]
        rows = (places >= 0).nonzero()[:, 0]
        self._kept[places[rows].to(hidden.device)] = hidden[rows.to(hidden.device)]
        self._seen += len(hidden)

    def finish(self) -> torch.Tensor:
        assert self._kept is not None, "a prompt has a token"
        return self._kept
