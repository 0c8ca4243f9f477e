"""Components of one kind that are all told the same, and cannot come between each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from hardpoint.plugins import Component, Context, PluginFaultError, PluginSet

from .faults import CALL_LOST, FaultReporter, StepFaults

__all__ = ["Fanout", "create_all"]

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
    plugins: PluginSet, kind: str, faults: StepFaults, context: type[Context], **fields: Any
) -> list[tuple[Any, FaultReporter]]:
    """Build every component of a kind that is on; if one fails, close those before it.

    Args:
        context: its class; `fields` are those beside name and options.

    Returns:
        Each with what its faults are to be told to.

    Raises:
        PluginError: one could not be built.
    """
    created: list[tuple[Any, FaultReporter]] = []
    try:
        for entry in plugins.entries(kind):
            component = plugins.create(entry, context, **fields)
            created.append((component, faults.reporter(entry.source, CALL_LOST)))
    except BaseException:
        for component, _ in created:
            component.close()
        raise
    return created
