"""Counts of the requests that plugins ended, and the quarantine of plugins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hardpoint.host.registry.discovery import is_third_party
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import RequestError
from hardpoint.plugins.requests.stats import Health, StepFault

_QUARANTINED = ("logits_processors", "io_processors")
_IDS = 1000

NotifyFault = Callable[[str, str, str | None], object]
"""Called with a plugin, a message, and the request that ended; None is the engine's death."""


class PluginHealth:
    """Counts the requests that each plugin ended; quarantines third-party plugins of some kinds.

    A built-in is never quarantined: arguments that contradict one another end their own request,
    and a client could have a built-in refused to all others by a few of these. Nor is a plugin that
    every request needs, such as the tokenizer.

    Attributes:
        ended: by plugin name, the number of requests that it ended.
        newest, first: by plugin name, ids of the newest, and its effect on the first.
        deadly: by plugin name, why it is quarantined: it ran when the engine died.
        notify: called with each fault that is recorded here, for other frontends to `add`.
    """

    def __init__(self, plugins: PluginSet, quarantine_after: int) -> None:
        """Quarantine a plugin after `quarantine_after` distinct requests; 0 never does."""
        self.use(plugins, quarantine_after)
        self.ended: dict[str, int] = {}
        self.newest: dict[str, deque[str]] = {}
        self.first: dict[str, str] = {}
        self.deadly: dict[str, str] = {}
        self.notify: NotifyFault = lambda *_: None

    def use(self, plugins: PluginSet, quarantine_after: int) -> None:
        """Count for another generation of the plugins; earlier counts stay."""
        entries = (e for kind in _QUARANTINED for e in plugins.entries(kind))
        self._dispensable = {entry.name for entry in entries if is_third_party(entry)}
        self._quarantine_after = quarantine_after

    def record(self, plugin: str, request_id: str | None, message: str) -> None:
        """Record that a plugin ended a request; None quarantines it, as the engine died with it."""
        self.add(plugin, message, request_id)
        self.notify(plugin, message, request_id)

    def add(self, plugin: str, message: str, request_id: str | None, count: int = 1) -> None:
        """Record a fault that this frontend or another one has noticed, or `count` of them."""
        if request_id is None:
            self.deadly[plugin] = message
        elif request_id not in (newest := self.newest.setdefault(plugin, deque(maxlen=_IDS))):
            newest.append(request_id)
            self.first.setdefault(plugin, message)
            self.ended[plugin] = self.ended.get(plugin, 0) + count

    def check(self, plugin: str, path: str = "") -> None:
        """Refuse a request that uses a quarantined plugin, by `path` if not by arguments.

        Raises:
            RequestError: naming the plugin and its first fault.
        """
        where = f"{path}: {plugin!r} is" if path else f"plugin_args.{plugin}: the plugin is"
        if plugin in self.deadly:
            raise RequestError(f"{where} quarantined: {self.deadly[plugin]}")
        if self._quarantined(plugin):
            ended = f"it ended {self.ended[plugin]} requests; the first: {self.first[plugin]}"
            raise RequestError(f"{where} quarantined, for {ended}")

    def report(
        self, fallbacks: dict[str, StepFault], slow: dict[str, StepFault], restarts: int = 0
    ) -> Health:
        """Return the health, with the faults that the engine reports of its own plugins."""
        return Health(
            faults=dict(self.ended),
            quarantined={p: self.first[p] for p in self.ended if self._quarantined(p)}
            | self.deadly,
            fallbacks=fallbacks,
            slow=slow,
            restarts=restarts,
        )

    def _quarantined(self, plugin: str) -> bool:
        ended = self.ended.get(plugin, 0)
        return plugin in self._dispensable and 0 < self._quarantine_after <= ended
