"""Components that step parts drive.

The engine, the workers and the conformance kit put `Components` into the contexts of step parts, so
that a part needs nothing of the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from hardpoint.errors import PluginFaultError, RequestError
from hardpoint.host.boundary.activity import PluginCalls
from hardpoint.host.boundary.errors import close_all
from hardpoint.host.boundary.guard import checked, guard
from hardpoint.host.registry.blame import describe, faults_as, raise_unless_fault
from hardpoint.host.registry.discovery import check_unique
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins.component import Component, Context, Source
from hardpoint.plugins.component.behaviour import behaviour_of
from hardpoint.typed import suggest

Guard = Callable[[Any, str, Source], Any]
"""Returns a component of a kind and a source, whose faults name it."""


class Components:
    """Builds the components of other kinds that step parts drive.

    Args:
        calls: makes the recorder of calls.
        guards: guards of the components from `create`, by kind.
    """

    def __init__(
        self,
        plugins: PluginSet,
        calls: Callable[[str, Source], PluginCalls],
        guards: Mapping[str, Guard] = MappingProxyType({}),
    ) -> None:
        self._plugins, self._calls, self._guards = plugins, calls, guards

    def enabled(self, kind: str) -> list[str]:
        """Return the names of the enabled components of a kind, in their order."""
        return [entry.name for entry in self._plugins.entries(kind)]

    def use(self, plugins: PluginSet) -> None:
        """Use the components of another generation of the plugins."""
        self._plugins = plugins

    def of(self, plugins: PluginSet) -> Components:
        """Return the components of another generation of the plugins."""
        return Components(plugins, self._calls, self._guards)

    def find(self, kind: str, name: str) -> type[Component] | None:
        """Return the class of a component; None if it is not enabled."""
        entry = self._plugins.find(kind, name)
        return None if entry is None else self._plugins.target(entry)

    def identity(self, kind: str, name: str) -> Any:
        """Return a value that other generations have for the same component."""
        entry = self._plugins.find(kind, name)
        return None if entry is None else entry.identity

    def check_name(self, kind: str, name: str, path: str) -> None:
        """Check that a name that a request gives belongs to one distribution."""
        entry = self._plugins.find(kind, name)
        if entry is not None and ":" not in name:
            if entry.name != name:  # one of its other names
                self._plugins.find(kind, name, RequestError)
            check_unique(entry, path, RequestError)

    def hint(self, kind: str, name: str) -> str:
        """Return, as the end of a message, a similar name, and how to get the component."""
        return f"{suggest(name, self.enabled(kind))}{self._plugins.hint(name, kind)}"

    def options(self, kind: str, name: str) -> Any:
        """Return the options of an enabled component as plain data."""
        return msgspec.to_builtins(self._plugins.options(self._plugins.get(kind, name)))

    def call(self, kind: str, name: str, method: str, *args: Any) -> Any:
        """Call a class method of an enabled component; check its result as it declares."""
        entry = self._plugins.get(kind, name)
        return call_declared(kind, entry.source, self._plugins.target(entry), method, *args)

    def calls(self, kind: str, name: str) -> PluginCalls:
        """Return the caller of the methods of a component."""
        return self._calls(kind, self._plugins.get(kind, name).source)

    def create(self, kind: str, name: str, context: type[Context[Any]], **fields: Any) -> Any:
        """Build an enabled component."""
        entry = self._plugins.get(kind, name)
        component = self._plugins.create(entry, context, **fields)
        guard = self._guards.get(kind)
        return component if guard is None else guard(component, kind, entry.source)

    def guarded(
        self,
        kind: str,
        name: str,
        context: type[Context[Any]],
        report: Callable[[str, BaseException | None], None],
        **fields: Any,
    ) -> Any:
        """Build an enabled component, guarded as its kind declares."""
        component = self.create(kind, name, context, **fields)
        return guard(component, kind, report, self.calls(kind, name))

    def close(self, component: Component) -> None:
        """Close a component."""
        close_all([component])

    def source(self, kind: str, name: str) -> str:
        """Return how messages name a component."""
        return str(self._plugins.get(kind, name).source)


def call_declared(kind: str, source: Source, cls: type[Component], method: str, *args: Any) -> Any:
    """Call a class method of a component; return its result, checked as its kind declares.

    Raises:
        PluginFaultError: it failed, or returned something else; the message names the component.
        Exception: declared by the method.
    """
    interface = KINDS[kind].interface
    assert interface is not None, "hooks are called by pluggy"
    behaviour = behaviour_of(interface, method)
    assert behaviour is not None, f"nothing is declared of {method}"
    with faults_as(PluginFaultError, f"{source}: its {method}", passing=behaviour.raises):
        result = getattr(cls, method)(*args)
    return checked(result, interface, method, source)


def describe_fault(error: BaseException) -> str:
    """Return class and text of a component's exception; raise an interrupt by the user."""
    raise_unless_fault(error)
    return describe(error)
