"""Every installed component: whether it is on, why, and where in the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hardpoint.plugins import EngineConfig
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.errors import PluginConflictError, PluginNotFoundError
from hardpoint.plugins.kinds import KINDS, PLANNED, Number
from hardpoint.plugins.manifest import PluginEntry, Source
from hardpoint.plugins.typed import suggest
from hardpoint.registry.adapt import adapter_of
from hardpoint.registry.discovery import Found
from hardpoint.registry.plugin_set import PluginSet


@dataclass(frozen=True)
class Listed:
    """One component.

    Attributes:
        source: who it is.
        on: whether it is part of the engine.
        why: why it is on or off.
        place: position among those of its kind that are on, from 1; None where there is no order.
        phase: of a logits processor that is on.
        adapter: through which it was loaded, if it is on and was written for another engine.
    """

    kind: str
    source: Source
    on: bool
    why: str
    place: int | None = None
    phase: str | None = None
    adapter: str | None = None

    @property
    def name(self) -> str:
        """The name under which it is on, or could be."""
        return self.source.name

    @property
    def package(self) -> str:
        """Its distribution and version, or its module."""
        return self.source.package

    @property
    def order(self) -> str:
        """Position and phase; empty where there is no order."""
        return f"{self.place} {self.phase}" if self.place and self.phase else ""


def list_components(
    plugins: PluginSet, config: EngineConfig, config_sources: ConfigSources
) -> list[Listed]:
    """Return everything that is on or installed, by kind; imports nothing that is not on."""
    on = [
        _listed(entry, plugins)
        for entry in sorted(plugins.manifest.entries, key=lambda entry: entry.place)
    ]
    off = [
        Listed(
            kind=found.kind,
            source=Source(found.name, found.value, found.distribution, found.version, "default"),
            on=False,
            why=_why_off(found, config, config_sources),
        )
        for found in plugins.found
        if not _is_on(found, plugins)
    ]
    rank = {kind: index for index, kind in enumerate(KINDS)}
    return sorted([*on, *off], key=lambda each: (rank.get(each.kind, len(rank)), each.kind))


def find_listed(components: Sequence[Listed], name: str) -> Listed:
    """Return the component called `name` or `kind/name`; one that is on comes first.

    Raises:
        PluginNotFoundError: nothing has that name.
        PluginConflictError: several have it, each in another kind.
    """
    named = [c for c in components if name in (c.name, f"{c.kind}/{c.name}")]
    if not named:
        known = sorted({c.name for c in components})
        raise PluginNotFoundError(
            f"no installed plugin is called {name!r}{suggest(name, known)}; "
            f"`hardpoint plugins list` shows them all"
        )
    kinds = list(dict.fromkeys(c.kind for c in named))
    if len(kinds) > 1:
        choices = ", ".join(f"{kind}/{named[0].name}" for kind in kinds)
        raise PluginConflictError(f"{name!r} could be any of {choices}")
    return max(named, key=lambda c: c.on)


def _listed(entry: PluginEntry, plugins: PluginSet) -> Listed:
    if entry.kind != "logits_processors":
        return Listed(entry.kind, entry.source, True, entry.origin)
    cls = plugins.target(entry)
    return Listed(
        kind=entry.kind,
        source=entry.source,
        on=True,
        why=entry.origin,
        place=entry.place + 1,
        phase=cls.phase.name,
        adapter=adapter_of(cls),
    )


def _is_on(found: Found, plugins: PluginSet) -> bool:
    """Whether an entry point is on under its own name or one that the configuration gave it."""
    same: list[PluginEntry] = [e for e in plugins.entries(found.kind) if e.value == found.value]
    if any(entry.name == found.name for entry in same):
        return True
    offered = {f.name for f in plugins.found if (f.kind, f.value) == (found.kind, found.value)}
    return any(entry.name not in offered for entry in same)


def _why_off(found: Found, config: EngineConfig, config_sources: ConfigSources) -> str:
    names = (found.name, f"{found.kind}/{found.name}")
    kind = KINDS.get(found.kind)
    if kind is None:
        yet = " yet" if found.kind in PLANNED else ""
        return f"this Hardpoint has no {found.kind}{yet}"
    for name, value in config.plugins.replace.items():
        if name in names and found.builtin:
            path = f"plugins.replace.{name}"
            return f"replaced by {value}: {path} ({config_sources.of(path)})"
    for index, name in enumerate(config.plugins.disable):
        if name in names and found.builtin:
            path = f"plugins.disable[{index}]"
            return f"{path} ({config_sources.of(path)})"
    if kind.number is Number.ONE:
        return f"not chosen by {kind.chosen_by} ({config_sources.of(kind.chosen_by or '')})"
    return "not enabled"
