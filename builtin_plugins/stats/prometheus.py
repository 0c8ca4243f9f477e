"""The stat sink that exports metrics for Prometheus."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hardpoint.plugins import (
    EngineReport,
    IterationStats,
    SchedulerStats,
    StatSink,
    StatSinkContext,
)

from .families import OWN, adapter_families, cache_families, engine_families, plugin_families
from .figures import EngineFigures, PluginFigures

if TYPE_CHECKING:
    from hardpoint.plugins.requests.stats import PluginReport


class PrometheusSink(StatSink, Collector):
    """Adds up figures, and exports them as `hardpoint:...` and under the names of aliases.

    Its registry is its own: several engines of a process never meet, and closing frees the memory.
    """

    contract = 1

    def __init__(self, context: StatSinkContext) -> None:
        super().__init__(context)
        self._model_name = context.model_name or context.model
        self._prefixes = (OWN, *context.aliases)
        self._closed = False
        self._start()

    def record(self, stats: IterationStats) -> None:
        """Add the statistics of a batch."""
        if self._closed:
            return
        self._engines[stats.engine_index].record(stats)
        if stats.scheduler is not None:
            for index, scheduler in self._schedulers(stats.scheduler, stats.engine_index):
                self._engines[index].follow(scheduler)

    def exposition(self, plugins: PluginReport) -> str:
        """Return all metrics."""
        if self._closed:
            return ""
        only = self.context.engine_index
        if plugins.scheduler is not None:
            for index, scheduler in self._schedulers(plugins.scheduler, only):
                self._engines[index].scheduler = scheduler
        single = EngineReport(restarts=plugins.health.restarts, sleep_level=plugins.sleep_level)
        for index, report in (plugins.engines or {only: single}).items():
            self._engines[index].read(report)
        self._plugins.follow(plugins)
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for the registry."""
        context, model_name = self.context, self._model_name
        yield from engine_families(model_name, self._engines, self._prefixes)
        yield from adapter_families(self._engines.values(), self._prefixes, time.time())
        yield from plugin_families(model_name, context.engine_index, self._plugins)
        if self._plugins.num_blocks is not None:
            config = {
                "block_size": context.block_size,
                "enable_prefix_caching": context.prefix_caching,
            }
            yield from cache_families(
                model_name, context.engine_index, config, self._plugins.num_blocks, self._prefixes
            )

    def close(self) -> None:
        """Forget all figures."""
        self._closed = True
        self._start()

    @staticmethod
    def _schedulers(scheduler: SchedulerStats, index: int) -> Iterable[tuple[int, SchedulerStats]]:
        return scheduler.engines.items() if scheduler.engines else [(index, scheduler)]

    def _start(self) -> None:
        self._engines: defaultdict[int, EngineFigures] = defaultdict(EngineFigures)
        self._plugins = PluginFigures()
