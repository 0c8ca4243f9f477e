"""The choice among several engines: the balancer, and the fallback if it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hardpoint.host.boundary.errors import close_all
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.guard import guard
from hardpoint.host.boundary.parts.states import States, states_of
from hardpoint.host.live.change import LiveChange, PreparedChange, Switch
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import (
    BalancerContext,
    ConfigError,
    EngineConfig,
    EngineCoreRequest,
    LoadBalancer,
)
from hardpoint.plugins.requests.stats import StepFault
from hardpoint.typed import read_only

from .replica import Replica

_KIND = "balancers"


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
        self._faults = StepFaults.under(config.plugins)
        self._fields: dict[str, Any] = {"num_engines": config.parallel.data, "clock": clock}
        built, self._balancer = self._build(plugins)
        self.uses_cached_prefixes: bool = built.uses_cached_prefixes

    def _build(self, plugins: PluginSet) -> tuple[Any, LoadBalancer]:
        entry = plugins.one(_KIND)
        built: Any = plugins.create(entry, BalancerContext, **self._fields)
        guarded = guard(
            built,
            _KIND,
            self._faults.reporter(entry.source, "the engine with the fewest requests is taken"),
            self._faults.calls(_KIND, entry.source),
        )
        return built, guarded

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange | None:
        """Build another balancer for a live change: a `Slot`.

        Raises:
            ConfigError: it needs to know what engines have cached, and they do not report it.
            PluginError: it cannot be built.
        """
        del change
        earlier, before = self.plugins, self._balancer
        if plugins.one(_KIND).is_same(earlier.one(_KIND)):
            return None
        built, after = self._build(plugins)
        if built.uses_cached_prefixes and not self.uses_cached_prefixes:
            close_all([after])
            raise ConfigError(
                f"parallel.balancer: {built.name!r} reads the caches of engines, which these "
                f"engines were not started to report; restart them with it"
            )

        def switch(is_new: bool) -> None:
            self._balancer, self.plugins = (after, plugins) if is_new else (before, earlier)

        return Switch(switch, lambda: close_all([before]), lambda: close_all([after]))

    def choose(self, request: EngineCoreRequest, engines: Sequence[Replica]) -> Replica:
        """Return the engine for a request, of one or more that accept requests.

        The balancer gets copies: it can change neither the request nor the engines.
        """
        if len(engines) == 1:
            return engines[0]
        views = tuple(engine.view for engine in engines)
        return engines[self._balancer.choose(read_only(request), views)]

    def faults(self) -> dict[str, StepFault]:
        """Return the failed decisions of the balancer, by its name."""
        return self._faults.report()

    def slow(self) -> dict[str, StepFault]:
        """Return the decisions that took too long, by the balancer's name."""
        return self._faults.slow()

    def states(self) -> States:
        """Return the state of the balancer by its name, if it has one."""
        return states_of([self._balancer])

    def close(self) -> None:
        """Close the balancer."""
        close_all([self._balancer])
