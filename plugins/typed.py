"""Typed values at the edge: conversion whose errors give path, value and what would be right."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from .errors import ConfigError, HardpointError

__all__ = ["Arguments", "Options", "convert", "join_path", "json_schema", "suggest"]

T = TypeVar("T")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a component's options: what an operator sets under `[plugin.<name>]`."""


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a component's per-request arguments: `SamplingParams(plugin_args={name: ...})`."""


def convert(
    value: Any, type_: type[T], *, path: str, error: type[HardpointError] = ConfigError
) -> T:
    """Convert `value` (plain data or an instance) to `type_`, checking every constraint.

    Constructing a msgspec Struct checks nothing, so instances are converted too. Numbers must
    be finite.

    Raises:
        `error`, with a message such as `plugin_args.dry.base: expected a number > 1, got 0.5`.
    """
    plain = msgspec.to_builtins(value, str_keys=False)
    for where, number in _non_finite(plain, path):
        raise error(f"{where}: expected a finite number, got {number}")
    try:
        return msgspec.convert(plain, type_)
    except msgspec.ValidationError as cause:
        raise error(_explain(str(cause), plain, type_, path)) from None


def json_schema(type_: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of an Options, Arguments or configuration type."""
    return msgspec.json.schema(type_)


def suggest(wrong: str, known: list[str]) -> str:
    """Return ` (did you mean 'x'?)` when a known name is close to `wrong`, else an empty string."""
    close = difflib.get_close_matches(wrong, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def join_path(*parts: str) -> str:
    """Join path parts with dots, leaving out empty ones; `[0]` is attached without a dot."""
    joined = ""
    for part in parts:
        if part:
            joined += part if part.startswith("[") or not joined else f".{part}"
    return joined


def _non_finite(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _non_finite(item, join_path(path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _non_finite(item, f"{path}[{index}]")


_WORDS = {
    "`float`": "a number",
    "`int`": "a whole number",
    "`str`": "a string",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a table",
    "`null`": "nothing",
}
_MESSAGE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"contains unknown field `(.*)`")
_MISSING = re.compile(r"missing required field `(.*)`")


def _explain(message: str, value: Any, type_: Any, path: str) -> str:
    """Turn msgspec's message into ours: full path, plain words, the value that was given."""
    match = _MESSAGE.match(message)
    assert match is not None  # the pattern matches every string
    what, inner = match["what"], (match["path"] or "").lstrip(".")
    where = join_path(path, inner)
    if found := _UNKNOWN.search(what):
        known = _fields_at(type_, inner)
        hint = suggest(found[1], known)
        listed = f"; known here: {', '.join(known)}" if known else ""
        return f"{join_path(where, found[1])}: unknown field{hint}{listed}"
    if found := _MISSING.search(what):
        return f"{join_path(where, found[1])}: missing, and it has no default"
    expected, _, _ = what.partition(", got ")
    expected = re.sub(r"`([^`]*)`", _in_words, expected)
    if match["key"]:
        return f"{where}: {_lower(expected)} as key"
    given, known_value = _value_at(value, inner)
    return f"{where}: {_lower(expected)}" + (f", got {given!r}" if known_value else "")


def _in_words(match: re.Match[str]) -> str:
    return " or ".join(_WORDS.get(f"`{part}`", part) for part in match[1].split(" | "))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _steps(inner: str) -> list[str]:
    return [step for step in re.split(r"\.|(?=\[)", inner) if step]


def _value_at(value: Any, inner: str) -> tuple[Any, bool]:
    for step in _steps(inner):
        try:
            value = value[int(step[1:-1])] if step.startswith("[") else value[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return None, False
    return value, True


def _fields_at(type_: Any, inner: str) -> list[str]:
    for step in _steps(inner):
        fields = {f.encode_name: f.type for f in _struct_fields(type_)}
        type_ = fields.get(step)
    return [f.encode_name for f in _struct_fields(type_)]


def _struct_fields(type_: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
    try:
        return msgspec.structs.fields(type_)
    except TypeError:
        return ()
