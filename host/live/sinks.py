"""Live changes of the sinks of statistics."""

from __future__ import annotations

import functools
from typing import Any

from hardpoint.host.boundary.faults import Fanout, StepFaults, create_all
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import StatSink, StatSinkContext

from .change import LiveChange, PreparedChange, Switch

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

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange | None:
        """Build the sinks that are new.

        Raises:
            PluginError: one cannot be built.
        """
        del change
        earlier, before = self._plugins, self._sinks.components
        old = list(zip(earlier.entries(KIND), before, strict=True))
        kept = {
            entry.name: next(sink for one, sink in old if one.is_same(entry))
            for entry in plugins.entries(KIND)
            if any(one.is_same(entry) for one, _ in old)
        }
        new = functools.reduce(lambda rest, name: rest.without(KIND, name), kept, plugins)
        created = create_all(new, KIND, self._faults, StatSinkContext, **self._context)
        built = Fanout(created)
        if not created and len(kept) == len(old):
            return None
        by_name = kept | {sink.name: sink for sink in built.components}
        after = [by_name[entry.name] for entry in plugins.entries(KIND)]
        gone: Fanout[StatSink] = Fanout(())
        gone.components = [sink for sink in before if sink not in after]

        def switch(is_new: bool) -> None:
            self._sinks.components = after if is_new else before
            self._plugins = plugins if is_new else earlier

        return Switch(switch, gone.close, built.close)
