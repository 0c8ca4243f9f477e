"""Statistics as a step part: observes outputs, and drives the `stat_sinks` kind."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import EngineConfig, FrontendHalf, StatSink, StepPart
from hardpoint.plugins.step_part import FrontendHalfContext, OutputObserver, PreparedPartChange

from .gathering import Statistics
from .sinks import KIND, ForwardedSinks, Sinks, build_sinks

if TYPE_CHECKING:
    from hardpoint.plugins.component.base import Component
    from hardpoint.plugins.step_part.components import ComponentFactory


class RequestStatistics(StepPart):
    """Gathers statistics of requests if `stats` asks for them; drives the `stat_sinks` kind.

    A fault of a sink costs one call of it, and no request.
    """

    contract = 1
    fault_scope = "step"

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf | None:
        """Return the half that observes outputs; None if no statistics are asked for."""
        config = self.context.config
        return GatheredStatistics(config, context) if config.stats.on else None


class GatheredStatistics(FrontendHalf):
    """Owns the statistics of a frontend, and their sinks."""

    def __init__(self, config: EngineConfig, context: FrontendHalfContext) -> None:
        """Build the sinks, unless another process has them.

        Raises:
            PluginError: a sink cannot be built.
        """
        self._components, self._faults = context.components, context.faults
        self._fields: dict[str, Any] = {
            "clock": context.clock,
            "model": config.model,
            "model_name": config.metrics.model_name,
            "aliases": tuple(config.metrics.aliases),
            "block_size": config.kv_cache.block_size,
            "prefix_caching": config.kv_cache.prefix_caching,
        }
        self._forwards = context.send_stats is not None
        if context.send_stats is None:
            self._sinks = Sinks(self._build(context.components, context.components.enabled(KIND)))
        else:
            self._sinks = ForwardedSinks(context.send_stats) if config.stats.sinks else Sinks()
        self._statistics = Statistics(
            self._sinks,
            context.clock,
            request_metrics=config.stats.request_metrics,
            interval_seconds=config.stats.interval_seconds,
        )

    @property
    def components(self) -> Sequence[Component]:
        """The sinks."""
        return self._sinks.components

    def observer(self) -> OutputObserver:
        """Return the statistics."""
        return self._statistics

    def prepare_change(
        self,
        components: ComponentFactory,
        config: EngineConfig,  # noqa: ARG002
    ) -> PreparedPartChange | None:
        """Build the sinks that a live change adds.

        Raises:
            PluginError: a sink cannot be built.
        """
        if self._forwards:
            return None
        return self._sinks.prepare(self._components, components, self._build)

    def close(self) -> None:
        """Report a last time, and close the sinks."""
        self._statistics.close()

    def _build(self, components: ComponentFactory, names: Collection[str]) -> dict[str, StatSink]:
        return build_sinks(components, names, self._faults, self._fields)
