"""A load balancer for Hardpoint: each tenant has an engine of its own, as long as it has room."""

from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil

from hardpoint import plugins
from hardpoint.plugins import (
    Annotated,
    BalancerContext,
    EngineCoreRequest,
    EngineView,
    LoadBalancer,
    Meta,
)

__all__ = ["TenantRing"]


class TenantRing(LoadBalancer):
    """Sends the requests of a tenant to the engine that follows it on a ring of hashes.

    An engine with more than `1 + spare` times its share of all requests in flight is passed over.
    Where an engine goes or comes, only the tenants next to its points move.

    Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018.
    """

    contract = 1

    class Options(plugins.Options):
        """The tag with the tenant, points of each engine on the ring, and room above the share."""

        tag: str = "tenant"
        points: Annotated[int, Meta(ge=1, le=4096)] = 64
        spare: Annotated[float, Meta(gt=0, le=10)] = 0.25

    options: Options

    def __init__(self, context: BalancerContext) -> None:
        """Create a balancer; its ring is made with the first request."""
        super().__init__(context)
        self.ranks: list[int] = []
        self.ring: list[tuple[bytes, int]] = []  # points, and indices of engines

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineView]) -> int:
        """Return the index of the first engine with room, from the tenant's hash on."""
        ranks = [engine.rank for engine in engines]
        if ranks != self.ranks:
            numbers = range(self.options.points)
            points = [(point(f"{r}/{n}"), i) for i, r in enumerate(ranks) for n in numbers]
            self.ranks, self.ring = ranks, sorted(points)
        total = 1 + sum(engine.in_flight for engine in engines)
        limit = ceil((1 + self.options.spare) * total / len(engines))
        place = bisect(self.ring, (point(request.tags.get(self.options.tag, "")),))
        while engines[index := self.ring[place % len(self.ring)][1]].in_flight >= limit:
            place += 1
        return index


def point(name: str) -> bytes:
    """Return the place of a name on the ring."""
    return blake2b(name.encode(), digest_size=8).digest()
