"""Discovery: which components are installed. Reads metadata only and imports nothing of them."""

from __future__ import annotations

from dataclasses import dataclass

import importlib_metadata

from .kinds import KINDS

__all__ = ["DISTRIBUTION", "Found", "discover", "installed_version"]

DISTRIBUTION = "hardpoint"
_PREFIX = "hardpoint."


@dataclass(frozen=True, order=True)
class Found:
    """An entry point that some installed distribution offers.

    Attributes:
        kind: the group without its `hardpoint.`; may be a kind that this version does not know.
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
        """Name, distribution and place, for messages."""
        return f"{self.kind}/{self.name} ({self.distribution} {self.version}, {self.value})"


def discover() -> list[Found]:
    """Return every entry point in a `hardpoint.*` group, built-ins first, then by name."""
    found = {
        Found(
            kind=point.group.removeprefix(_PREFIX),
            name=point.name,
            value=point.value,
            distribution=point.dist.name if point.dist else "unknown",
            version=point.dist.version if point.dist else "unknown",
        )
        for point in importlib_metadata.entry_points()
        if point.group.startswith(_PREFIX)
    }
    return sorted(found, key=lambda f: (not f.builtin, f))


def installed_version() -> str:
    """Return the installed version of Hardpoint."""
    return importlib_metadata.version(DISTRIBUTION)
