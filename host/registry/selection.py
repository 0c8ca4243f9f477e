"""Selection of the enabled components from the configuration and the installed plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from hardpoint.errors import (
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
    shown,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.config import ConfigSources, EngineConfig
from hardpoint.plugins.config_tables import PluginUse
from hardpoint.toolkit.proof import RequiredProofs
from hardpoint.typed import nearest_names, suggest

from .adapt import ADAPTER_KIND, Adapter, ComponentAdapters, load_adapters
from .adapters.external_packages import component_hint
from .discovery import (
    NAME,
    NAMES,
    InstalledPlugin,
    SelectedPlugin,
    ambiguity,
    describe_unknown_kind,
    toml_key,
)
from .kinds import KINDS, Number, PluginKind, value_at
from .loading import inspecting, marks_hooks
from .references import default_name, provided_by

AUTO = "auto"
"""The word that leaves a choice to the engine."""
BACKEND_KINDS = ("attention_backends", "ops")
"""Kinds whose "auto" follows the setting `backend`."""
_CANDIDATES = ("native_cpu", "triton", "torch")
"""Built-ins of both kinds, of which each device has one if `backend` is "auto"."""
_SET_BY = {"kv_connector.use": "kv_connector.stores"}
"""Settings by the path of another one that has a value because of them."""


class _Disabled(NamedTuple):
    """A component that is off."""

    path: str
    """The setting that disables it."""
    value: str
    """Its class."""


class Selection:
    """Resolves the references of a configuration; `run` returns the enabled components.

    Attributes:
        adapters: the component adapters of the configuration.
        warnings: requests of the configuration that have no effect.
    """

    def __init__(
        self, config: EngineConfig, sources: ConfigSources, installed: Sequence[InstalledPlugin]
    ) -> None:
        self._config = config
        self._config_sources = sources
        self._found = [f for f in installed if f.known_kind]
        self._unknown = [f for f in installed if not f.known_kind]
        self._on: dict[tuple[str, str], SelectedPlugin] = {}
        self._disabled: dict[tuple[str, str], _Disabled] = {}
        self._kept_off: set[InstalledPlugin] = set()  # of those that a program hands over
        self._check_proof = RequiredProofs(config.plugins).check
        self.adapters = ComponentAdapters(self.enabled_adapters)
        self.warnings: list[str] = []

    def run(self) -> list[SelectedPlugin]:
        """Return the enabled components, built-in defaults first, then as configured.

        Raises:
            PluginNotFoundError, PluginConflictError, PluginLoadError, PluginContractError,
            ConfigError: naming the reference and where it came from.
        """
        self.enabled()
        for kind in KINDS.values():
            if kind.named_by is not None:
                self._enable_named(kind, kind.named_by)
            idle = kind.idle_default(self._config)
            if idle is not None and not self._candidates(idle, kind):
                continue  # the core alone is installed, and nothing will miss it
            if kind.chosen_by is not None:
                for chosen in self.chosen(kind, kind.chosen_by):
                    self._add(chosen)
        return list(self._on.values())

    def enabled(self) -> list[SelectedPlugin]:
        """Return the components that the table `plugins` enables, and the built-in defaults.

        Raises:
            As `run`.
        """
        for plugin in self._found:
            if plugin.builtin and KINDS[plugin.kind].chosen_by is None:
                self._add(self._chosen(plugin, ""))
        self._disable(provided=False)
        self._find_provided()
        self._disable(provided=True)
        self._replace()
        for index, wanted in enumerate(self._config.plugins.enable):
            self._enable(wanted, f"plugins.enable[{index}]")
        self._enable_handed_over()
        return list(self._on.values())

    @property
    def found(self) -> list[InstalledPlugin]:
        """All plugins that can be enabled: installed, and provided by enabled hooks."""
        return [*self._found, *self._unknown]

    def enabled_adapters(self) -> list[Adapter]:
        """Import the component adapters that are on or to be enabled."""
        kind = KINDS[ADAPTER_KIND]
        on = [item.source for item in self._on.values() if item.kind == kind]
        on += [p.source(p.origin) for p in self._handed if p.kind == ADAPTER_KIND]
        for index, wanted in enumerate(self._config.plugins.enable):
            use, _ = self._use_of(wanted, path := f"plugins.enable[{index}]")
            named = [self._chosen(plugin, path).source for plugin in self._candidates(use, kind)]
            if not named and ":" in use:
                self._check_proof(Source.of_module(use, use, path))
            on += named or self.adapters.own(use, path)
        return load_adapters(on)

    def _find_provided(self) -> None:
        plugins = self._config.plugins
        hooks = [(self._handed_over(plugin), plugin.origin) for plugin in self._handed]
        hooks += [(on, "") for (_, name), on in self._on.items() if name not in plugins.replace]
        named = [(f"plugins.replace.{name}", use) for name, use in plugins.replace.items()]
        for index, wanted in enumerate(plugins.enable):
            use = wanted if isinstance(wanted, str) else wanted.use
            named.append((f"plugins.enable[{index}]", use))
        for path, use in named:
            hooks += [(chosen, "") for chosen in self._named_hooks(use, path)]
        for item, origin in hooks:
            if item.kind.interface is None:
                target = item.target
                if target is None:
                    target = self.adapters.import_object(item.source)
                offers = provided_by(target, item.source, self._found, self.adapters, origin)
                self._found += [offer for offer in offers if offer not in self._found]

    def _named_hooks(self, reference: str, path: str) -> list[SelectedPlugin]:
        hooks = KINDS["hooks"]
        if not self._is_fqcn(reference, hooks):
            return [self._chosen(plugin, path) for plugin in self._candidates(reference, hooks)]
        chosen = self._by_fqcn(reference, path, hooks)
        with inspecting(chosen.source):
            return [chosen] if marks_hooks(chosen.target) else []

    def _enable_handed_over(self) -> None:
        """Enable the passed plugins that the configuration neither enables nor chooses."""
        for plugin in self._handed:
            chosen = self._handed_over(plugin)
            on = [(item.kind, item.source.value) for item in self._on.values()]
            if chosen.kind.chosen_by is not None:
                continue
            if plugin.problem and not self._config.engine.in_process:
                raise PluginLoadError(
                    f"{chosen.source}: {plugin.problem}; or run the engine in this process "
                    f"(engine.in_process)"
                )
            if plugin.stays or (chosen.kind, plugin.value) not in on:
                self._add(chosen)

    @property
    def _handed(self) -> list[InstalledPlugin]:
        return [plugin for plugin in self._found if plugin.origin and plugin not in self._kept_off]

    def _handed_over(self, plugin: InstalledPlugin) -> SelectedPlugin:
        kind, source = KINDS[plugin.kind], plugin.source(plugin.origin)
        return SelectedPlugin(kind, source, plugin.origin, plugin.target, plugin.stays)

    def _enable_named(self, kind: PluginKind, path: str) -> None:
        value = value_at(self._config, path)
        if not isinstance(value, str):
            return
        on = [item for item in self._on.values() if item.kind == kind and item.answers_to(value)]
        if ":" not in value:
            if on and not on[0].path and self._config_sources.of(path) != "default":
                self._by_name(value, path, kind)  # raises if several have the name
        elif not on:
            self._add(self._by_fqcn(value, path, kind))
        elif not on[0].path:
            source = replace(on[0].source, origin=self._asked_by(path, builtin=True))
            self._add(replace(on[0], path=path, source=source))

    def chosen(self, kind: PluginKind, path: str) -> list[SelectedPlugin]:
        """Return the components that the configuration names at `path`."""
        named = value_at(self._config, path)
        if named is None:
            return []
        if named == AUTO and kind.name in BACKEND_KINDS:
            return list(self._of_backend(kind, path).values())
        if isinstance(named, str):
            return [self._resolve(named, path, kind)]
        path_of: dict[tuple[str, str | None], str] = {}
        several = []
        for index, item in enumerate(named):
            place = f"{path}[{index}]"
            use, name = self._use_of(item, place)
            chosen = self._resolve(use, place, kind)
            if (other := path_of.setdefault((chosen.source.value, name), place)) != place:
                raise ConfigError(
                    f"{place}: {use!r} is named twice, here and by {other} "
                    f"(from {self._config_sources.of(place)})"
                )
            if name is not None:
                chosen = replace(chosen, source=replace(chosen.source, name=name))
            several.append(chosen)
        return several

    def _use_of(self, wanted: str | PluginUse, path: str) -> tuple[str, str | None]:
        use, name = (wanted, None) if isinstance(wanted, str) else (wanted.use, wanted.name)
        expected = ""
        if name is not None and not NAME.fullmatch(name):
            expected = NAMES
        elif name is not None and ("/" in name or "." in name):
            expected = "a name without '/' or '.'"
        if expected:
            raise ConfigError(
                f"{path}.name: expected {expected}, got {shown(name, 60)} "
                f"(from {self._config_sources.of(path)})"
            )
        return use, name

    def _of_backend(self, kind: PluginKind, path: str) -> dict[str, SelectedPlugin]:
        """Return the components of "auto", by reference: the configured backend, or candidates."""
        if (backend := self._config.backend) != AUTO:
            return {AUTO: self._resolve(backend, "backend", kind)}
        builtins = (f for f in self._found if f.builtin and f.kind == kind.name)
        by_name = {f.name: self._chosen(f, path) for f in builtins}
        return {name: by_name[name] for name in _CANDIDATES if name in by_name}

    def wrapped(
        self, outer: SelectedPlugin, reference: str, path: str
    ) -> dict[str, SelectedPlugin]:
        """Return the components that an enabled one wraps, by reference.

        Args:
            reference: as the option names it; "auto" may stand for several.
        """
        if reference == AUTO and outer.kind.name in BACKEND_KINDS:
            components = self._of_backend(outer.kind, path)
        else:
            components = {reference: self._resolve(reference, path, outer.kind)}
        origin = str(outer.source)
        return {
            use: replace(inner, source=replace(inner.source, origin=origin))
            for use, inner in components.items()
        }

    def _enable(self, wanted: str | PluginUse, path: str) -> None:
        use, name = self._use_of(wanted, path)
        for chosen in self._resolve_all(use, path):
            self._enable_one(chosen, use, name, path)

    def _enable_one(self, chosen: SelectedPlugin, use: str, name: str | None, path: str) -> None:
        if name is not None:
            chosen = replace(chosen, source=replace(chosen.source, name=name))
        if chosen.kind.chosen_by is not None:
            few = ", which allows one" if chosen.kind.number is Number.ONE else ""
            raise ConfigError(
                f"{path}: {use!r} is of kind {chosen.kind.name}{few}; choose it "
                f"with {chosen.kind.chosen_by} (from {self._config_sources.of(path)})"
            )
        off = self._disabled.get((chosen.kind.name, chosen.name))
        if off is not None and off.value == chosen.source.value:
            raise ConfigError(
                f"{path}: {use!r} is off, by {off.path}; remove one of the two "
                f"(from {self._config_sources.of(path)})"
            )
        if name is None:
            self._check_unnamed(chosen, path)
        other = self._on.get((chosen.kind.name, chosen.name))
        if other is not None and other.path and other.source.value == chosen.source.value:
            self.warnings.append(
                f"{path}: {use!r} is named twice, here and by {other.path}; it is enabled once "
                f"(from {self._config_sources.of(path)})"
            )
        self._add(chosen)

    def _check_unnamed(self, chosen: SelectedPlugin, path: str) -> None:
        """Refuse to enable a class a second time under another name, unless that was given."""
        value = chosen.source.value
        for (kind, name), other in self._on.items():
            if kind == chosen.kind.name and other.source.value == value and name != chosen.name:
                raise PluginConflictError(
                    f"{path}: {value} is enabled as {kind}/{name} already; to have it twice, give "
                    f'this one a name, too: {{ use = "{value}", name = "{chosen.name}" }} '
                    f"(from {self._config_sources.of(path)})"
                )

    def _disable(self, *, provided: bool) -> None:
        """Switch off disabled plugins; the call with `provided` includes plugins from hooks."""
        for index, name in enumerate(self._config.plugins.disable):
            path = f"plugins.disable[{index}]"
            if any(off.path == path for off in self._disabled.values()):
                continue
            if name in self._config.plugins.enable:
                raise ConfigError(
                    f"{path}: plugins.enable names {name!r}, too; remove one of the two "
                    f"(from {self._config_sources.of(path)})"
                )
            passed = {
                (p.kind, p.name): p
                for p in self._handed
                if KINDS[p.kind].chosen_by is None and self._handed_over(p).answers_to(name)
            }
            on = {key: self._handed_over(plugin) for key, plugin in passed.items()} | self._on
            if not provided and not any(item.answers_to(name) for item in on.values()):
                continue  # a hook may provide it
            for key in self._keys_of(name, path, on):
                if self._on.pop(key, None) is None:
                    self._kept_off.add(passed[key])
                self._disabled[key] = _Disabled(path, on[key].source.value)

    def _replace(self) -> None:
        for name, reference in self._config.plugins.replace.items():
            path = f"plugins.replace.{name}"
            for key in self._keys_of(name, path, self._on):
                chosen = self._resolve(reference, path, KINDS[key[0]])
                self._on[key] = replace(chosen, source=replace(chosen.source, name=key[1]))

    def _keys_of(
        self, name: str, path: str, on: Mapping[tuple[str, str], SelectedPlugin]
    ) -> list[tuple[str, str]]:
        """Return each (kind, name) of a component in `on`, given its name, `kind/name` or FQCN.

        A class may be enabled under several kinds by the same name.
        """
        keys = [key for key, item in on.items() if item.answers_to(name)]
        if len({on[key].source.value for key in keys}) == 1:
            return keys
        origin = self._config_sources.of(path)
        if keys:
            choices = ", ".join(f'"{kind}/{key}"' for kind, key in keys)
            raise ConfigError(f"{path}: {name!r} could be any of {choices} (from {origin})")
        for key, off in self._disabled.items():
            if name in (key[1], "/".join(key)):
                raise PluginNotFoundError(
                    f"{path}: {name!r} is off, by {off.path}; remove one of the two (from {origin})"
                )
        self._check_kind(name, path)
        for kind in KINDS.values():
            if kind.chosen_by and any(f.kind == kind.name and f.name == name for f in self._found):
                raise ConfigError(
                    f"{path}: {name!r} is of kind {kind.name}, which allows one; choose it "
                    f"with {kind.chosen_by} (from {origin})"
                )
        known = [key[1] for key in on]
        raise PluginNotFoundError(
            f"{path}: no component {name!r} is enabled{suggest(name, known)} (from {origin})"
        )

    def _add(self, chosen: SelectedPlugin) -> None:
        key = (chosen.kind.name, chosen.name)
        other = self._on.get(key)
        if other is not None and other.source.value != chosen.source.value:
            raise PluginConflictError(
                f"two components are called {'/'.join(key)}: {other.source} and {chosen.source}; "
                f"{self._another_name(other, chosen)}"
            )
        if other is None or (chosen.path and not other.path):
            self._on[key] = chosen

    def _another_name(self, other: SelectedPlugin, chosen: SelectedPlugin) -> str:
        kind, value = chosen.kind, chosen.source.value
        if kind.chosen_by is not None:
            return f"remove one of them from {kind.chosen_by}"
        names = {name for on, name in self._on if on == kind.name}
        name = next(name for i in count(2) if (name := f"{chosen.name}_{i}") not in names)
        advice = f'give one another name: plugins.enable = [{{ use = "{value}", name = "{name}" }}]'
        if other.path:
            return advice
        return (
            f"{advice}, or let it take the other's place: "
            f'plugins.replace = {{ {toml_key(chosen.name)} = "{value}" }}'
        )

    def _check_kind(self, reference: str, path: str) -> None:
        kind, slash, _ = reference.partition("/")
        missing = kind if slash and kind not in KINDS else ""
        offers = next((f for f in self._unknown if f.name == reference), None)
        if not missing and offers is None:
            return
        subject = f"{reference!r}: " if offers is None else f"{offers.label}: "
        meant = suggest(missing, list(KINDS)) if missing else ""
        raise PluginNotFoundError(
            f"{path}: {subject}{describe_unknown_kind(missing or (offers.kind if offers else ''))}"
            f"{meant}; kinds here: {', '.join(KINDS)} "
            f"(from {self._config_sources.of(path)})"
        )

    def _resolve(self, reference: str, path: str, kind: PluginKind | None) -> SelectedPlugin:
        if self._is_fqcn(reference, kind):
            return self._by_fqcn(reference, path, kind)
        return self._by_name(reference, path, kind)

    def _is_fqcn(self, reference: str, kind: PluginKind | None) -> bool:
        if ":" in reference:
            return True
        may_be_module = kind is None or kind.interface is None
        is_name = "/" in reference or self._candidates(reference, None)
        return may_be_module and "." in reference and not is_name

    def _resolve_all(self, reference: str, path: str) -> list[SelectedPlugin]:
        if self._is_fqcn(reference, None):
            first = self._by_fqcn(reference, path, None)
            kinds = self.adapters.kinds_of(first.target, first.source)
            return [replace(first, kind=kind) for kind in kinds]
        candidates = self._candidates(reference, None)
        if len(candidates) > 1 and len({(f.value, f.distribution) for f in candidates}) == 1:
            return [self._chosen(plugin, path) for plugin in candidates]
        return [self._by_name(reference, path, None)]

    def _by_fqcn(self, value: str, path: str, kind: PluginKind | None) -> SelectedPlugin:
        module, colon, qualname = value.partition(":")
        parts = [*module.split("."), *(qualname.split(".") if colon else ())]
        if not all(part.isidentifier() for part in parts):
            raise ConfigError(
                f"{path}: expected an FQCN like package.module:Class, got {value!r} "
                f"(from {self._config_sources.of(path)})"
            )
        known = next((f for f in self._found if f.value == value), None)
        name = default_name(value, self._found)
        asked_by = self._asked_by(path, builtin=known is not None and known.builtin)
        source = known.source(asked_by) if known else Source.of_module(name, value, asked_by)
        self._check_proof(source)
        target = self.adapters.import_object(source)
        kind = kind or self.adapters.kinds_of(target, source)[0]
        return SelectedPlugin(kind, source, path, target)

    def _by_name(self, reference: str, path: str, kind: PluginKind | None) -> SelectedPlugin:
        candidates = self._candidates(reference, kind)
        origin = self._config_sources.of(path)
        if not candidates:
            self._check_kind(reference, path)
            known = sorted({f.name for f in self._found if kind in (None, KINDS[f.kind])})
            subject = f"no {kind.name} component" if kind else "no installed component"
            hint = component_hint(reference, kind.name if kind else None)
            raise PluginNotFoundError(
                f"{path}: {subject} is called {reference!r}{hint or suggest(reference, known)}"
                f"{self._of_other_kinds(reference)}; found: {nearest_names(reference, known)} "
                f"(from {origin})"
            )
        builtin = [f for f in candidates if f.builtin]
        if len(candidates) > 1 and len(builtin) == 1 and kind and origin == "default":
            # The configuration does not name it: what is installed does not change a default.
            candidates = builtin
        if len(candidates) > 1:
            raise PluginConflictError(ambiguity(reference, path, candidates, origin))
        return self._chosen(candidates[0], path)

    def _of_other_kinds(self, reference: str) -> str:
        kinds = {plugin.kind: KINDS[plugin.kind] for plugin in self._candidates(reference, None)}
        chosen = (kind for kind in kinds.values() if kind.chosen_by)
        return "".join(f"; {kind.chosen_by} takes the one of kind {kind.name}" for kind in chosen)

    def _candidates(self, reference: str, kind: PluginKind | None) -> list[InstalledPlugin]:
        return [
            f for f in self._found if reference in f.references and kind in (None, KINDS[f.kind])
        ]

    def _chosen(self, plugin: InstalledPlugin, path: str) -> SelectedPlugin:
        asked_by = self._asked_by(path, builtin=plugin.builtin)
        source = plugin.source(asked_by)
        if plugin.target is None:
            self._check_proof(source)
        return SelectedPlugin(KINDS[plugin.kind], source, path, plugin.target, plugin.stays)

    def _asked_by(self, path: str, *, builtin: bool) -> str:
        origin = self._config_sources.of(path)
        if origin == "default" and path in _SET_BY:
            origin = self._config_sources.of(_SET_BY[path])
            path = path if origin == "default" else _SET_BY[path]
        if origin != "default":
            return f"{path} ({origin})"
        return "default" if builtin and not path.startswith("plugins.") else path
