"""The default balancer: the engine that has to compute the least before a request's first token."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import BalancerContext, EngineCoreRequest, EngineView, LoadBalancer


class LeastCost(LoadBalancer):
    """Take the engine where a request waits for the fewest prompt tokens, its own included.

    The cost of an engine is its pending prompt tokens, plus those of the request that it has not
    cached: one formula for load and for cached prefixes, without thresholds
    (vllm-project/tpu-inference#3315). Of equal ones, that with fewer requests in flight is taken,
    then that of the request's session, then the next in turn.
    """

    contract = 1
    uses_cached_prefixes = True

    def __init__(self, context: BalancerContext) -> None:
        """Begin with the first engine."""
        super().__init__(context)
        self._turn = 0

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineView]) -> int:
        """Return the index of the engine with the least cost."""
        num_engines, turn = len(engines), self._turn
        self._turn = turn + 1

        def cost(place: int) -> tuple[int, int, bool, int]:
            engine = engines[place]
            cost = engine.pending_prompt_tokens - engine.cached_prefix_tokens(request)
            later = (place - turn) % num_engines
            return cost, engine.in_flight, not engine.has_session(request), later

        return min(range(num_engines), key=cost)
