"""Options of components, `[plugin.<name>]`, and the tables that hooks declare."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import msgspec

from hardpoint import typed
from hardpoint.errors import ConfigError, PluginConflictError, PluginContractError, shown
from hardpoint.plugins.component import Source
from hardpoint.plugins.config import ConfigSources, EngineConfig
from hardpoint.typed import Strict

from .adapt import ADAPTER_KIND, configured
from .discovery import InstalledPlugin, SelectedPlugin, name_of
from .kinds import KINDS, value_at
from .loading import inspecting

Key = tuple[str, str, str]
"""Kind, name and value of a component, see `PluginEntry.key`."""

Tables = dict[str, type[Strict]]
"""Types of the configuration tables that hooks declare, by name."""

_NAME = re.compile("[a-z][a-z0-9]*(_[a-z0-9]+)*")
"""What a variable of the environment can name, where `__` goes one level down."""


def checked_options(target: Any, options: Mapping[str, Any], path: str) -> Any:
    """Return options as the target's own type; modules and objects of hooks have none."""
    if options and not inspect.isclass(target):
        raise ConfigError(
            f"{path}: only classes have options, and this plugin is "
            f"{'a module' if isinstance(target, ModuleType) else 'an object'}; put its hooks into "
            f"a class with `Options` and `__init__(self, context)`"
        )
    declared = getattr(target, "Options", typed.Options) if inspect.isclass(target) else None
    return typed.convert(options, declared or typed.Options, path=path, str_keys=True)


def options_by_component(
    config: EngineConfig,
    config_sources: ConfigSources,
    chosen: Sequence[SelectedPlugin],
    targets: dict[Key, Any],
    installed: Sequence[InstalledPlugin],
) -> tuple[dict[Key, dict[str, Any]], Iterable[str]]:
    """Return each component's options with defaults, checked by its type, and warnings.

    Adapters are replaced in `targets` by ones with their options applied.
    """
    unused = _unused_tables(config, config_sources, chosen, installed)
    paths = _option_paths(config, config_sources, chosen, targets, unused, installed)
    result: dict[Key, dict[str, Any]] = {}
    for item in chosen:
        path = paths.get(item.key)
        if item.key not in targets:  # loaded by name; checked when it is
            result[item.key] = dict(_table(config, path))
            continue
        checked = options_of(item, targets[item.key], path, config, config_sources)
        result[item.key] = msgspec.to_builtins(checked)
        try:
            targets[item.key] = configured(targets[item.key], checked, item.source)
        except ConfigError as error:
            raise _located(error, item, path, config_sources) from None
    return result, unused.values()


def options_of(
    item: SelectedPlugin,
    target: Any,
    path: str | None,
    config: EngineConfig,
    config_sources: ConfigSources,
) -> Any:
    """Return a component's options, given the path of its table, if it has one."""
    try:
        return checked_options(target, _table(config, path), path or f"plugin.{item.name}")
    except ConfigError as error:
        raise _located(error, item, path, config_sources) from None


def _located(
    error: ConfigError, item: SelectedPlugin, path: str | None, config_sources: ConfigSources
) -> ConfigError:
    message = str(error)
    return ConfigError(config_sources.locate(message) if path else f"{message} (for {item.source})")


def _table(config: EngineConfig, path: str | None) -> Mapping[str, Any]:
    return config.plugin[path.removeprefix("plugin.")] if path else {}


def option_path(config: EngineConfig, item: SelectedPlugin) -> str | None:
    """Return the path of the table that has a component's name, which may belong to another one."""
    names = (f"{item.kind.name}/{item.name}", item.name)
    return next((f"plugin.{name}" for name in names if name in config.plugin), None)


def _option_paths(
    config: EngineConfig,
    config_sources: ConfigSources,
    chosen: Sequence[SelectedPlugin],
    loaded: Container[Key],
    unused: Container[str],
    installed: Sequence[InstalledPlugin],
) -> dict[Key, str]:
    """Return the path of the `[plugin.<name>]` table of each component that has one.

    `unused` has the names of the tables with a warning.
    Where a component wraps another one of its own name, the table is the wrapper's. Of several
    kinds with one name, it is that of the only component in `loaded`, if there is one: tables of
    those that a model or a request chooses by name have the kind in their own.
    """
    owners: dict[tuple[str, str], SelectedPlugin] = {}
    for item in chosen:  # those that are wrapped come last
        owners.setdefault((item.kind.name, item.name), item)
    paths: dict[Key, str] = {}
    for name in config.plugin:
        path = f"plugin.{name}"
        origin = config_sources.of(path)
        keys = [
            owner.key for (kind, use), owner in owners.items() if name in (use, f"{kind}/{use}")
        ]
        # An adapter has no options: the table is that of a component with the same name.
        keys = [key for key in keys if key[0] != ADAPTER_KIND] or keys
        if not keys and name in unused:
            continue
        if not keys:
            hint = _hint_at(name, chosen, installed)
            raise ConfigError(f"{path}: no plugin {name!r} is enabled{hint} (from {origin})")
        if len(certain := [key for key in keys if key in loaded]) == 1:
            keys = certain
        if len(keys) > 1:
            choices = ", ".join(f'"{kind}/{use}"' for kind, use, _ in keys)
            raise ConfigError(f"{path}: {name!r} could be any of {choices} (from {origin})")
        if keys[0] in paths:
            raise ConfigError(f"{path}: given twice, here and by {paths[keys[0]]} (from {origin})")
        paths[keys[0]] = path
    return paths


def _hint_at(
    name: str, chosen: Sequence[SelectedPlugin], installed: Sequence[InstalledPlugin]
) -> str:
    """Return a hint about a table of a component that is not enabled, if there is one."""
    if hint := name_of(name, chosen):
        return hint
    if any(name in (item.name, f"{item.kind}/{item.name}") for item in installed):
        return "; add it to plugins.enable, or remove the table"
    return typed.suggest(name, sorted({component.name for component in chosen}))


def _unused_tables(
    config: EngineConfig,
    config_sources: ConfigSources,
    chosen: Sequence[SelectedPlugin],
    plugins: Sequence[InstalledPlugin],
) -> dict[str, str]:
    """Return a warning for each table of an installed component that is not chosen.

    Only of kinds that a setting chooses: who chooses another one or none, to compare them or for
    a while, keeps the options of the first.
    """
    used = {name for item in chosen for name in (item.name, f"{item.kind.name}/{item.name}")}
    warnings: dict[str, str] = {}
    for installed in plugins:
        kind = KINDS.get(installed.kind)
        if kind is None or kind.chosen_by is None:
            continue
        use = value_at(config, kind.chosen_by)
        names = {installed.name, f"{kind.name}/{installed.name}"}
        for name in (names & config.plugin.keys()) - used:
            path = f"plugin.{name}"
            warnings[name] = (
                f"{path}: these options are not used, because {kind.chosen_by} is {use!r} "
                f"(from {config_sources.of(path)})"
            )
    return warnings


def declared_tables(hooks: Iterable[tuple[Any, Source]]) -> Tables:
    """Return the tables that hooks declare as `config_table`, by name.

    Raises:
        PluginContractError: naming the plugin and the defect of its declaration.
        PluginConflictError: two plugins declare one table, or a plugin declares one of Hardpoint's.
    """
    tables: Tables = {}
    sources: dict[str, Source] = {}
    for target, source in hooks:
        with inspecting(source):
            declared = getattr(target, "config_table", None)
        if declared is None:
            continue
        name, tables[name] = _checked(declared, source)
        if (other := sources.setdefault(name, source)) is not source:
            raise PluginConflictError(
                f"two plugins declare the configuration table {name!r}: {other} and {source}"
            )
    return tables


def _checked(declared: Any, source: Source) -> tuple[str, type[Strict]]:
    match declared:
        case (str() as name, type() as table) if issubclass(table, Strict):
            pass
        case _:
            raise PluginContractError(
                f"{source}: its config_table must be a name and a class derived from "
                f'hardpoint.typed.Strict, such as ("acme", AcmeConfig), got {shown(declared)}'
            )
    if not _NAME.fullmatch(name):
        raise PluginContractError(
            f"{source}: its config_table: expected a name of small letters, digits and single "
            f"'_', got {name!r}"
        )
    if name in EngineConfig.__struct_fields__:
        raise PluginConflictError(
            f"{source}: its config_table: Hardpoint itself has the configuration table {name!r}"
        )
    for field in _required_fields(table):
        raise PluginContractError(
            f"{source}: its config_table: {table.__name__}.{field} needs a default, since "
            f"a configuration may leave it out"
        )
    return name, table


@functools.cache
def _required_fields(table: type[Strict]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(table) if field.required]


def check_on_error(
    config: EngineConfig, config_sources: ConfigSources, chosen: Sequence[SelectedPlugin]
) -> None:
    """Refuse fault scopes that a plugin cannot have, since they would be ignored."""
    may_end = [c for c in chosen if c.kind.scope_can_be_raised]
    scopes = {c.name: c.kind.fault_scope for c in may_end}
    for name, scope in config.plugins.on_error.items():
        path = f"plugins.on_error.{name}"
        origin = config_sources.of(path)
        if name not in scopes:
            raise ConfigError(
                f"{path}: no enabled plugin {name!r} has faults that end less than the engine"
                f"{name_of(name, may_end) or typed.suggest(name, sorted(scopes))} (from {origin})"
            )
        if scope not in (scopes[name].value, "engine"):
            raise ConfigError(
                f'{path}: expected "{scopes[name].value}" or "engine", got "{scope}" '
                f"(from {origin})"
            )
