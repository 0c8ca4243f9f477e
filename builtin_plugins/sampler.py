"""The default sampler: greedy, or seeded random sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hardpoint.plugins import Sampler, SamplerContext

if TYPE_CHECKING:
    from hardpoint.plugins.sampling.sampler import SamplingRows


class DefaultSampler(Sampler):
    """Greedy rows get the most likely token, ties the lowest id; other rows a random one.

    A random token depends on the row's logits, its seed, the output position and nothing else, so
    it is the same alone and in any batch: see `LogitsOps.draw`. The noise has 31 bits where it
    decides, so that probabilities down to about 1e-9 are resolved.
    """

    contract = 1
    draws = True
    context: SamplerContext

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Return the sampled token ids, int64 [rows]; a token at -inf is never sampled."""
        ops = self.context.ops
        if rows.all_greedy:
            return ops.argmax(logits)
        return ops.draw(logits, rows.seeds, rows.positions, rows.greedy)
