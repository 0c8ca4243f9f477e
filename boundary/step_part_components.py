"""The components of other kinds that step parts drive, and the text of their faults."""

from __future__ import annotations

from typing import Any

from hardpoint.plugins.component import Context
from hardpoint.registry.blame import describe, raise_unless_fault
from hardpoint.registry.plugin_set import PluginSet


class Components:
    """Builds the components of other kinds that step parts drive."""

    def __init__(self, plugins: PluginSet) -> None:
        """Build components that are enabled in `plugins`."""
        self._plugins = plugins

    def create(self, kind: str, name: str, context: type[Context[Any]], **fields: Any) -> Any:
        """Build an enabled component."""
        return self._plugins.create(self._plugins.get(kind, name), context, **fields)

    def source(self, kind: str, name: str) -> str:
        """Return how messages name a component."""
        return str(self._plugins.get(kind, name).source)


def describe_fault(error: BaseException) -> str:
    """Return class and text of a component's exception; raise one that is the user's interrupt."""
    raise_unless_fault(error)
    return describe(error)
