"""Mirostat v2 for Hardpoint: keep the surprise of the text at a target."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hardpoint import plugins
from hardpoint.plugins import Annotated, LogitsProcessor, LogitsRequest, Meta, Phase, Rows
from hardpoint.plugins.device import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

LN_2 = math.log(2)


class Mirostat(LogitsProcessor):
    """Drops tokens with a surprise above a limit, which follows the surprise of sampled tokens.

    Source: Basu et al., https://arxiv.org/abs/2007.14966, the second algorithm of the authors'
    code, https://github.com/basusourya/mirostat
    """

    contract = 1
    phase = Phase.TRUNCATE
    after = ("top_k", "top_p", "min_p")
    argmax_invariant = True
    max_state_bytes = 64

    class Arguments(plugins.Arguments):
        """Arguments of a request.

        Attributes:
            tau: the target, in bits per token.
            eta: how fast the limit follows.
        """

        tau: Annotated[float, Meta(gt=0, le=20)] = 5.0
        eta: Annotated[float, Meta(gt=0, le=1)] = 0.1

    class State(plugins.State):
        """`mu` is the limit in bits; it also carries the arguments, which stay the same."""

        mu: float
        tau: float
        eta: float

    def start(self, request: LogitsRequest) -> State:
        """Return twice the target, as the authors do."""
        arguments: Mirostat.Arguments = request.arguments[self.name]
        return self.State(mu=2 * arguments.tau, tau=arguments.tau, eta=arguments.eta)

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set the logits of tokens that are too surprising to -inf. `logits` is [rows, vocab]."""
        states: Sequence[Mirostat.State] = rows.states()
        limit = to_device([[-state.mu * LN_2] for state in states], logits.device)
        logprobs = logits.log_softmax(-1)
        # The likeliest token stays, whatever its surprise is.
        limit = torch.minimum(limit, logprobs.amax(-1, keepdim=True))
        return logits.masked_fill(logprobs < limit, -math.inf)

    def observe(self, state: State, token: int, logprob: float) -> State:  # noqa: ARG002
        """Move the limit by the difference between the token's surprise and the target."""
        mu = state.mu - state.eta * (-logprob / LN_2 - state.tau)
        return self.State(mu=mu, tau=state.tau, eta=state.eta)
