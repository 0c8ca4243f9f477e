"""Search for the part of an object that cannot be pickled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import msgspec

_SKIPPED = {"__dict__", "__weakref__", "__module__", "__doc__", "_abc_impl", "__annotations__"}
_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)


def find_unpicklable(obj: Any, is_picklable: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the place of the innermost part that cannot be pickled, and the part.

    Args:
        obj: an object that cannot be pickled.
        is_picklable: returns whether a part can be pickled alone.
    """
    where, seen = getattr(obj, "__qualname__", "") or "it", {id(obj)}
    while True:
        for place, part in _parts(where, obj):
            if id(part) not in seen and not is_picklable(part):
                where, obj = place, part
                seen.add(id(part))
                break
        else:
            return where, obj


def _parts(where: str, obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, FunctionType):
        yield from _used_by(where, obj)
    elif isinstance(obj, type):
        if isinstance(obj, msgspec.StructMeta):
            yield from _fields(where, obj)
        yield from _attributes(where, vars(obj))
        yield from ((base.__qualname__, base) for base in obj.__bases__)
    elif isinstance(obj, staticmethod | classmethod):
        yield where, obj.__func__
    elif isinstance(obj, property):
        yield from ((where, f) for f in (obj.fget, obj.fset, obj.fdel) if f is not None)
    elif isinstance(obj, functools.partial):
        yield from _parts(where, [obj.func, *obj.args, *obj.keywords.values()])
    elif isinstance(obj, dict):
        named = where == "it" and all(isinstance(key, str) for key in obj)
        yield from ((key if named else f"{where}[{key!r}]", part) for key, part in obj.items())
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from ((f"{where}[{index}]", part) for index, part in enumerate(obj))
    else:
        yield from _attributes(where, getattr(obj, "__dict__", {}))


def _fields(where: str, struct: Any) -> Iterator[tuple[str, Any]]:
    try:
        fields = msgspec.structs.fields(struct)
    except NameError:  # a type that does not exist: the struct itself is the cause
        return
    for field in fields:
        for attribute in ("type", "default", "default_factory"):
            place = f"the {attribute.replace('_', ' ')} of {where}.{field.name}"
            yield place, getattr(field, attribute)


def _attributes(where: str, attributes: Any) -> Iterator[tuple[str, Any]]:
    for name, part in list(attributes.items()):
        if name not in _SKIPPED and not isinstance(part, _DESCRIPTORS):
            yield f"{where}.{name}", part


def _used_by(where: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default of {where}", part
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name}, used by {where},", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield f"{name}, used by {where},", function.__globals__[name]


def _names(code: CodeType) -> set[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)
