"""Bodies of requests: decoded, and checked field by field."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as types

from hardpoint.builtin_plugins.server.config import ServerLimits
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.operations.ignored_fields import (
    LONGEST_NAME,
    IgnoredFields,
    is_near_miss,
)
from hardpoint.plugins import RequestError
from hardpoint.typed import convert, join_path

from .limit_errors import too_many, too_many_items, too_many_prompts

T = TypeVar("T")

_BRACKET = 8
"""Items that an array or object counts as: it takes that much more time than a number."""


def decode_object(body: bytes, limits: ServerLimits, type_: Any = None) -> dict[str, Any]:
    """Return the JSON object of a body, without its members that are null.

    Args:
        type_: type of the body; null stays in required fields that may be null.

    Raises:
        AnswerError: it is not an object, or has more items or depth than the limits.
    """
    depth = limits.depth
    _check_items(body, limits.items)
    try:
        decoded = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(depth) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise AnswerError(400, f"body: expected JSON{_problem(cause)}") from None
    if not isinstance(decoded, dict):
        raise AnswerError(
            400, f"body: expected a JSON object, got {_json_type(decoded)}", param="body"
        )
    # Almost all bodies have too few brackets to be too deep.
    if body.count(b"[") + body.count(b"{") > depth and _is_deeper(decoded, depth):
        raise _too_deep(depth)
    nullable = _nullable_fields(type_)
    return {name: value for name, value in decoded.items() if value is not None or name in nullable}


_POSITION = re.compile(r"(.*) \(byte (\d+)\)$", re.DOTALL)
_PROBLEMS = {
    "Input data was truncated": "an incomplete value",
    "JSON is malformed: expected ',' or ']'": "an array without a comma or an end",
    "JSON is malformed: expected ',' or '}'": "an object without a comma or an end",
    "JSON is malformed: expected ':'": "a name without a colon",
    "JSON is malformed: invalid character": "an unexpected character",
    "JSON is malformed: invalid escape character in string": "an unknown escape in a text",
    "JSON is malformed: invalid number": "a malformed number",
    "JSON is malformed: object keys must be strings": "a name without double quotes",
    "JSON is malformed: trailing characters": "more than one value",
    "JSON is malformed: trailing comma in array": "a comma at the end of an array",
    "JSON is malformed: trailing comma in object": "a comma at the end of an object",
    "Number out of range": "a number that is too large",
}
"""Problems of bodies by msgspec's texts."""


def _problem(cause: msgspec.DecodeError | UnicodeDecodeError) -> str:
    """Return the rest of a message that begins with "body: expected JSON"."""
    text, _, _ = str(cause).partition(" - at ")
    if isinstance(cause, UnicodeDecodeError) or text == "Invalid UTF-8 encoded string":
        return " in UTF-8"  # the first before msgspec 0.23
    match = _POSITION.fullmatch(text)
    kind, place = (match[1], f" at byte {match[2]}") if match else (text, "")
    return f", got {_PROBLEMS.get(kind, 'something else')}{place}"


def _check_items(body: bytes, limit: int) -> None:
    """Check how many values a body may hold, before memory is taken for them."""
    if len(body) * _BRACKET <= limit:
        return
    # In constant time per byte, unlike `count`.
    commas = len(body) - len(body.translate(None, b","))
    brackets = len(body) - len(body.translate(None, b"[{"))
    if commas + _BRACKET * brackets > limit:
        raise AnswerError(
            413,
            f"body: expected at most {limit} items (server.limits.items), which are its commas "
            f"and {_BRACKET} for each opening bracket; it has {commas} commas and {brackets} "
            "brackets",
            param="body",
        )


def _too_deep(depth: int) -> AnswerError:
    return AnswerError(
        400,
        f"body: expected at most {depth} arrays and objects in one another (server.limits.depth)",
        param="body",
    )


def _is_deeper(value: Any, depth: int) -> bool:
    level: list[Any] = [value]
    for _ in range(depth):
        items = [x.values() if isinstance(x, dict) else x for x in level]
        level = [item for x in items for item in x if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _json_type(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )


def without_ignored(body: dict[str, Any], type_: Any) -> dict[str, Any]:
    """Return a body without the fields that its type ignores.

    Raises:
        RequestError: it has a field that the type refuses by name, and asks for something there.
    """
    ignored: Mapping[str, str] = getattr(type_, "ignored", {})
    refused: Mapping[str, str] = getattr(type_, "refused", {})
    left_out = set(ignored)
    for name, value in body.items():
        if name in refused:
            if value not in (False, "", [], {}):
                raise RequestError(f"{name}: not supported: {refused[name]}")
            left_out.add(name)
    return {name: value for name, value in body.items() if name not in left_out}


def check_lengths(body: Mapping[str, Any], type_: Any, limits: ServerLimits) -> None:
    """Check the lengths of a body's lists before their items are converted.

    Args:
        type_: type of the body; its `list_limits` are the limits of further lists by field.

    Raises:
        RequestError: one is too long; the message is that of the check of the field itself.
    """
    for name, limit in {**_LISTS, **getattr(type_, "list_limits", {})}.items():
        items = body.get(name)
        if not isinstance(items, list | dict):
            continue
        maximum = getattr(limits, limit)
        # A list of numbers is one prompt.
        is_one = name == "prompt" and isinstance(next(iter(items), None), int)
        if len(items) > maximum and not is_one:
            raise _ERRORS.get(name, too_many)(name, maximum, len(items))


_LISTS = {
    "messages": "messages",
    "prompt": "prompts",
    "tools": "tools",
    "stop": "stop",
    "stop_sequences": "stop",
    "stop_token_ids": "stop",
    "bad_words": "bad_words",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "logit_bias",
}
"""The limit of each field that is a list or a table."""

_ERRORS = {"items": too_many_items, "prompt": too_many_prompts}
"""Errors for lists that are too long, by field."""


def convert_body(
    body: dict[str, Any],
    type_: type[T],
    *,
    lenient: bool,
    ignored: IgnoredFields | None = None,
) -> T:
    """Return a decoded body as a checked struct.

    Unknown fields of messages, tool definitions and content parts are ignored always, because
    clients send back what other servers returned.

    Args:
        lenient: ignore other unknown fields too, unless they are near misses of known ones.
        ignored: record of the ignored fields, filled in.

    Raises:
        RequestError: naming the field, its value and what would be right.
    """
    with contextlib.suppress(RequestError):
        return convert(body, type_, path="", error=RequestError)
    # Members that are null inside are absent; a second conversion raises any other error.
    key: Any = type_
    record = IgnoredFields() if ignored is None else ignored
    cleaner = _Cleaner(record, _nullable_fields(key), lenient=lenient)
    known = cleaner.cleaned(body, _type_info(key), "")
    return convert(known, type_, path="", error=RequestError)


@functools.cache
def _type_info(type_: Any) -> types.Type:
    return types.type_info(type_)


@functools.cache
def _nullable_fields(type_: Any) -> frozenset[str]:
    """Return the names of a body's required fields that may be null."""
    info = None if type_ is None else _type_info(type_)
    fields = info.fields if isinstance(info, types.StructType) else ()
    required = {x.encode_name: _without_metadata(x.type) for x in fields if x.required}
    return frozenset(
        name
        for name, type_of_field in required.items()
        if isinstance(type_of_field, types.UnionType) and type_of_field.includes_none
    )


_RETURNED = frozenset(
    {"messages", "tools", "input", "system", "documents", "query", "items", "tool_calls"}
)
"""Fields with messages, tool definitions and content parts."""


class _Cleaner:
    """Removes null members, except the nullable ones of the body itself, and ignored fields."""

    def __init__(self, ignored: IgnoredFields, nullable: Collection[str], *, lenient: bool) -> None:
        self._ignored, self._nullable, self._lenient = ignored, nullable, lenient
        self._options: dict[int, _Options] = {}

    def cleaned(self, value: Any, info: types.Type, path: str, *, returned: bool = False) -> Any:
        """Return a value without the null members and the ignored fields of its structs.

        Args:
            returned: whether it belongs to a message, a tool definition or a content part.
        """
        if not isinstance(value, dict | list):
            return value  # at once: of these, a body may have a million
        if isinstance(info, types.Metadata):
            return self.cleaned(value, info.type, path, returned=returned)
        if isinstance(info, types.UnionType):
            options = self._options.get(id(info))  # the types live as long as the program
            if options is None:
                options = self._options[id(info)] = _Options(info)
            fitting = options.for_value(value)
            if len(fitting) != 1:
                return value
            return self.cleaned(value, fitting[0], path, returned=returned)
        if isinstance(info, types.ListType) and isinstance(value, list):
            if not _holds_structs(info.item_type):
                return value
            return [
                self.cleaned(item, info.item_type, f"{path}[{index}]", returned=returned)
                for index, item in enumerate(value)
            ]
        if isinstance(info, types.StructType) and isinstance(value, dict):
            return self._members(value, info, path, returned=returned)
        return value

    def _members(
        self, value: Mapping[str, Any], info: types.StructType, path: str, *, returned: bool
    ) -> dict[str, Any]:
        fields = {field.encode_name: field.type for field in info.fields}
        nullable = () if path else self._nullable
        members: dict[str, Any] = {}
        for name, item in value.items():
            if item is None and name not in nullable:
                continue
            if name in fields:
                inside = returned or name in _RETURNED
                members[name] = self.cleaned(
                    item, fields[name], join_path(path, name), returned=inside
                )
                continue
            is_allowed = name == info.tag_field or not info.forbid_unknown_fields
            if is_allowed or not self._ignores(name, fields, path, returned=returned):
                members[name] = item
        return members

    def _ignores(self, name: str, known: Iterable[str], path: str, *, returned: bool) -> bool:
        """Return whether an unknown field is ignored, and record it if it is."""
        if not returned:
            is_refused = not self._lenient or self._ignored.is_full
            if is_refused or any(is_near_miss(name, field) for field in known):
                return False
        self._ignored.add(join_path(path, name[:LONGEST_NAME]))
        return True


def _holds_structs(info: types.Type) -> bool:
    if isinstance(info, types.Metadata):
        return _holds_structs(info.type)
    if isinstance(info, types.UnionType):
        return any(map(_holds_structs, info.types))
    if isinstance(info, types.ListType):
        return _holds_structs(info.item_type)
    return isinstance(info, types.StructType)


class _Options:
    """The options of a union for arrays and objects, looked up once per body."""

    def __init__(self, info: types.UnionType) -> None:
        inner = [(_without_metadata(option), option) for option in info.types]
        self._lists = [option for kind, option in inner if isinstance(kind, types.ListType)]
        self._structs = [
            (kind.tag_field, kind.tag, option)
            for kind, option in inner
            if isinstance(kind, types.StructType)
        ]

    def for_value(self, value: dict[str, Any] | list[Any]) -> list[types.Type]:
        """Return the options that may hold a value."""
        if isinstance(value, list):
            return self._lists
        return [
            option
            for tag_field, tag, option in self._structs
            if tag_field is None or value.get(tag_field) == tag
        ]


def _without_metadata(info: types.Type) -> types.Type:
    return _without_metadata(info.type) if isinstance(info, types.Metadata) else info
