"""A load balancer that keeps the requests of a conversation together, without a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from hardpoint import plugins
from hardpoint.plugins import Annotated, EngineCoreRequest, EngineView, LoadBalancer, Meta

__all__ = ["Affinity"]


class Affinity(LoadBalancer):
    """Sends a conversation to the engine that its name chooses, unless that has much more to do.

    The engine is the one of the largest hash of its rank and the name: the same in every client,
    after restarts too, and an engine that goes or comes moves only the conversations of its own.
    Where it is too busy, the one of the next largest hash is next, and so on.

    Source: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996); the bound
    is that of Mirrokni et al., "Consistent Hashing with Bounded Loads" (arXiv:1608.01350).
    """

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            tag: the request's tag with the name of its conversation, if it has no `session`.
            excess_tokens: an engine is too busy with so many tokens more than the least busy one.
            in_flight_tokens: prompt tokens that a request in flight counts as.
        """

        tag: str = "conversation"
        excess_tokens: Annotated[int, Meta(ge=0)] = 2048
        in_flight_tokens: Annotated[int, Meta(ge=0)] = 64

    options: Options

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineView]) -> int:
        """Return the index of the first engine of the conversation that is not too busy."""
        cost = self.options.in_flight_tokens
        loads = [engine.pending_prompt_tokens + cost * engine.in_flight for engine in engines]
        retained = request.retention
        name = retained.session if retained else request.tags.get(self.options.tag)
        by_load = min(
            range(len(engines)), key=lambda place: (loads[place], engines[place].in_flight)
        )
        if name is None:
            return by_load
        limit = loads[by_load] + self.options.excess_tokens
        fit = [place for place, load in enumerate(loads) if load <= limit]
        return max(fit, key=lambda place: _weight(engines[place].rank, name))


def _weight(rank: int, name: str) -> bytes:
    return blake2b(f"{rank} {name}".encode(), digest_size=8).digest()
