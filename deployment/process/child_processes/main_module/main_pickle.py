"""Pickling by value of objects that a user's script defines in `__main__`.

Another process cannot import them, so they are pickled as code and data. cloudpickle does that for
functions and plain classes; this module adds what cloudpickle loses or rejects: msgspec Structs
(their fields vanish), `Meta`, `NewType`, and annotations written as text. Objects of importable
modules are pickled by reference, as usual.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
import typing
from collections.abc import Callable
from typing import Any

import cloudpickle
import msgspec

from hardpoint.errors import PluginLoadError

from .find_unpicklable import find_unpicklable
from .struct_pickle import (
    MSGSPEC_CACHE,
    StructParts,
    build_struct,
    fill_struct,
    make_meta,
    make_new_type,
)

_META_FIELDS = [name for name in dir(msgspec.Meta) if not name.startswith("_")]


def dumps(obj: Any) -> bytes:
    """Return the pickle of an object and of everything in `__main__` that it refers to.

    A class that is reached twice is one class in the other process.

    Raises:
        PluginLoadError: a part cannot be pickled; the message names the part and its holder.
    """
    try:
        return _pickled(obj)
    except Exception as cause:
        where, part = find_unpicklable(obj, _is_picklable)
        name = _name(obj)
        raise PluginLoadError(
            f"{name}: it cannot be sent to the engine process: {where} is {_describe(part)}: "
            f"{_reason(part, cause)}; make it in __init__, which runs in the engine, or move "
            f"the code into a module that the engine can import"
        ) from cause


def loads(data: bytes) -> Any:
    """Return the object that `dumps` pickled.

    Raises:
        PluginLoadError: it refers to something that does not exist in this process.
    """
    try:
        return pickle.loads(data)
    except Exception as cause:
        raise PluginLoadError(
            f"__main__: definitions of the program cannot be rebuilt in the engine process: "
            f"{type(cause).__name__}: {cause}"
        ) from cause


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle is not annotated
    """cloudpickle with support for msgspec, `NewType` and textual annotations."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, msgspec.StructMeta):
            return NotImplemented if _importable(obj) else _reduce_struct(obj)
        if isinstance(obj, msgspec.Meta):
            fields = {name: getattr(obj, name) for name in _META_FIELDS}
            return make_meta, ({k: v for k, v in fields.items() if v is not None},)
        if isinstance(obj, typing.NewType) and not _importable(obj):
            return make_new_type, (obj.__name__, obj.__module__, obj.__supertype__)
        if _is_open_file(obj):
            raise pickle.PicklingError(f"cannot pickle an open file ({obj!r})")
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == 6:
            return _adjusted(obj, reduced)
        return reduced


def _pickled(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


def _is_picklable(obj: Any) -> bool:
    try:
        _pickled(obj)
    except Exception:
        return False
    return True


def _reduce_struct(cls: msgspec.StructMeta) -> tuple[Any, ...]:
    """Return the reduce value of a struct: its layout first, then its content."""
    parts = StructParts.of(typing.cast("type[msgspec.Struct]", cls))
    return build_struct, parts.layout, parts.content, None, None, fill_struct


def _adjusted(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return cloudpickle's reduce value, without msgspec's cache, with resolved annotations.

    It has the attributes that are the same objects as those of a base, too: a plugin states
    `contract = 1` in its own body.
    """
    # Annotations written as text are replaced by their values: the names in them are the
    # script's, and the engine's `__main__` does not have them.
    make, arguments, (attributes, slots), _, _, fill = reduced
    repeated = {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("_")
        if any(vars(base).get(name) is value for base in cls.__mro__[1:])
    }
    attributes = repeated | {k: v for k, v in attributes.items() if k != MSGSPEC_CACHE}
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
        annotations = {name: hints[name] for name in inspect.get_annotations(cls)}
    except NameError:  # names for type checkers only, which no code can use
        annotations = {}
    return make, arguments, (fill, (attributes, slots), annotations), None, None, _fill_class


def _fill_class(cls: type, state: tuple[Callable[..., Any], Any, dict[str, Any]]) -> type:
    fill, content, annotations = state
    fill(cls, content)
    if annotations:
        cls.__annotations__ = annotations
    return cls


def _importable(obj: Any) -> bool:
    resolved: Any = sys.modules.get(obj.__module__) if obj.__module__ != "__main__" else None
    for step in obj.__qualname__.split("."):
        resolved = getattr(resolved, step, None)
    return resolved is obj


def _is_open_file(obj: Any) -> bool:
    if obj is sys.stdout or obj is sys.stderr:
        return False
    return isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO)


def _name(obj: Any) -> str:
    if isinstance(obj, dict):
        return ", ".join(f"__main__:{key}" for key in obj)
    qualname = getattr(obj, "__qualname__", None)
    return f"{obj.__module__}:{qualname}" if qualname else f"a {type(obj).__name__}"


def _describe(part: Any) -> str:
    kind = part if isinstance(part, type) else type(part)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{'the class' if kind is part else 'a'} {module}{kind.__qualname__}"


def _reason(part: Any, cause: Exception) -> str:
    """Return why the part itself cannot be pickled: `cause` may be an error of its holder."""
    try:
        _pickled(part)
    except Exception as part_cause:
        return str(part_cause)
    return str(cause)
