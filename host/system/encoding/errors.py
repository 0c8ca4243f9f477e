"""The error of the wire, and the texts of decoding errors."""

from __future__ import annotations

from types import GenericAlias, UnionType
from typing import Any

import msgspec
from msgspec import inspect as types

from hardpoint.errors import RequestError
from hardpoint.typed.describing import named_child, type_info
from hardpoint.typed.msgspec_errors import parse_error, plain_text


class WireError(RequestError):
    """A message cannot be encoded or decoded; the text names the field and the reason.

    Where one cannot be decoded, that is a wrong request of its sender.
    """


MALFORMED = (
    msgspec.MsgspecError,
    ValueError,  # a string that is not UTF-8, a time out of range
    TypeError,  # a map whose key is not hashable
    ArithmeticError,
    RecursionError,
)
"""The exceptions that decoding raises for a malformed message."""

_MAX_LENGTH = 500
_PHRASES = {
    "MessagePack data is malformed": "the frame is damaged",
    "Input data was truncated": "the frame is truncated",
    "Invalid UTF-8 encoded string": "a string is no UTF-8",
    "Object contains unknown": "unknown",
    "Object missing": "missing",
}


def explain(cause: Exception, type_: Any, name: str | None = None) -> str:
    """Return the text of a decoding error, beginning with the path of the field.

    For instance `EngineCoreRequest.params.top_p: expected a number, got a string`.

    Args:
        cause: one of MALFORMED.
        name: name of the message, if not the name of its type.
    """
    name = name or type_name(type_)
    if isinstance(cause, RecursionError):
        return f"{name}: nested too deeply"
    if isinstance(cause, UnicodeDecodeError):
        return f"{name}: a string is no UTF-8"  # before msgspec 0.23
    text, steps, in_key = parse_error(str(cause))
    where = field_path(type_, steps, name)
    for theirs, ours in _PHRASES.items():
        text = text.replace(theirs, ours)
    return short(f"{where}{', a key' if in_key else ''}: {plain_text(text)}")


def short(text: str) -> str:
    """Return the beginning of a text that may contain a long value of the message."""
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."


def field_path(type_: Any, steps: list[str], name: str | None = None) -> str:
    """Return the path to a value, with the names of fields that are encoded by position.

    Args:
        steps: from the message down: `[2]` is an index, `[...]` any index, others are keys.
        name: name of the message, if not the name of its type.
    """
    info: types.Type | None = type_info(type_) if steps else None
    path = name or type_name(type_)
    for step in steps:
        part, info = named_child(info, step)
        path += part if part.startswith("[") else f".{part}"
    return path


def type_name(type_: Any) -> str:
    """Return the name of a message type."""
    if type_ is Any:
        return "message"
    if isinstance(type_, UnionType):
        return " or ".join(type_name(option) for option in type_.__args__)
    return type_.__name__ if type(type_) is not GenericAlias else str(type_)
