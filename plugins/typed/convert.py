"""Typed options and arguments: conversion with errors that name path, value and valid values."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform
from uuid import UUID

import msgspec
from msgspec import inspect as types

from hardpoint.errors import ConfigError, HardpointError, RequestError, reason_of, shown

from .describing import attribute_docs, type_at, type_text, walk_structs
from .msgspec_errors import (
    ANY_KEY,
    failing_keys,
    join_path,
    parse_error,
    plain_text,
    value_at,
)
from .plain_values import check_finite, check_sizes, repeated_key

__all__ = [
    "Arguments",
    "Options",
    "State",
    "Strict",
    "attribute_docs",
    "check_text",
    "convert",
    "copied",
    "is_list",
    "join_path",
    "nearest_names",
    "parse_value",
    "plain_data",
    "prepared",
    "reason_of",
    "shown",
    "split_setting",
    "suggest",
    "walk_structs",
]

T = TypeVar("T")

_LONGEST_WAIT_S = 5.0
_lock = threading.RLock()
_prepared: set[Any] = set()


class _StrictMeta(msgspec.StructMeta):
    """Makes every subclass frozen, keyword-only and closed to unknown fields."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any
    ) -> _StrictMeta:
        strict = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        return super().__new__(cls, name, bases, namespace, **(strict | config))


# On the class: type checkers prefer msgspec's declaration of Struct to the metaclass. They take a
# frozen subclass of Struct for an error.
@dataclass_transform(kw_only_default=True, field_specifiers=(msgspec.field,))
class Strict(msgspec.Struct, metaclass=_StrictMeta):
    """A struct that is frozen, keyword-only and rejects unknown fields; so are its subclasses."""


class SuggestingMeta(_StrictMeta):
    """Lets the error of an unknown field suggest a known one; an instance takes longer to make."""

    if not TYPE_CHECKING:  # which take the arguments of a struct from its fields

        def __call__(self, *args: Any, **fields: Any) -> Any:
            """Return an instance; the error of an unknown field suggests a known one."""
            try:
                return super().__call__(*args, **fields)
            except TypeError as error:
                unknown = [name for name in fields if name not in self.__struct_fields__]
                hint = suggest(unknown[0], list(self.__struct_fields__)) if unknown else ""
                if not hint:
                    raise
                raise TypeError(f"{self.__name__}: {error}{hint}") from None


class Options(Strict):
    """Base of a component's options: the settings of an operator under `[plugin.<name>]`."""


class Arguments(Strict):
    """Base of a component's per-request arguments: `SamplingParams(plugin_args={name: ...})`."""


def prepared_type(cls: Any) -> type[Arguments]:
    """Return the result type of the `prepare` of a component's class."""
    declared: type[Arguments] = getattr(cls, "Prepared", cls.Arguments)
    return declared


class State(Strict):
    """Base of a logits processor's state that depends on logits, see `LogitsPlugin.observe`."""


def convert(
    value: Any,
    type_: type[T],
    *,
    path: str,
    error: type[HardpointError] = ConfigError,
    str_keys: bool = False,
) -> T:
    """Convert `value` (plain data or an instance) to `type_`, checking every constraint.

    Constructors of msgspec Structs check nothing, so instances are converted too. Numbers must be
    finite, whole numbers must fit 64 bits, and UTF-8 must be able to hold texts.

    Args:
        str_keys: whether the text of a number may be given as a key that is a number: JSON and TOML
            have no other keys. The number itself may be given, too.

    Raises:
        `error`, with a message such as `plugin_args.dry.base: expected a number > 1, got 0.5`.
    """
    plain = plain_data(value, path=path, error=error)
    unusual = _is_unusual((plain,))
    if unusual:
        check_text(plain, path, error)
        check_finite(plain, path, error)
    try:
        converted = msgspec.convert(plain, prepared(type_))
    except msgspec.ValidationError as cause:
        if str_keys:
            return _convert_text_keys(plain, type_, path, error)
        raise error(_explain(str(cause), plain, type_, path)) from None
    if unusual:
        check_sizes(plain, path, error)
    return converted


def prepared(type_: type[T]) -> type[T]:
    """Return a type that threads may use to convert and decode at the same time.

    At the first use of a struct, msgspec reads its annotations, in Python. It publishes the result
    before that is complete, for structs that hold themselves; a second thread that uses the struct
    before then ends the program with a segmentation fault (seen with 0.22). So the first use is
    made here, under a lock.
    """
    try:
        if type_ in _prepared:
            return type_
    except TypeError:  # of Annotated with data that has no hash: read each time
        _read(type_)
        return type_
    _read(type_)
    _prepared.add(type_)
    return type_


def _convert_text_keys(plain: Any, type_: type[T], path: str, error: type[HardpointError]) -> T:
    """Convert plain data, in which texts stand for keys that are numbers."""
    try:
        converted = msgspec.convert(plain, type_, str_keys=True)
    except msgspec.ValidationError as cause:
        raise error(_explain(str(cause), plain, type_, path, str_keys=True)) from None
    made = plain_data(converted, path=path, error=error)
    check_finite(made, path, error)
    check_sizes(made, path, error)
    if (steps := repeated_key(plain, made)) is not None:
        keys = list(value_at(plain, steps)[0])
        raise error(f"{join_path(path, *steps)}: expected each key once, got {shown(keys)}")
    return converted


def plain_data(
    value: Any,
    *,
    path: str,
    error: type[HardpointError] = ConfigError,
    paths: bool = False,
) -> Any:
    """Return `value` as new plain data: text, numbers, bytes, times, lists and tables.

    Args:
        paths: whether a Path may be in it, which becomes text.

    Raises:
        `error`: something in it is not plain data, contains itself, or cannot be read.
    """

    hook = _path_or_plain if paths else _plain_other
    try:
        return msgspec.to_builtins(value, str_keys=False, builtin_types=_KEPT, enc_hook=hook)
    except RecursionError:
        raise error(
            f"{path or 'value'}: expected plain data, got a {type(value).__name__} that is nested "
            f"too deeply or contains itself"
        ) from None
    except TypeError as cause:
        where = _non_data_path(value, path, hook) or "value"
        raise error(f"{where}: expected plain data: {cause}") from None
    except Exception as cause:  # raised by a container of the caller's own
        raise error(f"{path or 'value'}: reading it failed: {reason_of(cause)}") from cause


def check_text(value: Any, path: str, error: type[HardpointError] = ConfigError) -> None:
    r"""Check that UTF-8 can hold a text, which it cannot if half of a surrogate pair is in it.

    Args:
        value: plain data; texts in it are checked at any depth, keys too.
        path: path of the value, for the error.

    Raises:
        `error`: such as `cache_salt: expected text that UTF-8 can hold, got '\ud800' at
            character 4`.
    """
    if isinstance(value, str):
        if not value.isascii():
            _check_encodable(value, path, error)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                _check_encodable(key, f"{path}, a key" if path else "a key", error)
            check_text(item, join_path(path, str(key)), error)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_text(item, join_path(path, f"[{index}]"), error)


def is_list(value: Any) -> bool:
    """Return whether a value is a sequence of items, which text and bytes are not."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def copied(value: Any, path: str) -> Any:
    """Return a caller's sequence as a list, or its mapping as a dict; one of these types as it is.

    Its own methods, which may raise anything, are called here and nowhere later.

    Raises:
        RequestError: reading it failed.
    """
    if type(value) in (list, dict):
        return value
    try:
        return dict(value) if isinstance(value, Mapping) else list(value)
    except Exception as cause:
        raise RequestError(f"{path}: reading it failed: {reason_of(cause)}") from cause


def _check_encodable(text: str, path: str, error: type[HardpointError]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise error(
            f"{path or 'value'}: expected text that UTF-8 can hold, got {text[cause.start]!r} at "
            f"character {cause.start}"
        ) from None


_LONGEST_NAME = 200
_FEW_NAMES = 12  # that a message lists


def suggest(wrong: str, known: list[str]) -> str:
    """Return ` (did you mean 'x'?)` when a known name is close to `wrong`, else an empty string.

    Nothing is close to a name that is much longer than any known one.
    """
    if len(wrong) > _LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(wrong, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest_names(wrong: str, known: list[str]) -> str:
    """Return known names for a message: all if they are few, else the three nearest to `wrong`."""
    if len(known) <= _FEW_NAMES:
        return ", ".join(known) or "none"
    nearest = difflib.get_close_matches(wrong[:_LONGEST_NAME], known, n=3, cutoff=0.0)
    return f"{', '.join(nearest)} and {len(known) - len(nearest)} more"


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
    except ValueError:  # no TOML, or a number that is too long
        return text
    value = document["value"]
    too_long = isinstance(value, int) and not -(2**63) <= value < 2**63  # no TOML integer is
    return value if len(document) == 1 and not too_long else text


_KEPT = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)
"""Types that are not converted; msgspec would turn them into text, also where text is wanted."""


def _plain_other(value: Any) -> Any:
    """Convert a scalar of numpy or torch to a Python number, and a mapping to a dict."""
    if isinstance(value, Mapping):
        return dict(value)
    if callable(item := getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return item()
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be converted")


def _path_or_plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else _plain_other(value)


def _non_data_path(value: Any, path: str, other: Callable[[Any], Any]) -> str:
    """Return the path of the innermost part that is not plain data."""
    for step, part in _parts(value):
        try:
            msgspec.to_builtins(part, str_keys=False, builtin_types=_KEPT, enc_hook=other)
        except TypeError:
            return _non_data_path(part, join_path(path, step), other)
        except Exception:  # the part that is not data comes later
            continue
    return path


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value with their path steps."""
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield field, getattr(value, field)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (key if isinstance(key, str) else shown(key)), item
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))


def _is_unusual(items: Iterable[Any]) -> bool:
    """Return whether plain data has a text that UTF-8 may not hold, or an invalid number.

    Makes one call per table and list, since almost all data has neither.
    """
    for item in items:
        if isinstance(item, str):
            if not item.isascii():
                return True
        elif isinstance(item, int | float):
            if not -(2**63) <= item < 2**63:
                return True
        elif item and (
            (isinstance(item, list) and _is_unusual(item))
            or (isinstance(item, dict) and _is_unusual(chain(item, item.values())))
        ):
            return True
    return False


_UNKNOWN = re.compile(r"contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*)`")


def _explain(message: str, value: Any, type_: Any, path: str, *, str_keys: bool = False) -> str:
    """Return an error message with full path, expected type and given value."""
    text, steps, in_key = parse_error(message)
    steps = failing_keys(type_, value, steps, str_keys=str_keys)
    where = join_path(path, *map(_readable, steps))
    info = type_at(type_, steps)
    if match := _UNKNOWN.search(text):
        known = _field_names(info, value_at(value, steps)[0])
        listed = f"; known here: {', '.join(known)}" if known else ""
        name = _readable(match[1])
        return f"{join_path(where, name)}: unknown field{suggest(match[1], known)}{listed}"
    if match := _MISSING.search(text):
        return f"{join_path(where, match[1])}: missing, and it has no default"
    if text.startswith("Invalid value") and (tags := _tags(type_at(type_, steps[:-1]))):
        return f"{where}: expected {' or '.join(tags)}, got {shown(value_at(value, steps)[0])}"
    expected, wrong_type, _ = text.partition(", got ")
    expected = re.sub(r"(\d)\.0$", r"\1", plain_text(expected))
    if info is not None and (text.startswith("Invalid enum") or (wrong_type and _is_number(info))):
        expected = f"expected {type_text(info)}"
    if in_key:
        name = failing_keys(type_, value, [*steps, ANY_KEY], str_keys=str_keys)[-1]
        table, _ = value_at(value, steps)
        key = next(key for key in table if str(key) == name)
        return f"{where}: {expected} as key, got {shown(key)}"
    actual, exists = value_at(value, steps)
    return f"{where}: {expected}" + (f", got {shown(actual)}" if exists else "")


def _readable(step: str) -> str:
    """Return a step of a path, quoted if it cannot be printed, such as a text of several lines."""
    return step if step.isprintable() else shown(step)


def _is_number(info: types.Type) -> bool:
    """Return whether a type is a number; msgspec names the limits of one only to other numbers."""
    if isinstance(info, types.Metadata):
        return _is_number(info.type)
    if isinstance(info, types.UnionType):
        return any(_is_number(option) for option in info.types)
    return isinstance(info, types.IntType | types.FloatType)


def _tags(info: types.Type | None) -> list[str]:
    """Return the tags by which one sees which struct of a type is meant, in quotes."""
    if isinstance(info, types.UnionType):
        return [tag for option in info.types for tag in _tags(option)]
    return [f'"{info.tag}"'] if isinstance(info, types.StructType) and info.tag else []


def _field_names(info: types.Type | None, value: Any) -> list[str]:
    """Return the possible fields of a value; a tagged union has the fields of the value's tag."""
    if isinstance(info, types.UnionType):
        return [
            name
            for option in info.types
            if not isinstance(option, types.StructType)
            or option.tag_field is None
            or not isinstance(value, dict)
            or value.get(option.tag_field) == option.tag
            for name in _field_names(option, value)
        ]
    return [f.encode_name for f in info.fields] if isinstance(info, types.StructType) else []


def _read(type_: Any) -> None:
    # Reading annotations may import modules, and so wait for a thread that waits here while it
    # imports one: after a time that no reading takes, a thread goes on without the lock.
    lock = _lock
    is_held = lock.acquire(timeout=_LONGEST_WAIT_S)
    try:
        # A type that cannot be read is an error of the use that follows.
        with contextlib.suppress(Exception):
            msgspec.msgpack.Decoder(type_)
    finally:
        if is_held:
            lock.release()


def _renew_lock() -> None:
    """Replace the lock in a copy of this process, where the thread that has it does not run."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
