"""The order of logits processors and step parts: phase, then before/after, then as enabled."""

from __future__ import annotations

import graphlib
from collections.abc import Mapping
from typing import Any

from hardpoint.errors import PluginConflictError
from hardpoint.plugins.logits import LogitsPlugin
from hardpoint.plugins.step_part import StepPart


def ordered(processors: Mapping[str, type[LogitsPlugin]]) -> list[str]:
    """Return the names in the order in which they run.

    `before` and `after` name processors of the same phase. Names that are not enabled are ignored,
    as is a processor's own name: it may have replaced the processor that it names.

    Raises:
        PluginConflictError: `before` and `after` make a cycle, or contradict the phases.
    """
    graph: dict[str, set[str]] = {name: set() for name in processors}
    for name, processor in processors.items():
        for other in processor.before:
            if other in processors and other != name:
                _check_phases(name, processor, "before", other, processors[other])
                graph[other].add(name)
        for other in processor.after:
            if other in processors and other != name:
                _check_phases(name, processor, "after", other, processors[other])
                graph[name].add(other)
    place = {name: (processors[name].phase, index) for index, name in enumerate(processors)}
    result = _sorted(graph, place, "logits_processors")
    return sorted(result, key=lambda name: processors[name].phase)


def ordered_parts(parts: Mapping[str, type[StepPart]]) -> list[str]:
    """Return the names of step parts in the order of their calls: before/after, then as enabled.

    Names that are not enabled are ignored, as is a part's own name.

    Raises:
        PluginConflictError: `before` and `after` make a cycle.
    """
    graph: dict[str, set[str]] = {name: set() for name in parts}
    for name, part in parts.items():
        for other in (set(part.before) & parts.keys()) - {name}:
            graph[other].add(name)
        graph[name] |= (set(part.after) & parts.keys()) - {name}
    place = {name: index for index, name in enumerate(parts)}
    return _sorted(graph, place, "step_parts")


def _sorted(graph: dict[str, set[str]], place: Mapping[str, Any], kind: str) -> list[str]:
    """Return the names of a graph, each after those before it; else in the order of `place`."""
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as cycle:
        raise PluginConflictError(
            f"{kind}: their before/after make a cycle: " + " -> ".join(cycle.args[1])
        ) from None
    result: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready.extend(sorter.get_ready())
        ready.sort(key=place.__getitem__)
        first = ready.pop(0)
        result.append(first)
        sorter.done(first)
    return result


def _check_phases(
    name: str,
    processor: type[LogitsPlugin],
    relation: str,
    other_name: str,
    other: type[LogitsPlugin],
) -> None:
    if processor.phase != other.phase:
        raise PluginConflictError(
            f"logits_processors: {name!r} (phase {processor.phase.name}) wants to run {relation} "
            f"{other_name!r} (phase {other.phase.name}); before and after order processors of "
            f"one phase only"
        )
