"""The states of the components of a process, for operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from hardpoint.host.registry.blame import state_of
from hardpoint.plugins.component import Component

States = dict[str, dict[str, Any]]
"""The states of components by their names; of one that failed, why, as `error`. That of a step part
is by process: "frontend", "engine" and "worker", in each of which there is an instance.
"""


class Half(Protocol):
    """The half of a step part."""

    @property
    def part(self) -> Component:
        """The part."""

    @property
    def until(self) -> int | None:
        """The generation from which on requests do not use it; None if they do."""


def states_of(components: Iterable[Component]) -> States:
    """Return the states of the components that have one. Never raises."""
    states: States = {}
    for component in components:
        if (state := state_of(component)) is not None:
            states[component.name] = state
    return states


def states_of_parts(halves: Iterable[Half], process: str) -> States:
    """Return the states of step parts in this process, of the latest generation."""
    latest = states_of(half.part for half in halves if half.until is None)
    return {name: {process: state} for name, state in latest.items()}


def joined_states(first: Mapping[str, Any], second: Mapping[str, Any]) -> States:
    """Return the states of several processes; the states of a step part stand side by side."""
    names = dict.fromkeys((*first, *second))
    return {name: {**first.get(name, {}), **second.get(name, {})} for name in names}
