"""Parses msgspec's error messages into plain text and the path to the wrong value."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

__all__ = [
    "ParsedError",
    "failing_keys",
    "join_path",
    "parse_error",
    "plain_text",
    "split_path",
    "value_at",
]

ANY_KEY = "[...]"
"""msgspec's step for some key of a mapping, which it does not name."""

_PLACE = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`")
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")
_TYPES = {
    "float": "a number",
    "int": "a whole number",
    "str": "a string",
    "bool": "true or false",
    "bytes": "bytes",
    "bytearray": "bytes",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
    "None": "nothing",
    "ext": "an extension",
}


class ParsedError(NamedTuple):
    """One message of msgspec.

    Attributes:
        text: msgspec's description of the error.
        steps: the path to the value: `[2]` is an index, `[...]` some key, others are names.
        in_key: whether a key of the mapping at that path is wrong, and not a value.
    """

    text: str
    steps: list[str]
    in_key: bool


def parse_error(message: str) -> ParsedError:
    """Split a message of msgspec into text and path.

    The text may quote a value or a name of any length, the path is the end of the message.
    """
    start = message.rfind(" - at `")
    place = _PLACE.fullmatch(message, start) if start >= 0 else None
    if place is None:
        return ParsedError(message, [], False)
    return ParsedError(message[:start], split_path(place["path"]), place["key"] is not None)


def split_path(path: str) -> list[str]:
    """Return the steps of a path such as `.a.b[2]`."""
    return _STEP.findall(path.lstrip("."))


def join_path(*parts: str) -> str:
    """Join path parts with dots, leaving out empty ones; `[0]` is attached without a dot."""
    joined = ""
    for part in parts:
        if part:
            joined += part if part.startswith("[") or not joined else f".{part}"
    return joined


def plain_text(text: str) -> str:
    """Return a text with plain names of types, beginning in lower case."""
    text = re.sub(r"`([^`]*)`", _type_text, text)
    return text[:1].lower() + text[1:]


def value_at(value: Any, steps: list[str]) -> tuple[Any, bool]:
    """Return the value at a path, and whether it exists."""
    for step in steps:
        try:
            value = value[int(step[1:-1])] if step.startswith("[") else _by_key(value)[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return None, False
    return value, True


def failing_keys(type_: Any, value: Any, steps: list[str], *, str_keys: bool) -> list[str]:
    """Return the path with each `[...]` replaced by the key that cannot be converted.

    Args:
        type_: the type that `value` was to be converted to.
        value: plain data.
        steps: steps of the error's path.
        str_keys: whether texts stand for keys that are numbers.
    """
    for index, step in enumerate(steps):
        table, _ = value_at(value, steps[:index])
        if step == ANY_KEY and isinstance(table, dict):
            key = _failing_key(type_, value, steps[:index], table, str_keys=str_keys)
            steps = [*steps[:index], str(key), *steps[index + 1 :]]
    return steps


def _failing_key(
    type_: Any, value: Any, path: list[str], table: dict[Any, Any], *, str_keys: bool
) -> Any:
    """Return a key that makes the conversion fail; halves the table, which may be large."""
    items = list(table.items())
    while len(items) > 1:
        half = items[: len(items) // 2]
        try:
            msgspec.convert(_replaced(value, path, dict(half)), type_, str_keys=str_keys)
        except msgspec.ValidationError:
            items = half
        else:
            items = items[len(half) :]
    return items[0][0]


def _replaced(value: Any, path: list[str], inner: Any) -> Any:
    """Return a copy of `value` with `inner` at a path."""
    if not path:
        return inner
    step, rest = path[0], path[1:]
    if step.startswith("["):
        index = int(step[1:-1])
        return [*value[:index], _replaced(value[index], rest, inner), *value[index + 1 :]]
    return {k: _replaced(v, rest, inner) if str(k) == step else v for k, v in value.items()}


def _by_key(table: Any) -> dict[str, Any]:
    return {str(key): item for key, item in table.items()} if isinstance(table, dict) else {}


def _type_text(match: re.Match[str]) -> str:
    return " or ".join(_TYPES.get(name, name) for name in match[1].split(" | "))
