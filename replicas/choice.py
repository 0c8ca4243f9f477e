"""The choice among several engines: the balancer, and what decides if it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hardpoint.boundary.errors import close_all
from hardpoint.boundary.faults import StepFaults
from hardpoint.boundary.guard import guard
from hardpoint.plugins import (
    BalancerContext,
    EngineConfig,
    EngineCoreRequest,
    LoadBalancer,
)
from hardpoint.plugins.stats import StepFault
from hardpoint.registry.plugin_set import PluginSet

from .replicas import Replica


class EngineChoice:
    """Chooses engines by the balancer; after a fault, that with the fewest requests in flight."""

    def __init__(
        self,
        plugins: PluginSet,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the balancer.

        Raises:
            PluginError: it cannot be built.
        """
        self.plugins = plugins
        entry = plugins.one("balancers")
        self._faults = StepFaults.under(config.plugins)
        built: Any = plugins.create(
            entry, BalancerContext, num_engines=config.parallel.data, clock=clock
        )
        self._balancer: LoadBalancer = guard(
            built,
            "balancers",
            self._faults.reporter(entry.source, "the engine with the fewest requests is taken"),
            self._faults.calls("balancers", entry.source),
        )
        self.uses_cached_prefixes = built.uses_cached_prefixes

    def choose(self, request: EngineCoreRequest, engines: Sequence[Replica]) -> Replica:
        """Return the engine for a request, of one or more that accept requests."""
        if len(engines) == 1:
            return engines[0]
        return engines[self._balancer.choose(request, engines)]

    def faults(self) -> dict[str, StepFault]:
        """Return the failed decisions of the balancer, by its name."""
        return self._faults.report()

    def slow(self) -> dict[str, StepFault]:
        """Return the decisions that took too long, by the balancer's name."""
        return self._faults.slow()

    def close(self) -> None:
        """Close the balancer."""
        close_all([self._balancer])
