"""The default balancer: the engine that has to compute the least before a request's first token."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import BalancerContext, EngineCoreRequest, EngineView, LoadBalancer

from .load import LoadOptions


class LeastCost(LoadBalancer):
    """Take the engine where a request waits for the fewest prompt tokens, its own included.

    The cost of an engine is

        pending_prompt_tokens + in_flight_tokens * in_flight - cached_prefix_tokens(request)

    so that load and cached prefixes are of one unit, the token, and no threshold decides between
    them. Among equal costs, the engine with fewer requests in flight is taken, then the engine of
    the request's session, then the next in turn.

    Source: vllm-project/tpu-inference#3315, with `in_flight` as the second criterion alone
    (`in_flight_tokens = 0`). There, a prefix that all prompts begin with keeps all requests at one
    engine, as long as it computes each prompt before the next one comes.
    """

    contract = 1
    uses_cached_prefixes = True

    class Options(LoadOptions):
        """Weights of the cost."""

    options: Options

    def __init__(self, context: BalancerContext) -> None:
        super().__init__(context)
        self._per_request = self.options.in_flight_tokens
        self._turn = 0

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineView]) -> int:
        """Return the index of the engine with the least cost."""
        per_request, length = self._per_request, len(request.prompt_token_ids)
        equal: list[int] = []
        limit = least = float("inf")
        fewest = 0
        for place, engine in enumerate(engines):
            in_flight = engine.in_flight
            cost = engine.pending_prompt_tokens + per_request * in_flight
            if cost > limit:
                continue  # even if it has the whole prompt
            cost -= engine.cached_prefix_tokens(request)
            if cost < least or (cost == least and in_flight < fewest):
                least, limit, fewest, equal = cost, cost + length, in_flight, [place]
            elif cost == least and in_flight == fewest:
                equal.append(place)
        turn = self._turn % len(engines)
        self._turn = turn + 1
        if len(equal) == 1:
            return equal[0]
        if request.retention is not None:
            for place in equal:
                if engines[place].has_session(request):
                    return place
        return next((place for place in equal if place >= turn), equal[0])
