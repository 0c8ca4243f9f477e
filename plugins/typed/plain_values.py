"""Plain data: checks of its numbers and keys, and its bytes in one order.

JSON and TOML have text keys only, so `{"7": 0.5}` is how a request over HTTP gives `{7: 0.5}`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from hardpoint.errors import HardpointError, shown

from .msgspec_errors import join_path

__all__ = ["check_finite", "check_sizes", "repeated_key", "stable_bytes", "toml_text"]


class _InvalidNumber(NamedTuple):
    """An invalid number, its path, and whether it is a key of the table there."""

    number: float
    steps: list[str]
    is_key: bool = False


def check_finite(plain: Any, path: str, error: type[HardpointError]) -> None:
    """Check that all numbers in plain data are finite, keys too.

    Raises:
        `error`: one is not.
    """
    _check_numbers(plain, _is_infinite, "a finite number", path, error)


def check_sizes(plain: Any, path: str, error: type[HardpointError]) -> None:
    """Check that all whole numbers in plain data fit 64 bits, keys too.

    Raises:
        `error`: one does not.
    """
    _check_numbers(plain, _is_too_large, "a whole number of at most 64 bits", path, error)


def _check_numbers(
    plain: Any,
    is_invalid: Callable[[float], bool],
    expected: str,
    path: str,
    error: type[HardpointError],
) -> None:
    if (invalid := _first_number(plain, is_invalid)) is not None:
        where, key = join_path(path, *invalid.steps), " as key" if invalid.is_key else ""
        raise error(f"{where}: expected {expected}{key}, got {shown(invalid.number)}")


def _is_infinite(number: float) -> bool:
    return isinstance(number, float) and not math.isfinite(number)


def _is_too_large(number: float) -> bool:
    return isinstance(number, int) and not -(2**63) <= number < 2**63


def _first_number(value: Any, is_invalid: Callable[[float], bool]) -> _InvalidNumber | None:
    """Return the first invalid number in plain data."""
    if isinstance(value, int | float):
        return _InvalidNumber(value, []) if is_invalid(value) else None
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        for key in value:
            if isinstance(key, int | float) and is_invalid(key):
                return _InvalidNumber(key, [], is_key=True)
        parts = ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        parts = ((f"[{index}]", item) for index, item in enumerate(value))
    for step, item in parts:
        if (invalid := _first_number(item, is_invalid)) is not None:
            return invalid._replace(steps=[step, *invalid.steps])
    return None


def repeated_key(plain: Any, converted: Any) -> list[str] | None:
    """Return the path of a table that has two keys for one, such as 1 and "1"; None without any.

    Args:
        plain: plain data.
        converted: the plain data of its conversion, with keys of the declared type.
    """
    for step, value, other in _pairs(plain, converted):
        if (path := repeated_key(value, other)) is not None:
            return [step, *path]
    is_table = isinstance(plain, dict) and isinstance(converted, dict)
    return [] if is_table and len(converted) < len(plain) else None


def _pairs(plain: Any, converted: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts of plain data, with the same parts of its conversion."""
    if isinstance(plain, dict) and isinstance(converted, dict):
        if plain.keys() <= converted.keys():  # a struct may have more
            yield from ((str(key), plain[key], converted[key]) for key in plain)
        elif len(plain) == len(converted):
            values = zip(plain.items(), converted.values(), strict=True)
            yield from ((str(key), value, other) for (key, value), other in values)
    elif isinstance(plain, list | tuple) and isinstance(converted, list | tuple):
        items = enumerate(zip(plain, converted, strict=False))
        yield from ((f"[{index}]", *both) for index, both in items)


def stable_bytes(value: Any) -> bytes:
    """Return bytes that equal values have in every process, and no others.

    Keys of tables and items of sets have one order. Values of different types differ: 1, 1.0, "1".

    Args:
        value: plain data, sets, structs and dataclasses, at any depth.

    Raises:
        TypeError: something in it is none of these.
    """
    try:
        plain = msgspec.to_builtins(value, order="deterministic")
        return msgspec.json.encode(plain, order="deterministic")
    except TypeError:  # keys that are not texts, or items of several types, which have no order
        return b"\0" + msgspec.msgpack.encode(_ordered(value))


def _ordered(value: Any) -> Any:
    """Return a value as tuples that begin with the kind of value, and scalars."""
    if isinstance(value, msgspec.Struct):
        fields = [(name, _ordered(getattr(value, name))) for name in value.__struct_fields__]
        return ("struct", type(value).__qualname__, *fields)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = [(name, _ordered(getattr(value, name))) for name in names]
        return ("struct", type(value).__qualname__, *fields)
    if isinstance(value, dict):
        items = [(_ordered(key), _ordered(item)) for key, item in value.items()]
        return ("table", *sorted(items, key=msgspec.msgpack.encode))
    if isinstance(value, set | frozenset):
        return ("set", *sorted(map(_ordered, value), key=msgspec.msgpack.encode))
    if isinstance(value, list | tuple):
        return ("list", *map(_ordered, value))
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def toml_text(value: Any) -> str:
    """Return plain data in TOML syntax, tables inline; None, which TOML lacks, is `none`."""
    if value is None:
        return "none"
    if isinstance(value, dict) and value:
        pairs = [f"{toml_text(str(k))} = {toml_text(v)}" for k, v in value.items()]
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML forbids DEL
