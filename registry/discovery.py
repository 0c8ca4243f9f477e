"""Discovery of installed components from distribution metadata, without importing them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import importlib_metadata

from hardpoint.errors import PluginConflictError
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.manifest import PluginEntry

from .kinds import KINDS, PluginKind

DISTRIBUTION = "hardpoint"
CORE_DISTRIBUTION = "hardpoint-core"
"""The distribution of the same package with fewer requirements, in the place of the other."""

_DISTRIBUTIONS = (DISTRIBUTION, CORE_DISTRIBUTION)
_PREFIX = "hardpoint."
_LEFT_OUT = "hardpoint_left_out."
"""Prefix of the groups in which `scripts/build-core` lists what only the other one has."""
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
    return plugin.distribution not in _DISTRIBUTIONS


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
        return self.distribution in _DISTRIBUTIONS

    @property
    def known_kind(self) -> bool:
        """Whether this version of Hardpoint has the kind."""
        return self.kind in KINDS

    @property
    def label(self) -> str:
        """Name, distribution and value, for messages."""
        offered_by = self.source("default")
        place = "" if offered_by.package.startswith("module ") else f"{offered_by.package}, "
        return f"{self.kind}/{self.name} ({place}{self.value})"

    def source(self, origin: str) -> Source:
        """Return its identity, given what enables it."""
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
    found = {
        InstalledPlugin(
            _EXTERNAL_GROUPS.get(point.group) or point.group.removeprefix(_PREFIX),
            point.name,
            point.value,
            *origin(point.dist),
        )
        for point in points
        if point.group.startswith(_PREFIX) or point.group in foreign_groups
    }
    if {f.distribution for f in found}.issuperset(_DISTRIBUTIONS):
        raise PluginConflictError(
            f"{' and '.join(_DISTRIBUTIONS)} are installed both, and have the same files: "
            f"pip uninstall {' '.join(_DISTRIBUTIONS)}, then pip install one of them"
        )
    return sorted(found, key=lambda f: (not f.builtin, f))


def is_left_out(kind: str, name: str) -> bool:
    """Return whether the installed distribution lacks a component that `hardpoint` has."""
    return name in {point.name for point in _left_out(kind)}


def left_out_names(kind: str) -> list[str]:
    """Return the components of a kind that only `hardpoint` has, where another is installed."""
    return sorted(point.name for point in _left_out(kind))


def _left_out(kind: str) -> importlib_metadata.EntryPoints:
    return importlib_metadata.entry_points(group=_LEFT_OUT + kind)


def may_lack(module: str) -> bool:
    """Return whether a module may be one of Hardpoint's that the installed distribution lacks."""
    return module.startswith(_PREFIX) and any(
        point.group.startswith(_LEFT_OUT) for point in importlib_metadata.entry_points()
    )


def advise(what: str) -> str:
    """Return where to get what the installed distribution lacks."""
    return (
        f"{CORE_DISTRIBUTION} has no {what}; to have it, pip uninstall {CORE_DISTRIBUTION} and "
        f"pip install {DISTRIBUTION}"
    )


def advice(kind: str, name: str) -> str:
    """Return, as the end of a message, where to get a component that is left out, else nothing."""
    return f"; {advise(f'{kind}/{name}')}" if is_left_out(kind, name) else ""


def describe_unknown_kind(kind: str) -> str:
    """Return a sentence about a kind that this version does not have."""
    return f"this Hardpoint has no {kind}"


def installed_version() -> str:
    """Return the installed version of Hardpoint."""
    with contextlib.suppress(importlib_metadata.PackageNotFoundError):
        return importlib_metadata.version(DISTRIBUTION)
    return importlib_metadata.version(CORE_DISTRIBUTION)


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
        """Kind, name and value; those of its `PluginEntry`."""
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
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
