"""Data that plugins read and cannot change: lists and dicts without mutators, frozen structs.

Reading is as fast as with the plain types. The owner of a `ReadOnlyList` or `ReadOnlyDict` changes
it through the base class, as in `list.append(it, x)`. A copy, by any means, is an ordinary object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgspec

__all__ = ["ReadOnlyDict", "ReadOnlyList", "read_only"]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class ReadOnlyList(list[T]):
    """A list that only its owner changes."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy it as a list."""
        return list, (list(self),)


class ReadOnlyDict(dict[K, V]):
    """A dict that only its owner changes."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy it as a dict."""
        return dict, (dict(self),)


def read_only(value: T) -> T:
    """Return an immutable copy of plain data, at any depth.

    Structs become frozen ones of a class derived from theirs. Other objects than structs, lists,
    dicts and sets stay as they are.
    """
    frozen: Any = value
    if isinstance(value, list):
        if not _SCALARS.issuperset(map(type, value)):  # one call, since lists of tokens are long
            frozen = [v if type(v) in _SCALARS else read_only(v) for v in value]
        frozen = ReadOnlyList(frozen)
    elif isinstance(value, dict):
        if not _SCALARS.issuperset(map(type, value.values())):
            frozen = {k: v if type(v) in _SCALARS else read_only(v) for k, v in value.items()}
        frozen = ReadOnlyDict(frozen)
    elif isinstance(value, set):
        frozen = frozenset(value)
    elif isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        for name, field in fields.items():
            if isinstance(field, _CONTAINERS):
                empty = None if field else _EMPTY.get(type(field))
                fields[name] = read_only(field) if empty is None else empty()
        frozen = _frozen(type(value))(**fields)
    return frozen  # type: ignore[no-any-return]


_SCALARS = {int, float, str, bytes, bool, type(None)}
_CONTAINERS = (list, dict, set, msgspec.Struct)
_EMPTY: dict[type, Callable[[], Any]] = {
    list: ReadOnlyList,
    dict: ReadOnlyDict,
    ReadOnlyList: ReadOnlyList,
    ReadOnlyDict: ReadOnlyDict,
}


@functools.cache
def _frozen(cls: type[msgspec.Struct]) -> Any:
    """Return the frozen class of a struct: itself, or one derived from it."""
    config = cls.__struct_config__
    if config.frozen:
        return cls
    namespace = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__copy__": _copied,
        "__eq__": _equal,
        "__reduce__": _reduce,
    }
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), namespace, frozen=True, eq=False, tag=config.tag)


def _equal(struct: msgspec.Struct, other: object) -> bool:
    """Return whether two structs have the same fields, frozen or not."""
    names = struct.__struct_fields__
    return isinstance(other, type(struct).__bases__[0]) and all(
        getattr(struct, name) == getattr(other, name) for name in names
    )


def _copied(struct: msgspec.Struct) -> msgspec.Struct:
    """Return a copy that can be changed."""
    rebuilt, arguments = _reduce(struct)
    copied: msgspec.Struct = rebuilt(*arguments)
    return copied


def _reduce(struct: msgspec.Struct) -> tuple[Any, ...]:
    """Pickle and copy a frozen struct as one of the class that it was made from."""
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__}
    return _rebuilt, (type(struct).__bases__[0], fields)


def _rebuilt(cls: type[msgspec.Struct], fields: dict[str, Any]) -> msgspec.Struct:
    return cls(**fields)


def _refuse(self: Any, *_args: Any, **_named: Any) -> NoReturn:
    kind = "list" if isinstance(self, list) else "dict"
    raise TypeError(f"this {kind} is read-only: it belongs to the engine; change a copy of it")


_MUTATORS = {
    ReadOnlyList: "append extend insert remove pop clear sort reverse "
    "__setitem__ __delitem__ __iadd__ __imul__",
    ReadOnlyDict: "clear pop popitem setdefault update __setitem__ __delitem__ __ior__",
}
for _cls, _names in _MUTATORS.items():
    for _name in _names.split():
        setattr(_cls, _name, _refuse)
