"""Faults of plugins whose decisions the built-in default can take: counted, told, survived."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

from hardpoint.plugins.component import Component, Context
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.stats import StepFault
from hardpoint.registry.plugin_set import PluginSet

_log = logging.getLogger("hardpoint")

FaultReporter = Callable[[str, BaseException | None], None]
"""Called with words such as "victim() returned None" and the cause, if there is one."""

CALL_LOST = "the engine goes on, and only this call is lost"
"""What becomes of a fault where nothing decides in the plugin's place."""

_WITHOUT = "the engine goes on without it"


class StepFaults:
    """Books of the decisions that plugins of scope *step* did not take."""

    def __init__(self, ends_engine: Collection[str] = ()) -> None:
        """`ends_engine` names the plugins whose faults end the engine (`plugins.on_error`)."""
        self._ends_engine = frozenset(ends_engine)
        self._faults: dict[str, StepFault] = {}

    @classmethod
    def under(cls, on_error: Mapping[str, str]) -> StepFaults:
        """Return the books where `plugins.on_error` says this."""
        return cls([name for name, scope in on_error.items() if scope == "engine"])

    def reporter(self, source: Source, then: str = _WITHOUT) -> FaultReporter:
        """Return what notes the faults of one plugin, with what becomes of them.

        The reporter raises PluginFaultError if the plugin's faults end the engine.
        """

        def report(words: str, cause: BaseException | None = None) -> None:
            if cause is not None:
                # Also where the error's own __str__ is broken.
                words = f"{words}: {traceback.format_exception_only(cause)[-1].strip()}"
            message = f"{source}: {words}"
            if source.name in self._ends_engine:
                raise PluginFaultError(message) from cause
            self.note(source.name, message, cause, then)

        return report

    def note(
        self, name: str, message: str, cause: BaseException | None = None, then: str = _WITHOUT
    ) -> None:
        """Count a fault under a name; the first one of a name is kept and logged."""
        if before := self._faults.get(name):  # what is broken is so in every step
            self._faults[name] = StepFault(before.count + 1, before.message)
        else:
            self._faults[name] = StepFault(1, message)
            _log.warning("%s; %s", message, then, exc_info=cause)

    def report(self) -> dict[str, StepFault]:
        """Return the faults so far by plugin name."""
        return dict(self._faults)


C = TypeVar("C", bound=Component)


class Fanout(Generic[C]):
    """Calls all of them; what one raises is told to its reporter."""

    def __init__(self, components: Sequence[tuple[C, FaultReporter]]) -> None:
        """Keep the components, each with what its faults are told to, in the order of calls."""
        self._components = tuple(components)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._components)

    def call(self, call: Callable[[C], None], method: str) -> None:
        """Call each one.

        Args:
            call: what to do with it.
            method: its name, for what is told of a fault.

        Raises:
            PluginFaultError: one whose faults end the engine failed; all were called.
        """
        fatal: PluginFaultError | None = None
        for component, report in self._components:
            try:
                call(component)
            except Exception as cause:
                try:
                    report(f"{method}() failed", cause)
                except PluginFaultError as error:
                    fatal = fatal or error
        if fatal is not None:
            raise fatal

    def close(self) -> None:
        """Close them all.

        Raises:
            PluginFaultError: one whose faults end the engine failed; all were closed.
        """
        self.call(lambda component: component.close(), "close")


def create_all(
    plugins: PluginSet, kind: str, faults: StepFaults, context: type[Context[C]], **fields: Any
) -> list[tuple[C, FaultReporter]]:
    """Build every component of a kind that is on; if one fails, close those before it.

    Args:
        context: its class; `fields` are those beside name and options.

    Returns:
        Each with what its faults are to be told to.

    Raises:
        PluginError: one could not be built.
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
