"""The one error of the wire, and where in a message it is."""

from __future__ import annotations

import re
from functools import cache
from types import GenericAlias, UnionType
from typing import Any

import msgspec
from msgspec import inspect as types

from hardpoint.plugins import HardpointError


class WireError(HardpointError, ValueError):
    """A message cannot be sent, or what arrived is none; the text says where in it and why."""


MALFORMED = (
    msgspec.MsgspecError,
    ValueError,  # text that is no UTF-8, a time out of range
    TypeError,  # a table whose key cannot be one
    ArithmeticError,
    RecursionError,
)
"""What decoding raises at a message that is not as it should be."""

_MESSAGE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")
_LONGEST = 500
_PHRASES = {
    "MessagePack data is malformed": "the frame is damaged",
    "Input data was truncated": "the frame is truncated",
    "Object contains unknown": "unknown",
    "Object missing": "missing",
}
_WORDS = {
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


def explain(cause: Exception, type_: Any, name: str | None = None) -> str:
    """Return what is wrong with a message of a type, beginning with the path of the field.

    For instance `EngineCoreRequest.params.top_p: expected a number, got a string`.

    Args:
        cause: one of MALFORMED.
        name: how the message is called, if not by its type.
    """
    name = name or type_name(type_)
    if isinstance(cause, RecursionError):
        return f"{name}: nested too deeply"
    if isinstance(cause, UnicodeDecodeError):
        return f"{name}: a string is no UTF-8: {cause.reason}"
    match = _MESSAGE.match(str(cause))
    assert match is not None  # the pattern matches every string
    where = field_path(type_, _STEP.findall((match["path"] or "").lstrip(".")), name)
    what = re.sub(r"`([^`]*)`", _in_words, match["what"])
    for theirs, ours in _PHRASES.items():
        what = what.replace(theirs, ours)
    return short(f"{where}{', a key' if match['key'] else ''}: {what[:1].lower()}{what[1:]}")


def short(text: str) -> str:
    """Return the beginning of a text that a stranger may have made long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def field_path(type_: Any, steps: list[str], name: str | None = None) -> str:
    """Return the path to a value in words: fields by name, though they travel by position.

    Args:
        type_: of the message.
        steps: from the message down: `[2]` is a place, `[...]` any place, others are keys.
        name: how the message is called, if not by its type.
    """
    info: types.Type | None = _type_info(type_) if steps else None
    path = name or type_name(type_)
    for step in steps:
        part, info = _child(info, step)
        path += part if part.startswith("[") else f".{part}"
    return path


def type_name(type_: Any) -> str:
    """Return how messages of a type are called."""
    if type_ is Any:
        return "message"
    if isinstance(type_, UnionType):
        return " or ".join(type_name(option) for option in type_.__args__)
    return type_.__name__ if type(type_) is not GenericAlias else str(type_)


@cache
def _type_info(type_: Any) -> types.Type:
    """Return what msgspec knows of a type; a flood of bad messages shall not pay it each time."""
    return types.type_info(type_)


def _child(info: types.Type | None, step: str) -> tuple[str, types.Type | None]:
    """Return the name of a step and the type that is found there."""
    if isinstance(info, types.Metadata):
        return _child(info.type, step)
    if isinstance(info, types.UnionType):
        found = (_child(option, step) for option in info.types)
        return next((child for child in found if child != (step, None)), (step, None))
    place = int(step[1:-1]) if step[1:-1].isdecimal() and step.startswith("[") else None
    if isinstance(info, types.StructType):
        return _field(info, step, place)
    if isinstance(info, types.ListType | types.VarTupleType | types.SetType):
        return step, info.item_type
    if isinstance(info, types.DictType):
        return step, info.value_type
    if isinstance(info, types.TupleType) and place is not None and place < len(info.item_types):
        return step, info.item_types[place]
    return step, None


def _field(info: types.StructType, step: str, place: int | None) -> tuple[str, types.Type | None]:
    if not info.array_like:
        return step, next((f.type for f in info.fields if f.encode_name == step), None)
    if place is None:
        return step, None
    place -= info.tag is not None  # the tag comes first
    if 0 <= place < len(info.fields):
        return info.fields[place].name, info.fields[place].type
    return ("status" if place < 0 else step), None


def _in_words(match: re.Match[str]) -> str:
    return " or ".join(_WORDS.get(part, part) for part in match[1].split(" | "))
