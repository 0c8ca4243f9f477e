"""What the log says of an engine that is opened."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec

from hardpoint.plugins import EngineConfig, Origins
from hardpoint.plugins.typed import join_path
from hardpoint.registry.discovery import installed_version

__all__ = ["log_opening"]

_log = logging.getLogger("hardpoint")

_NAMED = frozenset({"model"})
_SECRET = frozenset({"plugin"})
"""Options of plugins are never logged: a password may be among them."""


def log_opening(config: EngineConfig, origins: Origins) -> None:
    """Say version, model, and each value that is not its default, with its origin."""
    changed = ", ".join(
        f"{path} = {value!r} ({origins.of(path)})"
        for path, value in _changed(config, EngineConfig(), "")
        if path not in _NAMED | _SECRET
    )
    _log.info(
        "hardpoint %s opens %s (%s); not default: %s",
        installed_version(),
        config.model,
        origins.of("model"),
        changed or "nothing",
    )


def _changed(
    value: msgspec.Struct, default: msgspec.Struct, path: str
) -> Iterator[tuple[str, Any]]:
    """Yield path and value of what differs from the default."""
    for name in value.__struct_fields__:
        mine, other, where = getattr(value, name), getattr(default, name), join_path(path, name)
        if isinstance(mine, msgspec.Struct) and isinstance(other, msgspec.Struct):
            yield from _changed(mine, other, where)
        elif mine != other:
            yield where, msgspec.to_builtins(mine)
