"""Live changes of the sinks of statistics."""

from __future__ import annotations

from typing import Any

from hardpoint.boundary.faults import Fanout, StepFaults, create_entries
from hardpoint.plugins import StatSink, StatSinkContext
from hardpoint.registry.plugin_set import PluginSet

from .change import Change, Prepared, Switch
from .settings import is_same

KIND = "stat_sinks"


class SinkChanges:
    """Replaces the sinks of statistics; a `Slot`. Those that stay go on with what they have."""

    def __init__(
        self,
        plugins: PluginSet,
        sinks: Fanout[StatSink],
        faults: StepFaults,
        context: dict[str, Any],
    ) -> None:
        """Replace sinks.

        Args:
            plugins: the plugins that the sinks are of.
            sinks: passes figures to the sinks.
            faults: counts their faults.
            context: fields of their contexts.
        """
        self._plugins, self._sinks = plugins, sinks
        self._faults, self._context = faults, context

    def prepare(self, change: Change, plugins: PluginSet) -> Prepared | None:
        """Build the sinks that are new.

        Raises:
            PluginError: one cannot be built.
        """
        del change
        before, after = self._plugins.entries(KIND), plugins.entries(KIND)
        own = dict(zip([e.name for e in before], self._sinks.components, strict=True))
        old = {entry.name: entry for entry in before}
        new = [entry for entry in after if not is_same(old.get(entry.name), entry)]
        kept = [entry for entry in after if entry not in new]
        if not new and len(kept) == len(before):
            return None
        created = create_entries(plugins, new, self._faults, StatSinkContext, **self._context)
        built = Fanout(created)
        by_name = dict(zip([e.name for e in new], built.components, strict=True))
        wanted = [by_name.get(entry.name) or own[entry.name] for entry in after]
        gone = [sink for sink in self._sinks.components if sink not in wanted]

        earlier = self._plugins

        def switch(is_new: bool) -> None:
            self._sinks.use(wanted if is_new else list(own.values()))
            self._plugins = plugins if is_new else earlier

        def close(entries: list[StatSink]) -> None:
            closing: Fanout[StatSink] = Fanout(())
            closing.use(entries)
            closing.close()

        return Switch(switch, lambda: close(gone), lambda: close(built.components))
