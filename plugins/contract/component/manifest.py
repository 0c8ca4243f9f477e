"""The manifest: the resolved set of plugins, the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from hardpoint.typed import stable_bytes

from .base import Source


class PluginEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One enabled component.

    Attributes:
        value: `package.module:Qual.Name`, or a module.
        options: plain data; checked by the component's own type.
        origin: source of the setting that enabled it; not part of the hash.
        place: position in the resolved order of its kind, from 0.
        wraps: the components that it builds, by the reference that it builds them with.
        stays: whether only the frontend has it: hooks of an object that a program hands over.
        duplicates: components of the same kind and name that other distributions offer, if no
            setting decides among them; not part of the hash.
    """

    kind: str
    name: str
    value: str
    distribution: str
    version: str
    options: dict[str, Any] = {}
    origin: str = "default"
    place: int = 0
    wraps: dict[str, PluginEntry] = {}
    stays: bool = False
    duplicates: tuple[Source, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, name and value; a wrapped component may share the name of an enabled one."""
        return self.kind, self.name, self.value

    @property
    def path(self) -> str:
        """Kind and name, as in `Manifest.quarantined`."""
        return f"{self.kind}/{self.name}"

    def tree(self) -> Iterator[PluginEntry]:
        """Yield the entry and the entries of all components that it wraps, at any depth."""
        yield self
        for wrapped in self.wraps.values():
            yield from wrapped.tree()

    def is_same(self, other: PluginEntry | None) -> bool:
        """Return whether another entry is of the same component, with the same options."""
        return other is not None and self.identity == other.identity

    @property
    def identity(self) -> tuple[Any, ...]:
        """The component and its options, for comparison."""
        wraps = {use: entry.identity for use, entry in self.wraps.items()}
        return self.key, self.distribution, self.version, self.options, self.stays, wraps

    @property
    def source(self) -> Source:
        """Its identity, for messages."""
        return Source(self.name, self.value, self.distribution, self.version, self.origin)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Every enabled component.

    Attributes:
        hardpoint: version of the engine.
        generation: incremented by every live change.
        quarantined: by path, why a component was removed: engines died in it.
    """

    hardpoint: str
    entries: tuple[PluginEntry, ...]
    generation: int = 1
    quarantined: dict[str, str] = {}

    def tree(self) -> Iterator[PluginEntry]:
        """Yield all entries, each followed by the entries of the components that it wraps."""
        for entry in self.entries:
            yield from entry.tree()

    def quarantined_of(self, kind: str) -> dict[str, str]:
        """Return why components of a kind were removed, by name."""
        paths = ((path.split("/", 1), why) for path, why in self.quarantined.items())
        return {name: why for (of, name), why in paths if of == kind}

    @property
    def hash(self) -> str:
        """Return a digest of names, versions, classes, options and order."""
        ordered = sorted(self.entries, key=lambda e: (e.kind, e.place, e.name))
        content = [_hashed(entry) for entry in ordered]
        return hashlib.sha256(stable_bytes((self.hardpoint, content))).hexdigest()


def _hashed(entry: PluginEntry) -> tuple[Any, ...]:
    """Return the fields of an entry that are part of the hash."""
    wraps = {use: _hashed(wrapped) for use, wrapped in entry.wraps.items()}
    e = entry
    return e.kind, e.name, e.value, e.distribution, e.version, e.options, e.place, wraps
