"""Discovery of installed components from distribution metadata, without importing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import importlib_metadata

from hardpoint.plugins.kinds import KINDS, PLANNED
from hardpoint.plugins.manifest import PluginEntry, Source

DISTRIBUTION = "hardpoint"
_PREFIX = "hardpoint."
_EXTERNAL_GROUPS = {"vllm.logits_processors": "logits_processors"}


def is_third_party(plugin: Source | PluginEntry) -> bool:
    """Return whether a plugin does not come with Hardpoint itself.

    Guards treat all plugins the same. What differs: a component that runs when the engine process
    dies twice is left out only if it is a third party's, the message of a dead engine names
    the requests that used such logits processors, and only a scheduler of Hardpoint is known to
    leave priorities to the policy.
    """
    return plugin.distribution != DISTRIBUTION


@dataclass(frozen=True, order=True)
class InstalledPlugin:
    """An entry point of an installed distribution.

    Attributes:
        kind: the group without its `hardpoint.`; may be a kind that this version does not know.
            A group of another engine counts as the kind that it offers.
        value: `package.module:attribute`, or a module for hooks.
    """

    kind: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def builtin(self) -> bool:
        """Whether it comes with Hardpoint itself."""
        return self.distribution == DISTRIBUTION

    @property
    def known_kind(self) -> bool:
        """Whether this version of Hardpoint has the kind."""
        return self.kind in KINDS

    @property
    def label(self) -> str:
        """Name, distribution and value, for messages."""
        return f"{self.kind}/{self.name} ({self.distribution} {self.version}, {self.value})"


def discover(foreign_groups: Sequence[str] = ()) -> list[InstalledPlugin]:
    """Return every entry point in a `hardpoint.*` group, built-ins first, then by name.

    Args:
        foreign_groups: entry-point groups of other engines to include.
    """
    found = {
        InstalledPlugin(
            kind=_EXTERNAL_GROUPS.get(point.group) or point.group.removeprefix(_PREFIX),
            name=point.name,
            value=point.value,
            distribution=point.dist.name if point.dist else "unknown",
            version=point.dist.version if point.dist else "unknown",
        )
        for point in importlib_metadata.entry_points()
        if point.group.startswith(_PREFIX) or point.group in foreign_groups
    }
    return sorted(found, key=lambda f: (not f.builtin, f))


def describe_unknown_kind(kind: str) -> str:
    """Return a sentence about a kind that this version does not have."""
    return f"this Hardpoint has no {kind}{' yet' if kind in PLANNED else ''}"


def installed_version() -> str:
    """Return the installed version of Hardpoint."""
    return importlib_metadata.version(DISTRIBUTION)
