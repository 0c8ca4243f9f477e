"""Options of components: the `[plugin.<name>]` tables, found and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hardpoint import typed
from hardpoint.errors import ConfigError
from hardpoint.plugins.config import ConfigSources, EngineConfig

from .adapt import configured
from .selection import SelectedPlugin

Key = tuple[str, str, str]
"""Kind, name and value of a component, see `PluginEntry.key`."""


def checked_options(target: Any, options: Mapping[str, Any], path: str) -> Any:
    """Return options as the target's own type; hooks have none of their own."""
    return typed.convert(options, getattr(target, "Options", typed.Options), path=path)


def options_by_component(
    config: EngineConfig,
    config_sources: ConfigSources,
    chosen: Sequence[SelectedPlugin],
    targets: dict[Key, Any],
) -> dict[Key, dict[str, Any]]:
    """Return each component's options with defaults, checked by the component's type.

    Adapters are replaced in `targets` by ones with their options applied.
    """
    paths = _option_paths(config, config_sources, chosen)
    result: dict[Key, dict[str, Any]] = {}
    for item in chosen:
        path = paths.get(item.key)
        if item.key not in targets:  # loaded by name; checked when it is
            result[item.key] = dict(_table(config, path))
            continue
        checked = options_of(item, targets[item.key], path, config, config_sources)
        result[item.key] = msgspec.to_builtins(checked)
        try:
            targets[item.key] = configured(targets[item.key], checked)
        except ConfigError as error:
            raise _located(error, item, path, config_sources) from None
    return result


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
    """Return an error of options with the origin of the table, or of the component without one."""
    message = str(error)
    return ConfigError(config_sources.locate(message) if path else f"{message} (for {item.source})")


def _table(config: EngineConfig, path: str | None) -> Mapping[str, Any]:
    return config.plugin[path.removeprefix("plugin.")] if path else {}


def option_path(config: EngineConfig, item: SelectedPlugin) -> str | None:
    """Return the path of the table that has a component's name, which may belong to another one."""
    names = (f"{item.kind.name}/{item.name}", item.name)
    return next((f"plugin.{name}" for name in names if name in config.plugin), None)


def _option_paths(
    config: EngineConfig, config_sources: ConfigSources, chosen: Sequence[SelectedPlugin]
) -> dict[Key, str]:
    """Return the path of the `[plugin.<name>]` table of each component that has one.

    Where a component wraps another one of its own name, the table is the wrapper's.
    """
    owners: dict[tuple[str, str], SelectedPlugin] = {}
    for item in chosen:  # those that are wrapped come last
        owners.setdefault((item.kind.name, item.name), item)
    paths: dict[Key, str] = {}
    for name in config.plugin:
        path = f"plugin.{name}"
        origin = config_sources.of(path)
        keys = [
            owner.key for (kind, own), owner in owners.items() if name in (own, f"{kind}/{own}")
        ]
        if not keys:
            known = sorted({c.name for c in chosen})
            raise ConfigError(
                f"{path}: no plugin {name!r} is enabled{typed.suggest(name, known)} (from {origin})"
            )
        if len(keys) > 1:
            choices = ", ".join(f'"{kind}/{own}"' for kind, own, _ in keys)
            raise ConfigError(f"{path}: {name!r} could be any of {choices} (from {origin})")
        if keys[0] in paths:
            raise ConfigError(f"{path}: given twice, here and by {paths[keys[0]]} (from {origin})")
        paths[keys[0]] = path
    return paths
