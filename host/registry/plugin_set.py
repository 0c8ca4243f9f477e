"""The plugin set of an engine: resolved once, loaded on demand, equal in every process."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard, TypeVar, cast

import msgspec

from hardpoint import typed
from hardpoint.errors import (
    HardpointError,
    PluginConflictError,
    PluginContractError,
    PluginFaultError,
    PluginLoadError,
    PluginNotFoundError,
    shown,
)
from hardpoint.plugins.component import Component, Context
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.plugins.config import ConfigSources, EngineConfig
from hardpoint.plugins.sampling import RequestStates
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.plugins.text.arguments import ComponentWithArguments
from hardpoint.toolkit.requests.resumed_states import SAMPLER
from hardpoint.typed import prepared_type

from .adapt import adapters_of, configured, load_component
from .adapters.contract_1 import context_for, warn_of_earlier
from .backends import check_devices, first_that_runs
from .blame import close_if_failed, faults_as
from .discovery import (
    InstalledPlugin,
    SelectedPlugin,
    check_other_name,
    check_unique,
    discover,
    installed_version,
    offers,
    plugins_by_name,
    undecided,
    warn_of_defaults,
)
from .hooks import HookSet
from .kinds import KINDS, Number
from .loading import inspecting, keeping_torch
from .ordering import (
    check_names,
    check_neighbours,
    ordered,
    ordered_parts,
    unknown_neighbours,
)
from .plugin_options import (
    Key,
    check_on_error,
    checked_options,
    declared_tables,
    option_path,
    options_by_component,
    options_of,
)
from .references import with_handed_over
from .selection import AUTO, BACKEND_KINDS, Selection

C = TypeVar("C", bound=Component)


class PluginSet:
    """The enabled components.

    Attributes:
        manifest: plain data of the set, for other processes.
        adapters: the component adapters among them.
        found: all installed components, enabled or not.
        warnings: requests of the configuration or of a plugin that have no effect.
    """

    def __init__(
        self,
        manifest: Manifest,
        installed: Sequence[InstalledPlugin] = (),
        targets: Mapping[Key, Any] | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        """`targets` holds the classes already imported, by the keys of their entries."""
        self.manifest = manifest
        self.found = installed
        self.warnings = warnings
        self._entries = {(e.kind, e.name): e for e in manifest.entries}
        self._targets = dict(targets or {})
        self._used: dict[str, PluginEntry] = {}  # by kind, of several candidates
        self.adapters = adapters_of(manifest.entries)

    def entries(self, kind: str) -> list[PluginEntry]:
        """Return the entries of a kind in their resolved order."""
        return sorted((e for e in self.manifest.entries if e.kind == kind), key=lambda e: e.place)

    def one(self, kind: str) -> PluginEntry:
        """Return the only entry of a kind; of candidates, the entry in use."""
        if (used := self._used.get(kind)) is not None:
            return used
        (entry,) = self.entries(kind)
        return entry

    def get(
        self, kind: str, name: str, conflict: type[HardpointError] | None = None
    ) -> PluginEntry:
        """Return the entry of a name.

        Raises:
            PluginNotFoundError: it is not enabled; the message names enabled and offered ones.
            HardpointError: as `find`.
        """
        if entry := self.find(kind, name, conflict):
            return entry
        on = [e.name for e in self.entries(kind)]
        raise PluginNotFoundError(
            f"{kind}: no component {name!r} is enabled{typed.suggest(name, on)}"
            f"{self.hint(name, kind)}; enabled: {', '.join(sorted(on)) or 'none'}"
        )

    def find(
        self, kind: str, name: str, conflict: type[HardpointError] | None = None
    ) -> PluginEntry | None:
        """Return the entry of a name, FQCN or one of its `other_names`; None if not enabled.

        Args:
            conflict: class of the error about a name that several distributions offer; to be given
                if a model, a setting or a request uses the name.

        Raises:
            HardpointError: several distributions offer the name, and no setting decides.
        """
        if ":" in name:
            return next((e for e in self.entries(kind) if e.value == name), None)
        entry = self._entries.get((kind, name))
        interface = getattr(KINDS.get(kind), "interface", None)
        if entry is None and hasattr(interface, "other_names"):
            named = [e for e in self.entries(kind) if name in self.target(e).other_names]
            if conflict is not None:
                check_other_name(name, named, conflict)
            entry = named[0] if named else None
        if entry is not None and conflict is not None:
            check_unique(entry, kind, conflict)
        return entry

    def hint(self, name: str, kind: str) -> str:
        """Return how to get a component of that name that is not enabled, else nothing."""
        if ":" in name:
            return f'; add "{name}" to plugins.enable'
        return offers(kind, name, self.not_enabled(), self.found)

    def not_enabled(self) -> list[InstalledPlugin]:
        """Return the installed components that are neither enabled nor built in."""
        on = {(e.kind, e.value) for e in self.manifest.tree()}
        return [f for f in self.found if not f.builtin and (f.kind, f.value) not in on]

    def target(self, entry: PluginEntry) -> Any:
        """Return an entry's class (or hooks object); import and check it the first time."""
        if entry.key not in self._targets:
            target = load_component(KINDS[entry.kind], entry.source, adapters=self.adapters)
            options = checked_options(target, entry.options, f"plugin.{entry.name}")
            self._targets[entry.key] = configured(target, options, entry.source)
        return self._targets[entry.key]

    def loaded(self, entry: PluginEntry) -> Any:
        """Return an entry's class if it is already imported, else None."""
        return self._targets.get(entry.key)

    def options(self, entry: PluginEntry) -> Any:
        """Return an entry's checked options."""
        return checked_options(self.target(entry), entry.options, f"plugin.{entry.name}")

    def create(self, entry: PluginEntry, context_type: type[Context[C]], **fields: Any) -> C:
        """Build an entry's component.

        Args:
            entry: an entry of the kind of components that are built with such a context.
            fields: fields of the context, in addition to name and options.

        Raises:
            PluginLoadError: its constructor failed; the cause is chained.
        """
        return self._build(
            entry, context_type(name=entry.name, options=self.options(entry), **fields)
        )

    def create_for_device(
        self, kind: str, context_type: type[Context[C]], *, device: Any, **fields: Any
    ) -> C:
        """Build the component of a per-device kind.

        Args:
            kind: `attention_backends`, `ops` or `communicators`.
            fields: fields of the context, in addition to name, options and device.

        Raises:
            ModelError: it does not run on the device.
            PluginLoadError: its constructor failed; the cause is chained.
        """

        def build(entry: PluginEntry, reason: str) -> C:
            why = {"reason": reason} if reason else {}
            return self.create(entry, context_type, device=device, **why, **fields)

        entries = {entry.name: entry for entry in self.entries(kind)}
        self._used[kind], component = first_that_runs(entries, device.type, self.target, build)
        return component

    def with_creator(self, entry: PluginEntry, context: Context[C], undo: ExitStack) -> Context[C]:
        """Return an entry's context, which builds the components that the entry wraps.

        Args:
            entry: entry of the component that gets the context.
            context: its fields.
            undo: closes the components that were built.
        """

        def build(wrapped: PluginEntry, reason: str = "") -> C:
            name, options = wrapped.name, self.options(wrapped)
            return self._build(wrapped, replace(context, name=name, options=options, reason=reason))

        def create(use: str) -> C:
            if (wrapped := entry.wraps.get(use)) is not None:
                component = build(wrapped)
            elif use == AUTO and entry.kind in BACKEND_KINDS and entry.wraps:
                device: str = cast(Any, context).device.type
                _, component = first_that_runs(entry.wraps, device, self.target, build)
            else:
                named = ", ".join(map(repr, entry.wraps)) or "none"
                raise PluginContractError(
                    f"{entry.source}: it builds {use!r}, which its wraps() does not return: {named}"
                )
            close_if_failed(undo, partial(_close, component))
            return component

        return replace(context, source=entry.source, creator=create)

    def _build(self, entry: PluginEntry, context: Context[C]) -> C:
        cls: type[C] = self.target(entry)
        with ExitStack() as undo:
            context = context_for(cls, self.with_creator(entry, context, undo))
            message = f"{entry.source}: its constructor"
            with (
                faults_as(PluginLoadError, message, passing=(HardpointError,)),
                keeping_torch(entry.source, "constructor", entry.kind),
            ):
                component = cls(context)
            if getattr(component, "context", None) is not context:
                raise PluginContractError(
                    f"{entry.source}: its __init__ must call super().__init__(context)"
                )
            undo.pop_all()
        return component

    def hooks(self) -> HookSet:
        """Return a new, verified set of the enabled hooks."""
        hooks = HookSet()
        for entry in self.entries("hooks"):
            if entry.stays and self.loaded(entry) is None:
                continue  # another process has it, and calls it
            hooks.add(self.target(entry), entry.source, self.options(entry))
        return hooks

    def successor(self, fresh: PluginSet, changed: Collection[str]) -> PluginSet:
        """Return the next generation, which has the components of some kinds from another set."""
        entries = [entry for entry in self.manifest.entries if entry.kind not in changed]
        entries += [entry for entry in fresh.manifest.entries if entry.kind in changed]
        was, now = ({e.key: e.options for e in p.manifest.tree()} for p in (self, fresh))
        targets = {
            key: target
            for key, target in fresh._targets.items()
            if key[0] in changed and (key not in self._targets or was.get(key) != now.get(key))
        }
        generation = self.manifest.generation + 1
        enabled = {entry.path for entry in entries}
        manifest = msgspec.structs.replace(
            self.manifest,
            entries=tuple(entries),
            generation=generation,
            quarantined={k: w for k, w in self.manifest.quarantined.items() if k not in enabled},
        )
        return PluginSet(manifest, fresh.found, self._targets | targets)

    def without(self, removed: PluginEntry, why: str) -> PluginSet:
        """Return the next generation, without one component of a kind of many.

        Args:
            why: for requests that still use it.
        """
        manifest = msgspec.structs.replace(
            self.manifest,
            entries=tuple(e for e in self.manifest.entries if e.path != removed.path),
            generation=self.manifest.generation + 1,
            quarantined={**self.manifest.quarantined, removed.path: why},
        )
        return PluginSet(manifest, self.found, self._targets)

    def logits_processors(self) -> list[tuple[PluginEntry, type[LogitsPlugin]]]:
        """Return the logits processors in the order in which they run."""
        return [(entry, self.target(entry)) for entry in self.entries("logits_processors")]

    def keeping_states(self) -> dict[str, type[RequestStates]]:
        """Return the classes of the logits processors by name, and the class of the sampler."""
        processors = {entry.name: cls for entry, cls in self.logits_processors()}
        return {**processors, SAMPLER: self.target(self.one("samplers"))}


def resolve_plugins(
    config: EngineConfig,
    config_sources: ConfigSources | None = None,
    installed: Sequence[InstalledPlugin] | None = None,
    passed_plugins: Sequence[InstalledPlugin] = (),
) -> PluginSet:
    """Resolve a configuration's plugins; import and check the plugins that are certain to run.

    Built-ins that are named by models or requests, and idle defaults, are imported when needed.

    Args:
        installed: the installed plugins; None finds them.
        passed_plugins: the plugins that the program passes, see `handed_over`.

    Raises:
        ConfigError: an option is wrong or belongs to no plugin that is on.
        PluginError: a component is missing, broken, ambiguous or against its contract.
    """
    config_sources = config_sources or ConfigSources()
    installed = discover(config.plugins.foreign_groups) if installed is None else installed
    selection = Selection(config, config_sources, with_handed_over(installed, passed_plugins))
    chosen, installed = selection.run(), selection.found
    check_names(chosen)
    targets: dict[Key, Any] = {}
    for i in (item for item in chosen if _is_certain_to_run(item, config)):
        targets[i.key] = load_component(i.kind, i.source, i.target, selection.adapters)
    declared_tables((targets[i.key], i.source) for i in chosen if i.kind.interface is None)
    check_on_error(config, config_sources, chosen)
    check_devices(chosen, targets)
    wraps = _find_wrapped(selection, config, config_sources, chosen, targets)
    every = [*chosen, *(inner for found_ in wraps.values() for inner in found_.values())]
    options, unused = options_by_component(config, config_sources, every, targets, installed)
    check_neighbours(chosen, targets)
    places = _places(chosen, targets)
    loaded = ((i.kind, i.source, targets[i.key]) for i in every if i.key in targets)
    warnings = [*selection.warnings, *unused, *unknown_neighbours(chosen, targets, installed)]
    by_name = plugins_by_name(installed)
    warnings += [*warn_of_defaults(config, every, by_name), *warn_of_earlier(loaded)]

    def entry(item: SelectedPlugin) -> PluginEntry:
        return PluginEntry(
            kind=item.kind.name,
            name=item.name,
            value=item.source.value,
            distribution=item.source.distribution,
            version=item.source.version,
            origin=item.source.origin,
            options=options[item.key],
            place=places.get(item.key, 0),
            stays=item.stays,
            duplicates=undecided(item, by_name),
            wraps={use: entry(inner) for use, inner in wraps.get(item.key, {}).items()},
        )

    manifest = Manifest(hardpoint=installed_version(), entries=tuple(map(entry, chosen)))
    return PluginSet(manifest, installed, targets, warnings)


def _is_certain_to_run(item: SelectedPlugin, config: EngineConfig) -> bool:
    """Return whether a component is imported at the start; one with options is, to check them."""
    if item.kind.number is Number.BY_NAME:
        return bool(item.path)
    return item.name != item.kind.idle_default(config) or option_path(config, item) is not None


def _find_wrapped(
    selection: Selection,
    config: EngineConfig,
    config_sources: ConfigSources,
    chosen: Sequence[SelectedPlugin],
    targets: dict[Key, Any],
) -> dict[Key, dict[str, SelectedPlugin]]:
    """Return the components that each one wraps, by reference; load them into `targets`."""
    wrapped: dict[Key, dict[str, SelectedPlugin]] = {}

    def add(outer: SelectedPlugin, chain: tuple[SelectedPlugin, ...]) -> None:
        target = targets.get(outer.key)
        if not _is_wrapper(target):
            return
        if outer.kind.name == "logits_processors":
            raise PluginContractError(
                f"{outer.source}: a logits processor wraps no other one; enable both, and order "
                f"them with before and after"
            )
        options = options_of(outer, target, option_path(config, outer), config, config_sources)
        for use, path, inner in _wrapped(selection, outer, target, options):
            names = [item.name for item in chain]
            if inner.source.value in (item.source.value for item in chain):
                raise PluginConflictError(
                    f"{outer.source}: it wraps {inner.name!r}, which is already around it: "
                    f"{' wraps '.join([*names, inner.name])}; let {path} name another one "
                    f"(from {config_sources.of(path)})"
                )
            loaded = load_component(inner.kind, inner.source, inner.target, selection.adapters)
            _check_arguments(outer, target, inner, loaded)
            targets[inner.key] = loaded
            wrapped.setdefault(outer.key, {})[use] = inner
            add(inner, (*chain, inner))

    for item in chosen:
        add(item, (item,))
    return wrapped


def _wrapped(
    selection: Selection, outer: SelectedPlugin, target: type[Component], options: Any
) -> Iterator[tuple[str, str, SelectedPlugin]]:
    """Yield the components that a component wraps: reference, path of the option, component."""
    for named in _wraps(outer, target, options):
        path = _path_of_wrapped(outer, options, named)
        for use, inner in selection.wrapped(outer, named, path).items():
            yield use, path, inner


def _close(component: Component) -> None:
    with faults_as(PluginFaultError, f"{component.context.source}: its close"):
        component.close()


def _check_arguments(
    outer: SelectedPlugin, target: Any, inner: SelectedPlugin, wrapped: Any
) -> None:
    if not issubclass(wrapped, ComponentWithArguments):
        return
    taken = prepared_type(wrapped)
    if taken.__struct_fields__ and not issubclass(prepared_type(target), taken):
        raise PluginContractError(
            f"{outer.source}: it wraps {inner.name!r}, which takes arguments of requests; let its "
            f"Arguments derive from {taken.__module__}:{taken.__qualname__}"
        )


def _is_wrapper(target: Any) -> TypeGuard[type[Component]]:
    if not (inspect.isclass(target) and issubclass(target, Component)):
        return False
    wraps, default = inspect.getattr_static(target, "wraps"), vars(Component)["wraps"]
    return wraps is not default


def _wraps(outer: SelectedPlugin, target: type[Component], options: Any) -> Sequence[str]:
    with inspecting(outer.source), keeping_torch(outer.source, "wraps"):
        wraps = target.wraps(options)
    if not isinstance(wraps, list | tuple) or not all(isinstance(use, str) for use in wraps):
        raise PluginContractError(
            f"{outer.source}: its wraps() returned {shown(wraps)}, expected a list of names"
        )
    return wraps


def _path_of_wrapped(outer: SelectedPlugin, options: Any, use: str) -> str:
    for option, value in msgspec.structs.asdict(options).items():
        if value == use or (isinstance(value, list | tuple) and use in value):
            return f"plugin.{outer.name}.{option}"
    return f"plugin.{outer.name}"


def _places(chosen: Sequence[SelectedPlugin], targets: Mapping[Key, Any]) -> dict[Key, int]:
    places: dict[Key, int] = {}
    for kind in KINDS:
        keys = {item.name: item.key for item in chosen if item.kind.name == kind}
        names = list(keys)
        if kind == "logits_processors":
            names = ordered({name: targets[key] for name, key in keys.items()})
        elif kind == "step_parts":
            names = ordered_parts({name: targets[key] for name, key in keys.items()})
        places.update({keys[name]: index for index, name in enumerate(names)})
    return places
