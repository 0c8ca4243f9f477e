"""The catalog of installed and enabled components that commands show."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from hardpoint.errors import HardpointError, PluginConflictError, PluginNotFoundError
from hardpoint.host.registry.adapt import adapter_of, load_component
from hardpoint.host.registry.discovery import InstalledPlugin, describe_unknown_kind
from hardpoint.host.registry.kinds import KINDS, Number, PluginKind
from hardpoint.host.registry.plugin_set import PluginSet, resolve_plugins
from hardpoint.plugins.commands import ComponentDetails, ComponentInfo
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.plugins.config import ConfigSources, EngineConfig
from hardpoint.plugins.server.hooks import hookimpl
from hardpoint.toolkit.proof import RequiredProofs
from hardpoint.typed import convert, json_schema, suggest
from hardpoint.typed.describing import FieldDoc, first_paragraph, struct_fields


class Catalog:
    """The `PluginCatalog` of a plugin set."""

    def __init__(
        self, plugins: PluginSet, config: EngineConfig, config_sources: ConfigSources
    ) -> None:
        """`plugins` is the resolved plugin set of the configuration."""
        self._plugins = plugins
        self._config = config
        self._config_sources = config_sources

    def components(self) -> Sequence[ComponentInfo]:
        """Return all components in the order of kinds; import none that is not enabled."""
        ordered = sorted(self._plugins.manifest.entries, key=lambda entry: entry.place)
        enabled = [self._enabled(entry) for entry in ordered]
        wrapped = {
            inner.key: _info(
                inner.kind, inner.source, enabled=True, reason=f"wrapped by {outer.name}"
            )
            for outer in self._plugins.manifest.tree()
            for inner in outer.wraps.values()
        }
        enabled += [wrapped[key] for key in wrapped.keys() - {entry.key for entry in ordered}]
        others = [
            _info(
                plugin.kind,
                Source(plugin.name, plugin.value, plugin.distribution, plugin.version, "default"),
                enabled=False,
                reason=self._why_disabled(plugin),
            )
            for plugin in self._disabled()
        ]
        rank = {kind: index for index, kind in enumerate(KINDS)}
        return sorted([*enabled, *others], key=lambda c: (rank.get(c.kind, len(rank)), c.kind))

    def details(self, name: str) -> ComponentDetails:
        """Return the details of `name`, `kind/name` or an FQCN; import and check the component.

        Raises:
            PluginNotFoundError: no component has that name, or its kind is unknown.
            PluginConflictError: several components have it, and none is enabled.
            PluginError: the component cannot be imported, or does not keep its kind's contract.
        """
        info, others = self._find(name)
        if info.kind not in KINDS:
            raise PluginNotFoundError(
                f"{info.kind}/{info.name} ({info.package}): {info.reason}; "
                f"kinds here: {', '.join(KINDS)}"
            )
        kind = KINDS[info.kind]
        options: dict[str, Any] = {}
        if info.enabled:
            entry = next(
                entry
                for entry in self._plugins.manifest.tree()
                if entry.key == (info.kind, info.name, info.value)
            )
            target = self._plugins.target(entry)
            if _has_options(target):
                options = msgspec.to_builtins(self._plugins.options(entry)) or {}
        else:
            source = Source(info.name, info.value, info.distribution, info.version, "default")
            RequiredProofs(self._config.plugins).check(source)
            target = load_component(kind, source, adapters=self._plugins.adapters)
        return ComponentDetails(
            info=info,
            summary=first_paragraph(target),
            interface=_interface(kind, target),
            contract=target.contract,
            stability=kind.stability.value,
            phase=_phase(target),
            adapter=_adapter_name(target, kind),
            hooks=_hooks(kind, target),
            methods=_methods(kind, target),
            params_fields=getattr(target, "params_fields", ()),
            options=options,
            option_sources=self._option_sources(info, options),
            option_fields=_fields(target, "Options"),
            argument_fields=_fields(target, "Arguments"),
            options_schema=_schema(target, "Options"),
            arguments_schema=_schema(target, "Arguments"),
            problem="" if info.enabled else self._problem(kind, info),
            others=others,
            input_fields=_fields(target, "Request"),
            input_schema=_schema(target, "Request"),
        )

    def _problem(self, kind: PluginKind, info: ComponentInfo) -> str:
        try:
            plugins = resolve_plugins(
                self.choosing(kind, info), self._config_sources, self._plugins.found
            )
            plugins.hooks()
        except HardpointError as error:
            return str(error)
        return ""

    def choosing(self, kind: PluginKind, info: ComponentInfo) -> EngineConfig:
        """Return the configuration with a component enabled, in the place of one of its name."""
        config = msgspec.to_builtins(self._config)
        *tables, field = (kind.chosen_by or "plugins.enable").split(".")
        table = config
        for name in tables:
            table = table[name]
        if kind.number is Number.ONE:
            table[field] = info.value
        elif kind.chosen_by is None and self._plugins.find(info.kind, info.name):
            key = f"{info.kind}/{info.name}"
            table["replace"] = {k: v for k, v in table["replace"].items() if k != info.name}
            table["replace"][key] = info.value
        else:
            table[field] = [*table[field], info.value]
        return convert(config, type(self._config), path="")

    def _find(self, name: str) -> tuple[ComponentInfo, list[ComponentInfo]]:
        components = self.components()
        named = [c for c in components if name in (c.name, f"{c.kind}/{c.name}", c.value)]
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
        enabled = [c for c in named if c.enabled]
        if len(named) > 1 and not enabled:
            choices = " or ".join(f"{c.value} ({c.distribution} {c.version})" for c in named)
            raise PluginConflictError(
                f"{name!r} is the name of several {kinds[0]}; name one by its FQCN: {choices}"
            )
        info = (enabled or named)[0]
        same = [c for c in components if (c.kind, c.name) == (info.kind, info.name)]
        return info, [c for c in same if c is not info]

    def _enabled(self, entry: PluginEntry) -> ComponentInfo:
        cls = self._plugins.loaded(entry)
        fields: dict[str, Any] = {}
        if entry.kind == "logits_processors":
            fields = {"place": entry.place + 1, "phase": cls.phase.name}
        if cls is not None:
            fields["adapter"] = _adapter_name(cls, KINDS[entry.kind])
        return _info(entry.kind, entry.source, enabled=True, reason=entry.origin, **fields)

    def _disabled(self) -> list[InstalledPlugin]:
        """Return the found plugins that are not enabled, neither by their names nor by others."""
        enabled: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        offered: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for entry in self._plugins.manifest.tree():
            enabled[entry.kind, entry.value].add(entry.name)
        for plugin in self._plugins.found:
            offered[plugin.kind, plugin.value].add(plugin.name)
        return [
            plugin
            for plugin in self._plugins.found
            if plugin.name not in (names := enabled[plugin.kind, plugin.value])
            and names <= offered[plugin.kind, plugin.value]
        ]

    def _why_disabled(self, plugin: InstalledPlugin) -> str:
        names = (plugin.name, f"{plugin.kind}/{plugin.name}")
        kind = KINDS.get(plugin.kind)
        if kind is None:
            return describe_unknown_kind(plugin.kind)
        for name, value in self._config.plugins.replace.items():
            if name in names and plugin.builtin:
                path = f"plugins.replace.{name}"
                return f"replaced by {value}: {path} ({self._config_sources.of(path)})"
        for index, name in enumerate(self._config.plugins.disable):
            if name in names and plugin.builtin:
                path = f"plugins.disable[{index}]"
                return f"{path} ({self._config_sources.of(path)})"
        if kind.number is Number.ONE:
            origin = self._config_sources.of(kind.chosen_by or "")
            return f"not chosen by {kind.chosen_by} ({origin})"
        return "not enabled"

    def _option_sources(self, info: ComponentInfo, options: dict[str, Any]) -> dict[str, str]:
        by_path = self._config_sources.by_path
        tables = (f"plugin.{info.name}", f"plugin.{info.kind}/{info.name}")
        return {
            option: by_path[f"{table}.{option}"]
            for table in tables
            for option in options
            if f"{table}.{option}" in by_path
        }


def _info(kind: str, source: Source, **fields: Any) -> ComponentInfo:
    return ComponentInfo(
        kind=kind,
        name=source.name,
        value=source.value,
        distribution=source.distribution,
        version=source.version,
        package=source.package,
        **fields,
    )


def _interface(kind: PluginKind, target: Any) -> str:
    forms = kind.forms or ((kind.interface,) if kind.interface else ())
    return next((form.__name__ for form in forms if issubclass(target, form)), kind.name)


def _phase(target: Any) -> str | None:
    phase = getattr(target, "phase", None)
    return phase.name if phase is not None else None


def _methods(kind: PluginKind, target: Any) -> list[str]:
    if kind.interface is None:
        return []
    return [
        name
        for name, method in vars(kind.interface).items()
        if inspect.isfunction(method)
        and not name.startswith("_")
        and getattr(target, name, method) is not method
    ]


def _hooks(kind: PluginKind, target: Any) -> list[str]:
    if kind.interface is not None:
        return []
    marker = f"{hookimpl.project_name}_impl"
    return [name for name in dir(target) if hasattr(getattr(target, name), marker)]


def _has_options(target: Any) -> bool:
    return inspect.isclass(target) and hasattr(target, "Options")


def _declared(target: Any, attribute: str) -> type[msgspec.Struct] | None:
    return getattr(target, attribute, None) if inspect.isclass(target) else None


def _fields(target: Any, attribute: str) -> list[FieldDoc] | None:
    declared = _declared(target, attribute)
    return struct_fields(declared) if declared is not None else None


def _schema(target: Any, attribute: str) -> dict[str, Any] | None:
    declared = _declared(target, attribute)
    return json_schema(declared) if declared is not None else None


def _adapter_name(target: Any, kind: PluginKind) -> str | None:
    """Return how a component is adapted, for people; None if it is not."""
    is_earlier = target.contract < kind.contract
    return f"contract {target.contract}" if is_earlier else adapter_of(target)
