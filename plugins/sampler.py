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
    """What a sampler is built with, in each worker."""

    device: torch.device
    vocab_size: int


@dataclass(frozen=True)
class SamplingRows:
    """The rows of one step, as tensors on the device.

    Attributes:
        greedy: bool [rows]; True where the likeliest token is wanted.
        all_greedy: whether every row is; known without a sync.
        any_greedy: whether some row is; known without a sync.
        seeds: int64 [rows]; a request's seed, mixed with its completion index.
        positions: int64 [rows]; output position to be chosen, 0 for the first.
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

        The choice in a row must depend on nothing but that row's logits, seed and position, so
        that a request gets the same tokens alone and in any batch.

        Args:
            logits: float32 [rows, vocab], after every processor.
            rows: how each row wants to be sampled.

        Returns:
            int64 [rows].
        """
