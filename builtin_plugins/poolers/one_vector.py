"""Poolers that make one vector of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint.plugins import Pooler, PromptPooler

_ROWS = 64
"""Tokens with hidden states added at once; the rest waits for more, so that how a prompt is
cut into chunks makes no difference in any bit."""


class Last(Pooler):
    """The hidden state of the last token, as trained in causal models."""

    contract = 1
    needs_all = False

    def start(self, prompt_token_ids: Sequence[int], arguments: Any) -> PromptPooler:  # noqa: ARG002
        """Return the pooling of a prompt."""
        return _Last()


class Cls(Pooler):
    """The hidden state of the first token, [CLS] of models that attend in both directions."""

    contract = 1

    def start(self, prompt_token_ids: Sequence[int], arguments: Any) -> PromptPooler:  # noqa: ARG002
        """Return the pooling of a prompt."""
        return _First()


class Mean(Pooler):
    """The mean of the hidden states of all tokens; the sum is of float64."""

    contract = 1

    def start(self, prompt_token_ids: Sequence[int], arguments: Any) -> PromptPooler:  # noqa: ARG002
        """Return the pooling of a prompt."""
        return _Mean(self.context.hidden_size, self.context.device)


class _Last(PromptPooler):
    def update(self, hidden: torch.Tensor) -> None:
        self._kept = hidden[-1].clone()

    def finish(self) -> torch.Tensor:
        return self._kept


class _First(PromptPooler):
    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def update(self, hidden: torch.Tensor) -> None:
        if self._kept is None:
            self._kept = hidden[0].clone()

    def finish(self) -> torch.Tensor:
        assert self._kept is not None, "a prompt has a token"
        return self._kept


class _Mean(PromptPooler):
    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self._sum = torch.zeros(hidden_size, dtype=torch.float64, device=device)
        self._rest = torch.empty(0, hidden_size, dtype=torch.float64, device=device)
        self._count = 0

    def update(self, hidden: torch.Tensor) -> None:
        """Add them, so many at a time."""
        self._count += len(hidden)
        rows = torch.cat((self._rest, hidden.double()))
        whole = len(rows) // _ROWS * _ROWS
        for first in range(0, whole, _ROWS):
            self._sum += rows[first : first + _ROWS].sum(0)
        self._rest = rows[whole:].clone()

    def finish(self) -> torch.Tensor:
        return (self._sum + self._rest.sum(0)) / self._count
