"""The plugin set of an engine: resolved once, loaded on demand, equal in every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from hardpoint.plugins import typed
from hardpoint.plugins.component import Component, Context
from hardpoint.plugins.config import ConfigSources, EngineConfig
from hardpoint.plugins.errors import (
    ConfigError,
    HardpointError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
)
from hardpoint.plugins.kinds import KINDS, Number
from hardpoint.plugins.logits import LogitsPlugin
from hardpoint.plugins.manifest import Manifest, PluginEntry

from .adapt import configured, load_component
from .blame import describe, raise_unless_fault
from .discovery import InstalledPlugin, discover, installed_version
from .hooks import HookSet
from .ordering import ordered
from .selection import SelectedPlugin, Selection

C = TypeVar("C", bound=Component)


class PluginSet:
    """The enabled components.

    Attributes:
        manifest: plain data of the set, for other processes.
        found: all installed components, enabled or not.
    """

    def __init__(
        self,
        manifest: Manifest,
        found: Sequence[InstalledPlugin] = (),
        targets: Mapping[tuple[str, str], Any] | None = None,
    ) -> None:
        """`targets` holds the classes already imported, by kind and name."""
        self.manifest = manifest
        self.found = found
        self._entries = {(e.kind, e.name): e for e in manifest.entries}
        self._targets = dict(targets or {})

    def entries(self, kind: str) -> list[PluginEntry]:
        """Return the entries of a kind in their resolved order."""
        return sorted((e for e in self.manifest.entries if e.kind == kind), key=lambda e: e.place)

    def one(self, kind: str) -> PluginEntry:
        """Return the only entry of a kind."""
        (entry,) = self.entries(kind)
        return entry

    def get(self, kind: str, name: str) -> PluginEntry:
        """Return the entry of a name.

        Raises:
            PluginNotFoundError: it is not enabled; the message says what is, and who offers it.
        """
        if entry := self.find(kind, name):
            return entry
        on = [e.name for e in self.entries(kind)]
        raise PluginNotFoundError(
            f"{kind}: no component {name!r} is on{typed.suggest(name, on)}"
            f"{self.hint(name, kind)}; on: {', '.join(sorted(on)) or 'none'}"
        )

    def find(self, kind: str, name: str) -> PluginEntry | None:
        """Return the entry of a name; None if it is not enabled."""
        return self._entries.get((kind, name))

    def hint(self, name: str, kind: str) -> str:
        """Return advice if an installed component of that name is not enabled, else nothing."""
        for found in self.not_enabled():
            if (found.kind, found.name) == (kind, name):
                return (
                    f"; {found.distribution} {found.version} offers it: "
                    f'add "{name}" to plugins.enable'
                )
        return ""

    def not_enabled(self) -> list[InstalledPlugin]:
        """Return the installed components that are neither enabled nor built in."""
        on = {(e.kind, e.value) for e in self.manifest.entries}
        return [f for f in self.found if not f.builtin and (f.kind, f.value) not in on]

    def target(self, entry: PluginEntry) -> Any:
        """Return an entry's class (or hooks object); import and check it the first time."""
        key = (entry.kind, entry.name)
        if key not in self._targets:
            target = load_component(KINDS[entry.kind], entry.source)
            self._targets[key] = configured(
                target, _checked_options(target, entry.options, f"plugin.{entry.name}")
            )
        return self._targets[key]

    def loaded(self, entry: PluginEntry) -> Any:
        """Return an entry's class if it is already imported, else None."""
        return self._targets.get((entry.kind, entry.name))

    def options(self, entry: PluginEntry) -> Any:
        """Return an entry's checked options."""
        return _checked_options(self.target(entry), entry.options, f"plugin.{entry.name}")

    def create(self, entry: PluginEntry, context_type: type[Context[C]], **fields: Any) -> C:
        """Build an entry's component.

        Args:
            entry: of the kind whose components are built with such a context.
            context_type: class of the context.
            fields: of the context, in addition to name and options.

        Raises:
            PluginLoadError: its constructor failed; the cause is chained.
        """
        cls: type[C] = self.target(entry)
        context = context_type(name=entry.name, options=self.options(entry), **fields)
        try:
            component = cls(context)
        except HardpointError:
            raise
        except BaseException as cause:
            raise_unless_fault(cause)
            raise PluginLoadError(
                f"{entry.source}: its constructor failed: {describe(cause)}"
            ) from cause
        if getattr(component, "context", None) is not context:
            raise PluginContractError(
                f"{entry.source}: its __init__ must call super().__init__(context)"
            )
        return component

    def hooks(self) -> HookSet:
        """Return a new, verified set of the enabled hooks."""
        hooks = HookSet()
        for entry in self.entries("hooks"):
            hooks.add(self.target(entry), entry.source)
        return hooks

    def changed(self, config: EngineConfig, config_sources: ConfigSources, kind: str) -> PluginSet:
        """Return the next generation, with the component of one kind replaced.

        Args:
            config: names the new component.
            config_sources: sources of the configuration.
            kind: of which there is one component; other kinds are not changed.
        """
        entry = (fresh := resolve_plugins(config, config_sources, self.found)).one(kind)
        manifest = msgspec.structs.replace(
            self.manifest,
            entries=(*(e for e in self.manifest.entries if e.kind != kind), entry),
            generation=self.manifest.generation + 1,
        )
        targets = {**self._targets, (kind, entry.name): fresh.target(entry)}
        return PluginSet(manifest, self.found, targets)

    def without(self, kind: str, name: str) -> PluginSet:
        """Return the next generation, without one component of a kind of many."""
        manifest = msgspec.structs.replace(
            self.manifest,
            entries=tuple(e for e in self.manifest.entries if (e.kind, e.name) != (kind, name)),
            generation=self.manifest.generation + 1,
        )
        return PluginSet(manifest, self.found, self._targets)

    def logits_processors(self) -> list[tuple[PluginEntry, type[LogitsPlugin]]]:
        """Return the logits processors in the order in which they run."""
        return [(entry, self.target(entry)) for entry in self.entries("logits_processors")]


def resolve_plugins(
    config: EngineConfig,
    config_sources: ConfigSources | None = None,
    found: Sequence[InstalledPlugin] | None = None,
) -> PluginSet:
    """Resolve a configuration's plugins; import and check those that are certain to run.

    Built-ins that are loaded by name are imported when a model or request names them.

    Raises:
        ConfigError: an option is wrong or belongs to no plugin that is on.
        PluginError: a component is missing, broken, ambiguous or against its contract.
    """
    config_sources = config_sources or ConfigSources()
    found = discover(config.plugins.foreign_groups) if found is None else found
    chosen = Selection(config, config_sources, found).run()
    targets: dict[tuple[str, str], Any] = {}
    for item in chosen:
        if item.kind.number is not Number.BY_NAME or item.path:
            target = load_component(item.kind, item.source, item.target)
            targets[item.kind.name, item.name] = target
    _check_on_error(config, config_sources, chosen)
    options = _options_by_component(config, config_sources, chosen, targets)
    places = _places(chosen, targets)
    entries = tuple(
        PluginEntry(
            kind=item.kind.name,
            name=item.name,
            value=item.source.value,
            distribution=item.source.distribution,
            version=item.source.version,
            origin=item.source.origin,
            options=options[item.kind.name, item.name],
            place=places[item.kind.name, item.name],
        )
        for item in chosen
    )
    return PluginSet(Manifest(hardpoint=installed_version(), entries=entries), found, targets)


def _checked_options(target: Any, options: Mapping[str, Any], path: str) -> Any:
    """Return options as the target's own type; hooks have none of their own."""
    return typed.convert(options, getattr(target, "Options", typed.Options), path=path)


def _check_on_error(
    config: EngineConfig, config_sources: ConfigSources, chosen: Sequence[SelectedPlugin]
) -> None:
    """Refuse fault scopes that a plugin cannot have, since they would be ignored."""
    scopes = {c.name: c.kind.fault_scope for c in chosen if c.kind.scope_can_be_raised}
    for name, scope in config.plugins.on_error.items():
        path = f"plugins.on_error.{name}"
        origin = config_sources.of(path)
        if name not in scopes:
            raise ConfigError(
                f"{path}: no plugin {name!r} is on whose faults end less than the engine"
                f"{typed.suggest(name, sorted(scopes))} (from {origin})"
            )
        if scope not in (scopes[name].value, "engine"):
            raise ConfigError(
                f'{path}: expected "{scopes[name].value}" or "engine", got "{scope}" '
                f"(from {origin})"
            )


def _options_by_component(
    config: EngineConfig,
    config_sources: ConfigSources,
    chosen: Sequence[SelectedPlugin],
    targets: dict[tuple[str, str], Any],
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return each component's options with defaults, checked by the component's type.

    Adapters are replaced in `targets` by ones with their options applied.
    """
    paths = _option_paths(config, config_sources, chosen)
    result: dict[tuple[str, str], dict[str, Any]] = {}
    for item in chosen:
        key = (item.kind.name, item.name)
        path = paths.get(key)
        table = config.plugin[path.removeprefix("plugin.")] if path else {}
        if key not in targets:  # loaded by name; checked when it is
            result[key] = dict(table)
            continue
        try:
            checked = _checked_options(targets[key], table, path or f"plugin.{item.name}")
            targets[key] = configured(targets[key], checked)
        except ConfigError as error:
            message = config_sources.locate(str(error)) if path else f"{error} (for {item.source})"
            raise ConfigError(message) from None
        result[key] = msgspec.to_builtins(checked)
    return result


def _option_paths(
    config: EngineConfig, config_sources: ConfigSources, chosen: Sequence[SelectedPlugin]
) -> dict[tuple[str, str], str]:
    """Return the path of the `[plugin.<name>]` table of each component that has one."""
    paths: dict[tuple[str, str], str] = {}
    for name in config.plugin:
        path = f"plugin.{name}"
        origin = config_sources.of(path)
        keys = [
            (c.kind.name, c.name) for c in chosen if name in (c.name, f"{c.kind.name}/{c.name}")
        ]
        if not keys:
            known = sorted({c.name for c in chosen})
            raise ConfigError(
                f"{path}: no plugin {name!r} is on{typed.suggest(name, known)} (from {origin})"
            )
        if len(keys) > 1:
            choices = ", ".join(f'"{kind}/{key}"' for kind, key in keys)
            raise ConfigError(f"{path}: {name!r} could be any of {choices} (from {origin})")
        if keys[0] in paths:
            raise ConfigError(f"{path}: given twice, here and by {paths[keys[0]]} (from {origin})")
        paths[keys[0]] = path
    return paths


def _places(
    chosen: Sequence[SelectedPlugin], targets: dict[tuple[str, str], Any]
) -> dict[tuple[str, str], int]:
    """Return each component's position within its kind."""
    places: dict[tuple[str, str], int] = {}
    for kind in KINDS:
        names = [c.name for c in chosen if c.kind.name == kind]
        if kind == "logits_processors":
            names = ordered({name: targets[kind, name] for name in names})
        places.update({(kind, name): index for index, name in enumerate(names)})
    return places
