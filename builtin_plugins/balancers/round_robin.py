"""Round robin: each engine in turn."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import BalancerContext, EngineCoreRequest, EngineView, LoadBalancer


class RoundRobin(LoadBalancer):
    """Take the engines in turn, whatever they have to do.

    The i-th request goes to the engine at `i % len(engines)`. For requests that cost about the
    same and have nothing in common, or to compare another balancer with.

    Source: `load_balance_method = "round_robin"` of SGLang's data-parallel controller.
    """

    contract = 1
    conformance_suite = "hardpoint.testing.checking.builtin_suites:RoundRobinSuite"

    def __init__(self, context: BalancerContext) -> None:
        super().__init__(context)
        self._turn = 0

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineView]) -> int:  # noqa: ARG002
        """Return the index of the next engine."""
        turn = self._turn % len(engines)
        self._turn = turn + 1
        return turn
