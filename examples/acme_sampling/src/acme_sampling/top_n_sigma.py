"""Top-n-sigma sampling for Hardpoint: a sampler that takes arguments of each request."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hardpoint import plugins
from hardpoint.plugins import Annotated, Meta, Sampler

if TYPE_CHECKING:
    from hardpoint.plugins.sampling.sampler import SamplingRows


class TopNSigma(Sampler):
    """Draws among the tokens within n standard deviations of the largest logit.

    Source: Tang et al., "Top-nsigma: Not All Logits Are You Need", arXiv:2411.07641.
    """

    contract = 1

    class Arguments(plugins.Arguments):
        """Arguments of a request: `n`, the distance in standard deviations."""

        n: Annotated[float, Meta(gt=0, le=1000)] = 1.0

    def sample(self, logits: torch.Tensor, rows: SamplingRows[Arguments]) -> torch.Tensor:
        """Return a token per row, int64 [rows]; a row with NaN masks nothing, and NaN wins."""
        allowed = logits != -math.inf
        count = allowed.sum(-1, keepdim=True)
        mean = torch.where(allowed, logits, 0.0).sum(-1, keepdim=True) / count
        square = torch.where(allowed, (logits - mean) ** 2, 0.0).sum(-1, keepdim=True)
        sigma = (square / count).sqrt()
        limit = logits.amax(-1, keepdim=True) - rows.tensor("n") * sigma
        pairs = zip(rows.seeds.tolist(), rows.positions.tolist(), strict=True)
        noise = torch.stack([self._noise(*pair) for pair in pairs]).to(logits.device)
        drawn = logits.masked_fill(logits < limit, -math.inf) + noise
        return torch.where(rows.greedy, logits.argmax(-1), drawn.argmax(-1))

    def _noise(self, seed: int, position: int) -> torch.Tensor:
        """Return Gumbel noise that depends on seed and position alone, float32 [vocab]."""
        generator = torch.Generator().manual_seed(hash((seed, position)))
        return -torch.empty(self.context.vocab_size).exponential_(generator=generator).log()
