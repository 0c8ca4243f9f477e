"""Names that several distributions offer: which use of one is refused, and with what message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hardpoint.errors import HardpointError
from hardpoint.plugins.component.base import Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.config import EngineConfig

from .discovery import InstalledPlugin, SelectedPlugin, toml_key
from .kinds import KINDS, Number, value_at


def ambiguity(reference: str, path: str, found: Sequence[InstalledPlugin], origin: str) -> str:
    """Return the message about a configured name that several components have."""
    listed = " and ".join(f.label for f in found)
    third = next((f for f in found if not f.builtin), found[0])
    if len({f.kind for f in found}) > 1:
        advice = f'name one with its kind, as in "{third.kind}/{third.name}"'
    elif any(f.builtin for f in found) and KINDS[third.kind].chosen_by is None:
        advice = (
            f"to put the one of {third.distribution} in the built-in's place, write instead "
            f'plugins.replace = {{ {toml_key(reference)} = "{third.value}" }}'
        )
    else:
        chosen_by = KINDS[third.kind].chosen_by or "plugins.enable"
        is_list = KINDS[third.kind].number is not Number.ONE
        value = f'["{third.value}"]' if is_list else f'"{third.value}"'
        advice = f"name one by its FQCN, as in {chosen_by} = {value}"
    return f"{path}: {reference!r} is the name of {listed}; {advice} (from {origin})"


def undecided(item: SelectedPlugin, found: Iterable[InstalledPlugin]) -> tuple[Source, ...]:
    """Return other components with the name of a built-in default that no setting names."""
    return () if item.path else _others(item, found)


def warn_of_defaults(
    config: EngineConfig, chosen: Iterable[SelectedPlugin], found: Sequence[InstalledPlugin]
) -> list[str]:
    """Return warnings about the default of a setting whose name other distributions offer too."""
    warnings = []
    for item in chosen:
        path = item.path or _setting_of(config, item)
        if path and item.source.origin == "default" and (others := _others(item, found)):
            labels = _labels(item.kind.name, item.source, others)
            warnings.append(
                f"{path}: {item.name!r} is the name of {labels}; the built-in runs, because "
                f"nothing sets {path}; to choose, set it to an FQCN"
            )
    return warnings


def _setting_of(config: EngineConfig, item: SelectedPlugin) -> str:
    """Return the path of the setting whose value is the name of an item; empty if there is none."""
    path = item.kind.named_by
    return path if path is not None and value_at(config, path) == item.name else ""


def check_unique(entry: PluginEntry, where: str, error: type[HardpointError]) -> None:
    """Check that a name that a model or a request uses belongs to one distribution.

    Args:
        entry: the enabled component of the name.
        where: start of the message.
        error: class of the error.

    Raises:
        HardpointError: other distributions offer a component of this kind and name, and no setting
            decides; of class `error`.
    """
    if not entry.duplicates:
        return
    other, key = entry.duplicates[0], toml_key(f"{entry.kind}/{entry.name}")
    raise error(
        f"{where}: {entry.name!r} is the name of "
        f"{_labels(entry.kind, entry.source, entry.duplicates)}; to choose the one of "
        f'{other.package}, write plugins.replace = {{ {key} = "{other.value}" }}; '
        f'to choose the built-in, write plugins.replace = {{ {key} = "{entry.value}" }}'
    )


def check_other_name(name: str, named: Sequence[PluginEntry], error: type[HardpointError]) -> None:
    """Check that one of the `other_names` of components belongs to one class.

    Args:
        name: the name that is used.
        named: the enabled components that have it.
        error: class of the error.

    Raises:
        HardpointError: several classes have it; of class `error`.
    """
    values = {
        entry.value: f"{entry.kind}/{entry.name} ({entry.source.package}, {entry.value})"
        for entry in named
    }
    if len(values) > 1:
        raise error(
            f"{named[0].kind}: {name!r} is another name of {' and '.join(values.values())}; use "
            f'the name of one of them, such as "{named[0].name}"'
        )


def offers(
    kind: str, name: str, disabled: Sequence[InstalledPlugin], found: Sequence[InstalledPlugin]
) -> str:
    """Return, as the end of a message, who offers a component that is not enabled.

    Args:
        kind: kind of the component.
        name: its name.
        disabled: the installed components that are not enabled.
        found: all installed components.
    """
    matching = [f for f in disabled if (f.kind, f.name) == (kind, name)]
    if not matching:
        return ""
    listed = " and ".join(f"{f.distribution} {f.version}" for f in matching)
    same = [f for f in found if f.name == name]
    if len({f.kind for f in same}) < len(same):
        reference = " or ".join(f'"{f.value}"' for f in matching)
    else:
        reference = f'"{kind}/{name}"' if same[1:] else f'"{name}"'
    return (
        f"; {listed} {'offer' if matching[1:] else 'offers'} it: add {reference} to plugins.enable"
    )


def _others(item: SelectedPlugin, found: Iterable[InstalledPlugin]) -> tuple[Source, ...]:
    """Return the components of other classes that have the kind and the name of an item."""
    return tuple(
        other.source("default")
        for other in found
        if (other.kind, other.name) == (item.kind.name, item.name)
        and other.value != item.source.value
    )


def _labels(kind: str, source: Source, others: Sequence[Source]) -> str:
    return " and ".join(f"{kind}/{o.name} ({o.package}, {o.value})" for o in (source, *others))
