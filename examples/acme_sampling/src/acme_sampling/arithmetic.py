"""Arithmetic sampling for Hardpoint: the completions of a prompt share one random number."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import torch

from hardpoint import plugins
from hardpoint.plugins import LogitsRequest, Sampler

if TYPE_CHECKING:
    from hardpoint.plugins.sampling.sampler import SamplingRows
    from hardpoint.plugins.sampling.states import Distribution

_MOST_BITS = 40  # of a code, of the 53 that a float64 has


class Arithmetic(Sampler):
    """Decodes each completion from a code in [0, 1); the codes of a prompt are evenly spaced.

    Each token is exactly as likely as with independent draws, and the completions of a prompt are
    more diverse. Source: Vilnis et al., "Arithmetic Sampling: Parallel Diverse Decoding for Large
    Language Models", arXiv:2210.15458.
    """

    contract = 1
    max_state_bytes = 128
    supports_resume = False

    class State(plugins.State):
        """State of a request.

        Attributes:
            code: position within the interval of the tokens so far, from 0 to 1.
            bits: information of these tokens, which the code has lost.
            seed: draws further codes.
        """

        code: float
        bits: float
        seed: str

    def start(self, request: LogitsRequest) -> State:
        """Return the code of a completion: the prompt's random number, shifted by its index."""
        seed = f"{request.params.seed}"
        shift = request.child_index / request.params.n
        code = (random.Random(seed).random() + shift) % 1.0
        return self.State(code=code, bits=0.0, seed=f"{seed} {request.child_index}")

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Return the token with the row's code in its interval, int64 [rows]."""
        states: list[Arithmetic.State] = list(rows.states())
        codes = torch.tensor([[state.code] for state in states], dtype=torch.float64)
        upper = logits.log_softmax(-1).double().exp().cumsum(-1)
        drawn = (upper <= codes.to(logits.device) * upper[:, -1:]).sum(-1)
        best = logits.argmax(-1)
        is_finite = logits.amax(-1).isfinite()
        return torch.where(rows.greedy | ~is_finite, best, drawn.clamp(max=logits.shape[1] - 1))

    def observe(
        self,
        state: State,
        token: int,  # noqa: ARG002
        logprob: float,
        distribution: Distribution | None = None,
    ) -> State:
        """Return the state within the interval of the token."""
        assert distribution is not None
        bits = state.bits - logprob / math.log(2)
        if bits > _MOST_BITS:
            seed = f"{state.seed} {state.code}"
            return self.State(code=random.Random(seed).random(), bits=0.0, seed=state.seed)
        code = (state.code - distribution.below) / math.exp(logprob)
        return self.State(code=min(max(code, 0.0), 1 - 2**-53), bits=bits, seed=state.seed)
