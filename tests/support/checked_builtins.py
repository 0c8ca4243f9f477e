"""Checks each built-in plugin once, which is a third of an engine's start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any

from hardpoint.plugins.manifest import Source
from hardpoint.registry import plugin_set
from hardpoint.registry.kinds import Kind


def check_builtins_once() -> None:
    """Let a built-in plugin be imported, adapted and checked again only if its name has another.

    An engine loads a hundred, most of which no request of a test uses, and tests open thousands.
    """
    plugin_set.load_component = _once(plugin_set.load_component)


def _once(load: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[str, str], tuple[Any, Any]] = {}

    @wraps(load)
    def load_once(kind: Kind, source: Source, target: Any = None) -> Any:
        if target is not None or not source.value.startswith("hardpoint."):
            return load(kind, source, target)
        key = (kind.name, source.value)
        named, loaded = known.get(key, (None, None))
        if named is None or named is not _named(source.value):
            loaded = load(kind, source)
            known[key] = _named(source.value), loaded
        return loaded

    return load_once


def _named(value: str) -> Any:
    """Return the object of an entry point, without importing it."""
    module, _, qualname = value.partition(":")
    try:
        return attrgetter(qualname)(sys.modules[module])
    except (AttributeError, KeyError):
        return None
