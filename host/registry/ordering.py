"""The order of logits processors and step parts: phase, then before/after, then as enabled.

Also the checks of the chosen plugins' declarations about one another, and of their names.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hardpoint.errors import PluginConflictError, PluginContractError
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.plugins.step_part import StepPart
from hardpoint.typed import suggest

from .discovery import NAME, NAMES, InstalledPlugin, SelectedPlugin

_Key = tuple[str, str, str]
_PROCESSORS = "logits_processors"
_ORDERED = (_PROCESSORS, "step_parts")


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
    """Return the names of a graph in topological order, else in the order of `place`."""
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


def check_names(chosen: Iterable[SelectedPlugin]) -> None:
    """Refuse names that tables, requests and messages cannot have.

    Raises:
        PluginContractError: names the component, and how it gets another name.
    """
    for item in chosen:
        if NAME.fullmatch(item.name):
            continue
        name, value = (
            text if len(text) <= 100 else f"{text[:100]}..."
            for text in (item.name, item.source.value)
        )
        remedy = "rename its entry point, or its class"
        if item.path.endswith("]"):  # of a list, which takes names
            remedy = f'give it one: {{ use = "{value}", name = "..." }}'
        source = replace(item.source, name=name, value=value)
        raise PluginContractError(f"{source}: its name must be {NAMES}; {remedy}")


def check_neighbours(chosen: Sequence[SelectedPlugin], targets: Mapping[_Key, Any]) -> None:
    """Refuse a component that names itself, or takes a parameter that another one applies, too.

    Args:
        targets: their classes, by key.

    Raises:
        PluginConflictError: names the component, and the fix.
    """
    _check_order(chosen, targets)
    _check_params_fields(chosen, targets)


def _check_order(chosen: Sequence[SelectedPlugin], targets: Mapping[_Key, Any]) -> None:
    for item in chosen:
        # The replacement of a component may name that one, whose name it has.
        if item.kind.name not in _ORDERED or item.path.startswith("plugins.replace."):
            continue
        for relation in ("before", "after"):
            for name in getattr(targets[item.key], relation):
                if item.answers_to(name):
                    raise PluginConflictError(
                        f"{item.source}: its {relation} names {name!r}, which is itself; remove "
                        f"the name"
                    )


def _check_params_fields(chosen: Sequence[SelectedPlugin], targets: Mapping[_Key, Any]) -> None:
    first: dict[str, SelectedPlugin] = {}
    for item in chosen:  # built-in defaults come first
        if item.kind.name != _PROCESSORS:
            continue
        for field in targets[item.key].params_fields:
            if (other := first.setdefault(field, item)) is not item:
                raise PluginConflictError(
                    f"{item.source}: its params_fields name {field!r}, which {other.name!r} "
                    f"applies, too; take its place, plugins.replace = {{ {other.name} = "
                    f'"{item.source.value}" }}, or switch it off, plugins.disable = '
                    f'["{other.name}"]'
                )


def unknown_neighbours(
    chosen: Sequence[SelectedPlugin],
    targets: Mapping[_Key, Any],
    installed: Sequence[InstalledPlugin],
) -> list[str]:
    """Return a warning for each name in `before` and `after` that no logits processor has."""
    processors = [c for c in chosen if c.kind.name == _PROCESSORS]
    known = {c.name for c in processors}
    known |= {f.name for f in installed if f.kind == _PROCESSORS}
    return [
        f"{item.source}: its {relation} names {name!r}, and no logits processor of that name is "
        f"enabled or installed{suggest(name, sorted(known))}"
        for item in processors
        for relation in ("before", "after")
        for name in getattr(targets[item.key], relation)
        if name not in known
    ]
