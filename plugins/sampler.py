"""Samplers: choose one token per row from the processed logits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .component import Component, Context

if TYPE_CHECKING:
    import torch

__all__ = ["Sampler", "SamplerContext", "SamplingRows"]


@dataclass(frozen=True, kw_only=True)
class SamplerContext(Context["Sampler"]):
    """Context of a sampler, in each worker."""

    device: torch.device
    vocab_size: int


@dataclass(frozen=True)
class SamplingRows:
    """The rows of one step, as tensors on the device.

    Attributes:
        greedy: bool [rows]; whether to choose the likeliest token, of equals the lowest id.
        all_greedy: whether all rows are greedy; known without a sync.
        any_greedy: whether any row is greedy; known without a sync.
        seeds: int64 [rows]; the request's seed, mixed with its completion index.
        positions: int64 [rows]; output position of the token to choose, 0 for the first.
    """

    greedy: torch.Tensor
    all_greedy: bool
    any_greedy: bool
    seeds: torch.Tensor
    positions: torch.Tensor


class Sampler(Component):
    """Chooses the next token of every row."""

    context: SamplerContext

    @abstractmethod
    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Return the chosen token ids.

        The token of a row must depend only on the row's logits, seed and position, so that a
        request gets the same tokens alone and in any batch. A token at -inf must not be chosen.
        Where a plugin has damaged a row, NaN and +inf win, as in `argmax`, and a row of nothing but
        -inf gets any token: the engine finds the plugin by the chosen logit.

        Args:
            logits: float32 [rows, vocab], after every processor; must not be changed.
            rows: sampling settings of each row.

        Returns:
            int64 [rows].
        """
