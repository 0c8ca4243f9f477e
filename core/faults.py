"""Faults of plugins that the engine survives: counted, reported and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

from hardpoint.plugins.component import Component, Context
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.stats import StepFault
from hardpoint.registry.blame import describe, raise_unless_fault
from hardpoint.registry.plugin_set import PluginSet

_log = logging.getLogger("hardpoint")

FaultReporter = Callable[[str, BaseException | None], None]
"""Called with a message such as "victim() returned None", and the cause or None."""

CALL_LOST = "the engine goes on, and only this call is lost"
"""The consequence of a fault where no default replaces the plugin's decision."""

_WITHOUT = "the engine goes on without it"


class StepFaults:
    """Counts the faults of plugins of scope *step*."""

    def __init__(self, ends_engine: Collection[str] = ()) -> None:
        """`ends_engine` names the plugins whose faults end the engine (`plugins.on_error`)."""
        self._ends_engine = frozenset(ends_engine)
        self._faults: dict[str, StepFault] = {}

    @classmethod
    def under(cls, on_error: Mapping[str, str]) -> StepFaults:
        """Return the counter for a `plugins.on_error` table."""
        return cls([name for name, scope in on_error.items() if scope == "engine"])

    def reporter(self, source: Source, consequence: str = _WITHOUT) -> FaultReporter:
        """Return the reporter of one plugin; `consequence` is logged with the first fault.

        The reporter raises PluginFaultError if the plugin's faults end the engine.
        """

        def report(message: str, cause: BaseException | None = None) -> None:
            if cause is not None:
                message = f"{message}: {describe(cause)}"
            message = f"{source}: {message}"
            if source.name in self._ends_engine:
                raise PluginFaultError(message) from cause
            self.note(source.name, message, cause, consequence)

        return report

    def note(
        self,
        name: str,
        message: str,
        cause: BaseException | None = None,
        consequence: str = _WITHOUT,
    ) -> None:
        """Count a fault under a name; keep and log the first one of each name."""
        if before := self._faults.get(name):  # a broken plugin fails in every step
            self._faults[name] = StepFault(before.count + 1, before.message)
        else:
            self._faults[name] = StepFault(1, message)
            _log.warning("%s; %s", message, consequence, exc_info=cause)

    def report(self) -> dict[str, StepFault]:
        """Return the faults so far by plugin name."""
        return dict(self._faults)


C = TypeVar("C", bound=Component)


class Fanout(Generic[C]):
    """Calls all components of a kind, and reports what one raises to its reporter."""

    def __init__(self, components: Sequence[tuple[C, FaultReporter]]) -> None:
        """`components` come with the reporters of their faults, in the order of calls."""
        self._components = tuple(components)

    def __bool__(self) -> bool:
        """Return whether there are any components."""
        return bool(self._components)

    def call(self, call: Callable[[C], None], method: str) -> None:
        """Call every component.

        Args:
            call: called with each component.
            method: the name of the component's method, for the message of a fault.

        Raises:
            PluginFaultError: a component whose faults end the engine failed; all were called.
        """
        fatal: PluginFaultError | None = None
        for component, report in self._components:
            try:
                call(component)
            except BaseException as cause:
                raise_unless_fault(cause)
                try:
                    report(f"{method}() failed", cause)
                except PluginFaultError as error:
                    fatal = fatal or error
        if fatal is not None:
            raise fatal

    def close(self) -> None:
        """Close every component.

        Raises:
            PluginFaultError: a component whose faults end the engine failed; all were closed.
        """
        self.call(lambda component: component.close(), "close")


def create_all(
    plugins: PluginSet, kind: str, faults: StepFaults, context: type[Context[C]], **fields: Any
) -> list[tuple[C, FaultReporter]]:
    """Create every enabled component of a kind; if one fails, close those before it.

    Args:
        plugins: the enabled plugins.
        kind: of the components.
        faults: makes the reporters.
        context: the class of the components' context.
        fields: of the context, without name and options.

    Returns:
        The components, each with the reporter of its faults.

    Raises:
        PluginError: a component could not be built.
    """
    created: list[tuple[C, FaultReporter]] = []
    try:
        for entry in plugins.entries(kind):
            component = plugins.create(entry, context, **fields)
            created.append((component, faults.reporter(entry.source, CALL_LOST)))
    except BaseException:
        for component, _ in created:
            component.close()
        raise
    return created
