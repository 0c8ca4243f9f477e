"""References to components in a configuration from Python: names, FQCNs, or the objects themselves.

Another process finds an object by its FQCN alone, so that stands for the object from here on.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.typed import join_path

from .kinds import KINDS

_PATHS = (
    "plugins.enable",
    "plugins.replace",
    *(k.chosen_by for k in KINDS.values() if k.chosen_by),
)
"""The configuration paths of references, of lists of them and of tables of them."""


def with_references(value: Any, path: str, origin: str) -> Any:
    """Return a configuration value with FQCNs in the place of classes and functions.

    Structs that may hold references become tables; all else is returned unchanged.

    Args:
        value: value at the path, maybe nested.
        path: dotted; empty for the whole configuration.
        origin: origin of the value, for error messages.

    Raises:
        ConfigError: an object can be found by no FQCN; it is named, with what would be right.
    """
    try:
        return _replaced(value, path, origin)
    except ConfigError:
        raise
    except Exception:  # it contains itself, or raises when read, which the conversion reports
        return value


def _replaced(value: Any, path: str, origin: str) -> Any:
    if not any(_contains(path, other) or _contains(other, path) for other in _PATHS):
        return value
    if isinstance(value, msgspec.Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {
            key: _replaced(item, join_path(path, str(key)), origin) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(item, f"{path}[{index}]", origin) for index, item in enumerate(value)]
    is_plain = value is None or isinstance(value, str | bytes | int | float)
    if is_plain or not any(_contains(other, path) for other in _PATHS):
        return value
    return _fqcn(value, path, origin)


def _contains(outer: str, inner: str) -> bool:
    """Return whether a path is another one or leads to it."""
    return not outer or f"{inner}.".startswith((f"{outer}.", f"{outer}["))


def _fqcn(target: Any, path: str, origin: str) -> str:
    """Return the FQCN under which any process finds a class or function."""
    if not (inspect.isclass(target) or inspect.isfunction(target)):
        raise ConfigError(
            f"{path}: expected a name, an FQCN like package.module:Class, or a class, got a "
            f"{type(target).__module__}.{type(target).__qualname__}; an object of a module is "
            f"enabled by its FQCN (from {origin})"
        )
    module, qualname = target.__module__, target.__qualname__
    advice = f'define it at the top level of a module, as "{module}:{target.__name__}"'
    if target.__name__ == "<lambda>":
        advice = f'define it with a name at the top level of a module, as "{module}:name"'
    if "<" in qualname:
        raise ConfigError(
            f"{path}: {module}:{qualname} exists only inside a function, where neither an import "
            f"nor another process can find it; {advice} (from {origin})"
        )
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not target:
        stands_for = "has no such object" if found is None else "has another object of that name"
        raise ConfigError(
            f"{path}: {module}:{qualname} cannot be found, for its module {stands_for}; {advice} "
            f"(from {origin})"
        )
    return f"{module}:{qualname}"
