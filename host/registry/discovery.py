"""Discovery of installed components from distribution metadata, without importing them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import importlib_metadata

from hardpoint.errors import HardpointError
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.config import EngineConfig
from hardpoint.typed import toml_text

from .adapters.external_packages import component_hint
from .kinds import KINDS, Number, PluginKind, value_at

DISTRIBUTION = "hardpoint"
_PREFIX = "hardpoint."
NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060\ufeff]{1,100}")
NAMES = "1 to 100 printable characters without blanks"
"""The names that tables, requests and messages can have."""
_EXTERNAL_GROUPS = {"vllm.logits_processors": "logits_processors"}


def is_third_party(plugin: Source | PluginEntry) -> bool:
    """Return whether a plugin does not come with Hardpoint itself.

    Guards treat all plugins the same. What differs: a logits processor that ended several requests,
    and a component that runs when the engine process dies twice, are left out only if they are a
    third party's; only after calls of a third party are torch's settings compared, and only its
    `scheduled` can be responsible for what a scheduler of Hardpoint seems to have changed; the
    message of a dead engine names the requests that used such logits processors; and only a
    scheduler of Hardpoint is known to leave priorities to the policy.
    """
    return plugin.distribution != DISTRIBUTION


@dataclass(frozen=True, order=True)
class InstalledPlugin:
    """An entry point of an installed distribution.

    Attributes:
        kind: the group without its `hardpoint.`; may be a kind that this version does not know.
            A group of another engine counts as the kind that it offers.
        value: `package.module:attribute`, or a module for hooks.
        origin: argument of the program that hands it over, which enables it; empty if none does.
        target: the object that is handed over.
        stays: whether only the frontend has it.
        problem: why an engine in a process of its own cannot have it; empty if it can.
    """

    kind: str
    name: str
    value: str
    distribution: str
    version: str
    origin: str = field(default="", compare=False)
    target: Any = field(default=None, compare=False, repr=False)
    stays: bool = field(default=False, compare=False)
    problem: str = field(default="", compare=False)

    @property
    def builtin(self) -> bool:
        """Whether it comes with Hardpoint itself."""
        return self.distribution == DISTRIBUTION

    @property
    def known_kind(self) -> bool:
        """Whether this version of Hardpoint has the kind."""
        return self.kind in KINDS

    @property
    def references(self) -> tuple[str, str, str]:
        """The texts that select it in a configuration."""
        return self.name, f"{self.kind}/{self.name}", self.value

    @property
    def label(self) -> str:
        """Name, distribution and value, for messages."""
        offered_by = self.source("default")
        place = "" if offered_by.package.startswith("module ") else f"{offered_by.package}, "
        return f"{self.kind}/{self.name} ({place}{self.value})"

    def source(self, origin: str) -> Source:
        """Return its identity; `origin` is the setting that enables it."""
        return Source(self.name, self.value, self.distribution, self.version, origin)


def discover(foreign_groups: Sequence[str] = ()) -> list[InstalledPlugin]:
    """Return every entry point in a `hardpoint.*` group, built-ins first, then by name.

    Args:
        foreign_groups: entry-point groups of other engines to include.

    Raises:
        PluginConflictError: Hardpoint is installed twice.
    """

    origins: dict[int, tuple[str, str]] = {id(None): ("unknown", "unknown")}

    def origin(distribution: importlib_metadata.Distribution | None) -> tuple[str, str]:
        key = id(distribution)
        if key not in origins:  # a distribution parses its metadata each time that it is asked
            assert distribution is not None
            origins[key] = distribution.name, distribution.version
        return origins[key]

    points = importlib_metadata.entry_points()
    plugins = {
        InstalledPlugin(
            _EXTERNAL_GROUPS.get(point.group) or point.group.removeprefix(_PREFIX),
            point.name,
            point.value,
            *origin(point.dist),
        )
        for point in points
        if point.group.startswith(_PREFIX) or point.group in foreign_groups
    }
    return sorted(plugins, key=lambda f: (not f.builtin, f))


def describe_unknown_kind(kind: str) -> str:
    """Return a sentence about a kind that this version does not have."""
    return f"this Hardpoint has no {kind}"


def installed_version() -> str:
    """Return the installed version of Hardpoint."""
    return importlib_metadata.version(DISTRIBUTION)


@dataclass(frozen=True)
class SelectedPlugin:
    """An enabled component.

    Attributes:
        path: the configuration path that names it; empty for built-in defaults.
        target: the imported object, if selecting it needed an import.
        stays: whether only the frontend has it.
    """

    kind: PluginKind
    source: Source
    path: str = ""
    target: Any = None
    stays: bool = False

    @property
    def name(self) -> str:
        """The name under which it is enabled."""
        return self.source.name

    @property
    def key(self) -> tuple[str, str, str]:
        """PluginKind, name and value, as in its `PluginEntry`."""
        return self.kind.name, self.name, self.source.value

    def answers_to(self, reference: str) -> bool:
        """Return whether a reference is its name, with or without its kind, or its FQCN."""
        return reference in (self.name, f"{self.kind.name}/{self.name}", self.source.value)


def name_of(reference: str, among: Iterable[SelectedPlugin]) -> str:
    """Return a hint at the name of a component where only names count, if there is one."""
    for item in among:
        if item.answers_to(reference):
            return f"; {reference} is enabled as {item.name!r}, so write {toml_key(item.name)}"
    return ""


def toml_key(name: str) -> str:
    """Return a name as a key of a TOML document, in quotes where TOML needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_text(name)


def ambiguity(reference: str, path: str, plugins: Sequence[InstalledPlugin], origin: str) -> str:
    """Return the message about a configured name that several components have."""
    listed = " and ".join(f.label for f in plugins)
    third = next((f for f in plugins if not f.builtin), plugins[0])
    if len({f.kind for f in plugins}) > 1:
        advice = f'name one with its kind, as in "{third.kind}/{third.name}"'
    elif any(f.builtin for f in plugins) and KINDS[third.kind].chosen_by is None:
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


PluginsByName = Mapping[str, Sequence[InstalledPlugin]]


def plugins_by_name(installed: Iterable[InstalledPlugin]) -> PluginsByName:
    """Return the installed plugins of each name."""
    by_name: dict[str, list[InstalledPlugin]] = {}
    for plugin in installed:
        by_name.setdefault(plugin.name, []).append(plugin)
    return by_name


def undecided(item: SelectedPlugin, installed: PluginsByName) -> tuple[Source, ...]:
    """Return other components with the name of a built-in default that no setting names."""
    return () if item.path else _others(item, installed)


def warn_of_defaults(
    config: EngineConfig, chosen: Iterable[SelectedPlugin], installed: PluginsByName
) -> list[str]:
    """Return warnings about defaults with a name that other distributions offer too."""
    warnings = []
    for item in chosen:
        path = item.path or _setting_of(config, item)
        if path and item.source.origin == "default" and (others := _others(item, installed)):
            labels = _labels(item.kind.name, item.source, others)
            warnings.append(
                f"{path}: {item.name!r} is the name of {labels}; the built-in runs, because "
                f"nothing sets {path}; to choose, set it to an FQCN"
            )
    return warnings


def _setting_of(config: EngineConfig, item: SelectedPlugin) -> str:
    path = item.kind.named_by
    return path if path is not None and value_at(config, path) == item.name else ""


def check_unique(entry: PluginEntry, where: str, error: type[HardpointError]) -> None:
    """Check that a name that a model or a request uses belongs to one distribution.

    Args:
        entry: the enabled component of the name.
        where: start of the message.

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
        named: the enabled components that have it.

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
    kind: str, name: str, disabled: Sequence[InstalledPlugin], installed: Sequence[InstalledPlugin]
) -> str:
    """Return, as the end of a message, which package offers a component that is not enabled."""
    matching = [f for f in disabled if (f.kind, f.name) == (kind, name)]
    if not matching:
        return component_hint(name, kind)
    listed = " and ".join(f"{f.distribution} {f.version}" for f in matching)
    same = [f for f in installed if f.name == name]
    if len({f.kind for f in same}) < len(same):
        reference = " or ".join(f'"{f.value}"' for f in matching)
    else:
        reference = f'"{kind}/{name}"' if same[1:] else toml_text(name)
    return (
        f"; {listed} {'offer' if matching[1:] else 'offers'} it: add {reference} to plugins.enable"
    )


def _others(item: SelectedPlugin, installed: PluginsByName) -> tuple[Source, ...]:
    return tuple(
        other.source("default")
        for other in installed.get(item.source.name, ())
        if other.kind == item.kind.name and other.value != item.source.value
    )


def _labels(kind: str, source: Source, others: Sequence[Source]) -> str:
    return " and ".join(f"{kind}/{o.name} ({o.package}, {o.value})" for o in (source, *others))
