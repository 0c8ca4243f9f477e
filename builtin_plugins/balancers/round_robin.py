"""The balancer that takes turns."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import BalancerContext, EngineCoreRequest, EngineView, LoadBalancer


class RoundRobin(LoadBalancer):
    """Take the engines in turn."""

    contract = 1

    def __init__(self, context: BalancerContext) -> None:
        """Begin with the first engine."""
        super().__init__(context)
        self._turn = -1

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineView]) -> int:  # noqa: ARG002
        """Return the index of the next engine."""
        self._turn += 1
        return self._turn % len(engines)
