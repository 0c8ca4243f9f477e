"""Typed options and arguments: conversion with errors that name path, value and valid values."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import msgspec
from msgspec import inspect as types

from .describing import attribute_docs, first_paragraph, type_at, type_text, walk_structs
from .errors import ConfigError, HardpointError
from .msgspec_errors import ANY_KEY, failing_keys, parse_error, plain_text, value_at

__all__ = [
    "Arguments",
    "Options",
    "Strict",
    "convert",
    "join_path",
    "json_schema",
    "parse_value",
    "split_setting",
    "suggest",
]

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
class _StrictMeta(msgspec.StructMeta):
    """Makes every subclass frozen, keyword-only and closed to unknown fields."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any
    ) -> _StrictMeta:
        strict = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        return super().__new__(cls, name, bases, namespace, **(strict | config))


class Strict(msgspec.Struct, metaclass=_StrictMeta):
    """A struct that is frozen, keyword-only and refuses unknown fields; so are its subclasses."""


class Options(Strict):
    """Base of a component's options: what an operator sets under `[plugin.<name>]`."""


class Arguments(Strict):
    """Base of a component's per-request arguments: `SamplingParams(plugin_args={name: ...})`."""


def convert(
    value: Any, type_: type[T], *, path: str, error: type[HardpointError] = ConfigError
) -> T:
    """Convert `value` (plain data or an instance) to `type_`, checking every constraint.

    Constructors of msgspec Structs check nothing, so instances are converted too. Numbers must be
    finite, and whole numbers must fit 64 bits.

    Raises:
        `error`, with a message such as `plugin_args.dry.base: expected a number > 1, got 0.5`.
    """
    try:
        plain = msgspec.to_builtins(value, str_keys=False, enc_hook=_scalar)
    except TypeError as cause:
        where = _non_data_path(value, path) or "value"
        raise error(f"{where}: expected plain data: {cause}") from None
    unusual = _has_unusual_number(plain)
    if unusual and (invalid := _first_number(plain, _is_infinite)) is not None:
        where = join_path(path, *invalid.steps)
        raise error(f"{where}: expected a finite number, got {invalid.number}")
    try:
        converted = msgspec.convert(plain, type_)
    except msgspec.ValidationError as cause:
        raise error(_explain(str(cause), plain, type_, path)) from None
    if unusual and (invalid := _first_number(plain, _is_too_large)) is not None:
        where = join_path(path, *invalid.steps)
        raise error(f"{where}: expected a whole number of at most 64 bits, got {invalid.number}")
    return converted


def json_schema(type_: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of an Options, Arguments or configuration type.

    Docstrings become the descriptions of tables and fields.
    """
    schema = msgspec.json.schema(type_)
    tables = {table.__name__: table for table in walk_structs(type_)}
    for name, definition in schema.get("$defs", {}).items():
        if (table := tables.get(name)) is not None:
            definition["description"] = first_paragraph(table)
            docs = attribute_docs(table)
            for field, content in definition.get("properties", {}).items():
                if field in docs:
                    content["description"] = docs[field]
    return schema


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


def split_setting(text: str, option: str, example: str) -> tuple[list[str], str]:
    """Split `a.b=text` at the first `=` into path and value.

    Args:
        text: the setting.
        option: name of the command-line option, for the error message.
        example: a valid setting, for the error message.

    Raises:
        ConfigError: there is no `=`, or a part of the path is empty.
    """
    path, equals, value = text.partition("=")
    steps = [step.strip() for step in path.split(".")]
    if not equals or not all(steps):
        raise ConfigError(f"{option}: expected PATH=VALUE such as {example}, got {text!r}")
    return steps, value.strip()


def parse_value(text: str) -> Any:
    """Return a text's TOML value (`5`, `true`, `[1, 2]`, `"x"`); the text itself if it has none."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = document["value"]
    too_long = isinstance(value, int) and not -(2**63) <= value < 2**63  # no TOML integer is
    return value if len(document) == 1 and not too_long else text


def _scalar(value: Any) -> Any:
    """Convert a scalar of numpy or torch to a Python number."""
    if callable(item := getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return item()
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} is none")


def _non_data_path(value: Any, path: str) -> str:
    """Return the path of the innermost part that is not plain data."""
    for step, part in _parts(value):
        try:
            msgspec.to_builtins(part, str_keys=False, enc_hook=_scalar)
        except TypeError:
            return _non_data_path(part, join_path(path, step))
    return path


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value with their path steps."""
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield field, getattr(value, field)
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))


class _InvalidNumber(NamedTuple):
    """An invalid number and its path."""

    number: float
    steps: list[str]


def _is_infinite(number: float) -> bool:
    return isinstance(number, float) and not math.isfinite(number)


def _is_too_large(number: float) -> bool:
    return isinstance(number, int) and not -(2**63) <= number < 2**63


def _has_unusual_number(value: Any) -> bool:
    """Return whether plain data has a number that is infinite, NaN or beyond 64 bits.

    Makes one call per table and list, since almost all data has no such number.
    """
    items: Iterable[Any] = value if isinstance(value, list) else (value,)
    if isinstance(value, dict):
        items = value.values()
    for item in items:
        if isinstance(item, int | float):
            if not -(2**63) <= item < 2**63:
                return True
        elif item and isinstance(item, dict | list) and _has_unusual_number(item):
            return True
    return False


def _first_number(value: Any, is_invalid: Callable[[float], bool]) -> _InvalidNumber | None:
    """Return the first invalid number in plain data."""
    if isinstance(value, int | float):
        return _InvalidNumber(value, []) if is_invalid(value) else None
    if isinstance(value, dict):
        for key, item in value.items():
            if (invalid := _first_number(item, is_invalid)) is not None:
                return _InvalidNumber(invalid.number, [str(key), *invalid.steps])
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if (invalid := _first_number(item, is_invalid)) is not None:
                return _InvalidNumber(invalid.number, [f"[{index}]", *invalid.steps])
    return None


_UNKNOWN = re.compile(r"contains unknown field `(.*)`")
_MISSING = re.compile(r"missing required field `(.*)`")


def _explain(message: str, value: Any, type_: Any, path: str) -> str:
    """Return an error message with full path, expected type and given value."""
    text, steps, in_key = parse_error(message)
    steps = failing_keys(type_, value, steps)
    where = join_path(path, *steps)
    info = type_at(type_, steps)
    if found := _UNKNOWN.search(text):
        known = _field_names(info)
        listed = f"; known here: {', '.join(known)}" if known else ""
        return f"{join_path(where, found[1])}: unknown field{suggest(found[1], known)}{listed}"
    if found := _MISSING.search(text):
        return f"{join_path(where, found[1])}: missing, and it has no default"
    expected, wrong_type, _ = text.partition(", got ")
    expected = re.sub(r"(\d)\.0$", r"\1", plain_text(expected))
    if info is not None and (text.startswith("Invalid enum") or (wrong_type and _is_number(info))):
        expected = f"expected {type_text(info)}"
    if in_key:
        key = failing_keys(type_, value, [*steps, ANY_KEY])[-1]
        return f"{where}: {expected} as key, got {key}"
    given, exists = value_at(value, steps)
    return f"{where}: {expected}" + (f", got {given!r}" if exists else "")


def _is_number(info: types.Type) -> bool:
    """Return whether a type is a number; msgspec names the limits of one only to other numbers."""
    if isinstance(info, types.Metadata):
        return _is_number(info.type)
    if isinstance(info, types.UnionType):
        return any(_is_number(option) for option in info.types)
    return isinstance(info, types.IntType | types.FloatType)


def _field_names(info: types.Type | None) -> list[str]:
    if isinstance(info, types.UnionType):
        return [name for option in info.types for name in _field_names(option)]
    return [f.encode_name for f in info.fields] if isinstance(info, types.StructType) else []
