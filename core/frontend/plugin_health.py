"""Which plugins ended requests, and which are not trusted any more."""

from __future__ import annotations

import msgspec

from hardpoint.plugins import RequestError
from hardpoint.plugins.stats import StepFault
from hardpoint.registry.discovery import DISTRIBUTION
from hardpoint.registry.plugin_set import PluginSet


class Health(msgspec.Struct, frozen=True):
    """How an engine is.

    Attributes:
        faults: by plugin name, how many distinct requests it ended.
        quarantined: by plugin name, its first fault; requests that use it are refused.
        fallbacks: by plugin name, the decisions that the built-in default took in its place, and
            the calls that nothing was lost by.
        restarts: how often a dead engine was started anew.
    """

    faults: dict[str, int]
    quarantined: dict[str, str]
    fallbacks: dict[str, StepFault] = {}
    restarts: int = 0

    @property
    def ok(self) -> bool:
        """Whether every plugin is in use."""
        return not self.quarantined


class PluginHealth:
    """Counts the requests that each plugin ended; quarantines third-party ones.

    A built-in is never quarantined: too much depends on it, and its faults are ours to mend.
    """

    def __init__(self, plugins: PluginSet, quarantine_after: int) -> None:
        """`quarantine_after` distinct requests; 0 never does."""
        self._own = {
            entry.name
            for entry in plugins.entries("logits_processors")
            if entry.distribution == DISTRIBUTION
        }
        self._quarantine_after = quarantine_after
        self._ended: dict[str, set[str]] = {}
        self._first: dict[str, str] = {}

    def record(self, plugin: str, request_id: str, message: str) -> None:
        """Note that a plugin ended a request."""
        self._ended.setdefault(plugin, set()).add(request_id)
        self._first.setdefault(plugin, message)

    def check(self, plugin: str) -> None:
        """Refuse a request that uses a quarantined plugin.

        Raises:
            RequestError: naming the plugin and its first fault.
        """
        if self._quarantined(plugin):
            raise RequestError(
                f"plugin_args.{plugin}: the plugin is quarantined, for it ended "
                f"{len(self._ended[plugin])} requests; the first: {self._first[plugin]}"
            )

    def report(self, fallbacks: dict[str, StepFault], restarts: int = 0) -> Health:
        """Return what is known, with what the engine tells of its own plugins."""
        return Health(
            faults={plugin: len(ended) for plugin, ended in self._ended.items()},
            quarantined={p: self._first[p] for p in self._ended if self._quarantined(p)},
            fallbacks=fallbacks,
            restarts=restarts,
        )

    def _quarantined(self, plugin: str) -> bool:
        ended = len(self._ended.get(plugin, ()))
        return plugin not in self._own and 0 < self._quarantine_after <= ended
