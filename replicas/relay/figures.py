"""Figures of requests of a relayed frontend, on their way to the sinks of the engines' owner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from hardpoint.boundary.faults import Fanout, StepFaults
from hardpoint.core.frontend.statistics import Statistics
from hardpoint.plugins import EngineConfig, IterationStats, StatSink
from hardpoint.registry.plugin_set import PluginSet

_INTERVAL_S = 0.1


class RelayedSinks(Fanout[StatSink]):
    """Stands for the sinks in a frontend that has none: gathers figures until they are read."""

    def __init__(self) -> None:
        """Begin without figures."""
        super().__init__([])
        self._stats = IterationStats()
        self._is_empty = True
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Return true: there are sinks, elsewhere."""
        return True

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Gather what is recorded; the owner calls the other methods itself."""
        if method == "record":
            self._add(arguments[0])
        return []

    def close(self) -> None:
        """Do nothing: the owner closes the sinks."""

    def pop(self) -> IterationStats | None:
        """Return the figures since the last call; None without any."""
        with self._lock:
            if self._is_empty:
                return None
            stats, self._stats, self._is_empty = self._stats, IterationStats(), True
            return stats

    def _add(self, stats: IterationStats) -> None:
        with self._lock:
            whole, self._is_empty = self._stats, False
            for name in stats.__struct_fields__:
                value = getattr(stats, name)
                if isinstance(value, list):
                    getattr(whole, name).extend(value)
                elif name.startswith("num_"):
                    setattr(whole, name, getattr(whole, name) + value)


class Figures:
    """The statistics of a relayed frontend; opens them in the place of those with sinks."""

    def __init__(self) -> None:
        """Begin without figures."""
        self.sinks = RelayedSinks()

    def open(
        self, config: EngineConfig, plugins: PluginSet, clock: Callable[[], float]
    ) -> Statistics | None:
        """Return the statistics, as `open_statistics` does."""
        del plugins
        if not config.stats.on:
            return None
        return Statistics(
            self.sinks if config.stats.sinks else Fanout[StatSink]([]),
            StepFaults.under(config.plugins),
            clock,
            request_metrics=config.stats.request_metrics,
            interval_seconds=config.stats.interval_seconds,
        )

    def send_every(self, send: Callable[[Any], object], ended: threading.Event) -> None:
        """Send figures as plain data, until the event; in a thread of its own."""
        while not ended.wait(_INTERVAL_S):
            if (stats := self.sinks.pop()) is not None:
                send(msgspec.to_builtins(stats))
