"""The one error of the wire, and where in a message it is."""

from __future__ import annotations

from functools import cache
from types import GenericAlias, UnionType
from typing import Any

import msgspec
from msgspec import inspect as types

from hardpoint.plugins import HardpointError
from hardpoint.plugins.describing import named_child
from hardpoint.plugins.msgspec_errors import parse_error, plain_text


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

_LONGEST = 500
_PHRASES = {
    "MessagePack data is malformed": "the frame is damaged",
    "Input data was truncated": "the frame is truncated",
    "Object contains unknown": "unknown",
    "Object missing": "missing",
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
    text, steps, in_key = parse_error(str(cause))
    where = field_path(type_, steps, name)
    for theirs, ours in _PHRASES.items():
        text = text.replace(theirs, ours)
    return short(f"{where}{', a key' if in_key else ''}: {plain_text(text)}")


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
        part, info = named_child(info, step)
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
