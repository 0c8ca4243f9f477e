"""Samplers with states of requests, and a processor for distributions."""

from __future__ import annotations

import math
from typing import Any

import torch

from hardpoint import plugins
from hardpoint.plugins import Edits, Finish, Phase, Sampler, SparseLogitsProcessor, State

from .wrapping import LoggedSampler


class Mirostat(Sampler):
    """Draws among the tokens below a surprise, adapted to the surprise of earlier tokens."""

    contract = 1
    max_state_bytes = 64

    class Arguments(plugins.Arguments):
        tau: float = 3.0

    class State(State):
        limit: float
        tau: float

    def start(self, request: Any) -> State:
        tau = request.sampler_arguments.tau
        return self.State(limit=2 * tau, tau=tau)

    def sample(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        logprobs = logits.log_softmax(-1)
        limits = [[-state.limit * math.log(2)] for state in rows.states()]
        limit = torch.minimum(torch.tensor(limits), logprobs.amax(-1, keepdim=True))
        left = logits.masked_fill(logprobs < limit, -math.inf)
        return self.context.ops.draw(left, rows.seeds, rows.positions, rows.greedy)

    def observe(self, state: Any, token: int, logprob: float) -> Any:
        surprise = -logprob / math.log(2)
        return self.State(limit=state.limit - 0.3 * (surprise - state.tau), tau=state.tau)


class LoggedMirostat(LoggedSampler):
    """Wraps a sampler with states."""

    contract = 1

    class Arguments(Mirostat.Arguments):
        """Arguments of the wrapped sampler."""


class EveryThird(Sampler):
    """Takes the likeliest token, but the second likeliest every third time; ends after some."""

    contract = 1

    class Arguments(plugins.Arguments):
        tokens: int = 1000

    def start(self, request: Any) -> list[int]:
        return [*request.output_token_ids, -request.sampler_arguments.tokens]

    def advance(self, state: list[int], token: int) -> list[int] | Finish:
        state.insert(0, token)
        return Finish("tokens") if len(state) > -state[-1] else state

    def sample(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        top = logits.topk(2).indices
        picks = [[1 if len(state) % 3 == 0 else 0] for state in rows.states()]
        return top.gather(1, torch.tensor(picks)).squeeze(1)


class EntropyStop(SparseLogitsProcessor):
    """Ends a request after a token with a flat distribution."""

    contract = 1
    phase = Phase.BIAS
    max_state_bytes = 64
    supports_resume = False

    class Arguments(plugins.Arguments):
        nats: float

    class State(State):
        nats: float

    def start(self, request: Any) -> State:
        return self.State(nats=request.arguments[self.name].nats)

    def observe(self, state: Any, token: int, logprob: float, distribution: Any = None) -> Any:
        if distribution.entropy > state.nats:
            numbers = [distribution.entropy, distribution.below, *distribution.logprobs]
            return Finish("entropy", stop_reason=" ".join(map(str, numbers)))
        return state

    def edits(self, rows: Any) -> Edits | None:
        return None
