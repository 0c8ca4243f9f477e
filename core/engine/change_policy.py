"""Another scheduling policy in a configuration, and the plugin set that comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hardpoint.plugins import EngineConfig, Origins, PluginSet

__all__ = ["change_policy"]

_KIND = "scheduling_policies"
_ORIGIN = "set_policy()"


def change_policy(
    config: EngineConfig,
    origins: Origins,
    plugins: PluginSet,
    use: str,
    options: Mapping[str, Any],
) -> tuple[EngineConfig, PluginSet]:
    """Return the configuration with another policy, and the next generation of the plugin set.

    Args:
        config, origins, plugins: as they are now.
        use: entry-point name or FQCN.
        options: the policy's own.

    Raises:
        ConfigError, PluginError: the policy cannot be had; nothing was changed.
    """
    old = plugins.one(_KIND).name
    tables = {k: v for k, v in config.plugin.items() if k not in (old, f"{_KIND}/{old}")}
    config = msgspec.structs.replace(
        config,
        scheduler=msgspec.structs.replace(config.scheduler, policy=use),
        plugin=tables,
    )
    by_path = {**origins.by_path, "scheduler.policy": _ORIGIN}
    changed = plugins.changed(config, Origins(by_path), _KIND)
    if options:
        name = changed.one(_KIND).name
        alone = sum(entry.name == name for entry in changed.manifest.entries) == 1
        table = name if alone else f"{_KIND}/{name}"
        path = f"plugin.{table}"
        kept = {k: v for k, v in by_path.items() if not f"{k}.".startswith(f"{path}.")}
        origins = Origins({**kept, path: _ORIGIN})
        config = msgspec.structs.replace(config, plugin={**tables, table: dict(options)})
        changed = plugins.changed(config, origins, _KIND)
    return config, changed
