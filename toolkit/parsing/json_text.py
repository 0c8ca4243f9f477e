"""Tool calls in JSON, as bodies of an output format, and the JSON scanner that they share."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Any
from urllib.parse import unquote

import msgspec

from hardpoint.plugins.output_parser import OutputEvent, ToolCallArguments
from hardpoint.plugins.structured import ConstStringFormat, JsonSchemaFormat, SequenceFormat

from .format_parser import Body, OpenOutput

__all__ = [
    "JsonArguments",
    "JsonCalls",
    "JsonText",
    "arguments_format",
    "call_as_json",
    "is_json",
    "json_value",
    "named_types",
    "quoted",
    "resolved",
    "restrictions",
]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = " \t\n\r"
_MAX_DEPTH = 200


class _Expected:
    """What a JSON text goes on with; plain strings, because an enum's hash takes long."""

    VALUE = "a value"
    VALUE_OR_END = "a value or ]"
    KEY = "a key in double quotes"
    KEY_OR_END = "a key in double quotes or }"
    COLON = ":"
    COMMA_OR_END = ", or the end of the list or object"
    STRING = "the rest of a string"
    ESCAPE = "an escaped character"
    HEX = "a hexadecimal digit"
    NUMBER = "a digit"
    LITERAL = "true, false or null"
    NOTHING = "nothing"


_IN_STRING = frozenset({_Expected.STRING, _Expected.ESCAPE, _Expected.HEX})
_IN_TOKEN = _IN_STRING | {_Expected.NUMBER, _Expected.LITERAL}

# Numbers: from each state, the state after a character of a class.
_NUMBER = {
    "-": {"0": "0", "1": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "1": "1", ".": ".", "e": "e"},
    ".": {"0": "f", "1": "f"},
    "f": {"0": "f", "1": "f", "e": "e"},
    "e": {"0": "x", "1": "x", "+": "s", "-": "s"},
    "s": {"0": "x", "1": "x"},
    "x": {"0": "x", "1": "x"},
}
_NUMBER_ENDS = frozenset("01fx")


class Stop(Enum):
    """Where `JsonText.feed` stops before the end of the text."""

    BEGIN = auto()
    """A value begins."""
    END = auto()
    """It has ended."""
    ITEM = auto()
    """A value has ended in the list around such objects."""
    DONE = auto()
    """The whole value has ended."""
    ERROR = auto()
    """The text is no JSON."""


class JsonText:
    """Checks one JSON value as its text comes; each character is looked at once.

    Attributes:
        key: of the member whose value comes, at `stop_depth`.
        expected: what may come next.
    """

    def __init__(self, stop_depth: int = 0) -> None:
        """Expect a value.

        Args:
            stop_depth: `feed` stops before and after each member's value of objects so deep.
        """
        self._stop_depth = stop_depth
        self._open: list[str] = []
        self.expected = _Expected.VALUE
        self.key = ""
        self._key_text: list[str] | None = None
        self._is_key = False
        self._number = ""
        self._left = 0  # of an escape's digits
        self._literal = ""
        self._begun = False  # whether BEGIN was reported for the value that comes

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self.expected in _IN_STRING

    @property
    def is_done(self) -> bool:
        """Whether the value is complete; a number may go on."""
        return self.expected is _Expected.NOTHING or (
            self.expected is _Expected.NUMBER and not self._open and self._number in _NUMBER_ENDS
        )

    def feed(self, text: str, at: int = 0) -> tuple[int, Stop | None]:
        """Take text from `at` on; return where it stopped, and why before the end of it."""
        end, stop = len(text), None
        while at < end:
            expected = self.expected
            if expected is _Expected.STRING:
                at, stop = self._string(text, at)
            elif expected is _Expected.NOTHING:
                return at, Stop.DONE
            elif text[at] in _SPACE and expected not in _IN_TOKEN:
                at += 1
            else:
                at, stop = self._METHODS[expected](self, text, at)
            if stop is not None:
                return at, stop
        return at, None

    def _string(self, text: str, at: int) -> tuple[int, Stop | None]:
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if self._key_text is not None:
            self._key_text.append(text[at:end])
        if end == len(text):
            return end, None
        if text[end] == "\\":
            self._note(text[end])
            self.expected = _Expected.ESCAPE
            return end + 1, None
        if text[end] != '"':
            return end, Stop.ERROR
        if self._is_key:
            self._is_key = False
            self.expected = _Expected.COLON
            if self._key_text is not None:
                raw = "".join(self._key_text)
                self.key = _decoded_string(f'"{raw}"') or raw
                self._key_text = None
            return end + 1, None
        return end + 1, self._value_ended()

    def _note(self, character: str) -> None:
        if self._key_text is not None:
            self._key_text.append(character)

    def _escape(self, text: str, at: int) -> tuple[int, Stop | None]:
        character = text[at]
        if character not in '"\\/bfnrtu':
            return at, Stop.ERROR
        self._note(character)
        self._left = 4
        self.expected = _Expected.HEX if character == "u" else _Expected.STRING
        return at + 1, None

    def _hex(self, text: str, at: int) -> tuple[int, Stop | None]:
        if text[at] not in "0123456789abcdefABCDEF":
            return at, Stop.ERROR
        self._note(text[at])
        self._left -= 1
        if not self._left:
            self.expected = _Expected.STRING
        return at + 1, None

    def _in_literal(self, text: str, at: int) -> tuple[int, Stop | None]:
        if text[at] != self._literal[0]:
            return at, Stop.ERROR
        self._literal = self._literal[1:]
        return at + 1, None if self._literal else self._value_ended()

    def _in_number(self, text: str, at: int) -> tuple[int, Stop | None]:
        character = text[at]
        kind = "1" if character in "123456789" else character.replace("E", "e")
        following = _NUMBER[self._number].get(kind)
        if following is not None:
            self._number = following
            return at + 1, None
        if self._number not in _NUMBER_ENDS:
            return at, Stop.ERROR
        return at, self._value_ended()

    def _colon(self, text: str, at: int) -> tuple[int, Stop | None]:
        if text[at] != ":":
            return at, Stop.ERROR
        self.expected = _Expected.VALUE
        return at + 1, None

    def _key_or_end(self, text: str, at: int) -> tuple[int, Stop | None]:
        if text[at] != '"':
            return self._end(text, at)
        self._is_key, self.expected = True, _Expected.STRING
        if len(self._open) == self._stop_depth:
            self._key_text = []
        return at + 1, None

    def _comma_or_end(self, text: str, at: int) -> tuple[int, Stop | None]:
        if text[at] != ",":
            return self._end(text, at)
        self.expected = _Expected.KEY if self._open[-1] == "}" else _Expected.VALUE
        return at + 1, None

    def _end(self, text: str, at: int) -> tuple[int, Stop | None]:
        """Take the closing bracket of the innermost list or object, if it may be here."""
        if self.expected is _Expected.KEY or text[at] != self._open[-1]:
            return at, Stop.ERROR
        self._open.pop()
        return at + 1, self._value_ended()

    def _value(self, text: str, at: int) -> tuple[int, Stop | None]:
        character = text[at]
        if self.expected is _Expected.VALUE_OR_END and character == "]":
            return self._end(text, at)
        if not self._begun and self._tells():
            self._begun = True
            return at, Stop.BEGIN
        self._begun = False
        if character == '"':
            self.expected = _Expected.STRING
        elif character in "{[":
            if len(self._open) == _MAX_DEPTH:
                return at, Stop.ERROR
            is_object = character == "{"
            self._open.append("}" if is_object else "]")
            self.expected = _Expected.KEY_OR_END if is_object else _Expected.VALUE_OR_END
        elif character in "-0123456789":
            self._number = character if character in "-0" else "1"
            self.expected = _Expected.NUMBER
        elif character in "tfn":
            self._literal = {"t": "rue", "f": "alse", "n": "ull"}[character]
            self.expected = _Expected.LITERAL
        else:
            return at, Stop.ERROR
        return at + 1, None

    _METHODS = {
        _Expected.VALUE: _value,
        _Expected.VALUE_OR_END: _value,
        _Expected.KEY: _key_or_end,
        _Expected.KEY_OR_END: _key_or_end,
        _Expected.COLON: _colon,
        _Expected.COMMA_OR_END: _comma_or_end,
        _Expected.ESCAPE: _escape,
        _Expected.HEX: _hex,
        _Expected.NUMBER: _in_number,
        _Expected.LITERAL: _in_literal,
    }

    def _tells(self) -> bool:
        """Return whether the innermost value is one that `feed` stops at."""
        return len(self._open) == self._stop_depth > 0 and self._open[-1] == "}"

    def _value_ended(self) -> Stop | None:
        if not self._open:
            self.expected = _Expected.NOTHING
            return Stop.DONE
        self.expected = _Expected.COMMA_OR_END
        if self._tells():
            return Stop.END
        return Stop.ITEM if len(self._open) == self._stop_depth - 1 else None


def _decoded_string(text: str) -> str | None:
    """Return the string that a JSON text is; None if it is another value."""
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeError):  # also half of a surrogate pair
        return None


class JsonArguments(Body):
    """The arguments of the call of `output.tool`, as a JSON object."""

    def __init__(self, output: OpenOutput) -> None:
        """Expect an object."""
        super().__init__(output)
        self._json = JsonText()
        self._is_open = False  # whether the object has begun

    @property
    def quotes(self) -> bool:
        """Whether a string is open."""
        return self._json.in_string

    def open(self, events: list[OutputEvent]) -> None:
        """Begin the call."""
        if not self.output.tool:
            self.output.fail_call("it has no name", events)
        self.output.begin_call(events)

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Pass on what is JSON."""
        start, stop = 0, None
        if not self._is_open:
            start = len(text) - len(text.lstrip(_SPACE))
            if start == len(text):
                return start
            self._is_open = True
            stop = None if text[start] == "{" else Stop.ERROR
        at = start
        if stop is None:
            at, stop = self._json.feed(text, start)
        if at > start:
            events.append(ToolCallArguments(text[start:at]))
        if stop is Stop.DONE:
            at += len(text[at:]) - len(text[at:].lstrip(_SPACE))
        if at < len(text):
            self.output.fail_call(self._json_reason(), events)
        return len(text)

    def _json_reason(self) -> str:
        return f"its arguments are no JSON object: expected {self._json.expected}"

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """End the call."""
        if self._json.is_done:
            self.output.end_call(events)
        elif not cut:
            self.output.fail_call(self._json_reason(), events)


class JsonCalls(Body):
    """Calls as a JSON object, or as a list of them.

    Attributes:
        name_keys: of the member that has the tool's name.
        argument_keys: of the member that has the arguments.
    """

    is_start = True
    name_keys: Collection[str] = ("name",)
    argument_keys: Collection[str] = ("arguments", "parameters")

    def __init__(self, output: OpenOutput) -> None:
        """Expect an object or a list."""
        super().__init__(output)
        self._json: JsonText | None = None
        self._is_list = False
        self._ended = False
        self._count = 0  # of complete calls
        self._next_call()

    def _next_call(self) -> None:
        self._capture = ""  # what the member is that comes: name, arguments, string or nothing
        self._value: list[str] = []  # of a member that is needed as a whole
        self._waiting: list[str] | None = None  # arguments that came before the name
        self._has_arguments = self._begun = False

    @property
    def quotes(self) -> bool:
        """Whether a string is open."""
        return self._json is not None and self._json.in_string

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Give the calls as they come; end after the value."""
        at = len(text) - len(text.lstrip(_SPACE)) if self._json is None or self._ended else 0
        if at == len(text) or self._ended:
            return at
        if self._json is None:
            self._is_list = text[at] == "["
            self._json = JsonText(2 if self._is_list else 1)
            if text[at] not in "[{":
                self.output.fail_call("expected { or [", events)
                return len(text)
        while at < len(text):
            before = at
            at, stop = self._json.feed(text, at)
            if at > before:
                self._keep(text[before:at], events)
            if stop is None:
                return at
            reason = self._stopped(stop, text, at, events)
            if reason:
                self.output.fail_call(reason, events)
            if self.output.failed:
                return len(text)
            if stop is Stop.DONE:
                self._ended = True
                return at + len(text[at:]) - len(text[at:].lstrip(_SPACE))
        return at

    def _keep(self, piece: str, events: list[OutputEvent]) -> None:
        """Keep or pass on a piece of a member."""
        if self._capture == "arguments" and self._begun:
            events.append(ToolCallArguments(piece))
            return
        if self._capture == "arguments":
            assert self._waiting is not None
            self._waiting.append(piece)
        elif self._capture:
            self._value.append(piece)

    def _stopped(self, stop: Stop | None, text: str, at: int, events: list[OutputEvent]) -> str:
        """Go on after a stop; return what is wrong, if anything is."""
        assert self._json is not None
        if stop is Stop.ERROR:
            return f"expected {self._json.expected}"
        if stop is Stop.BEGIN:
            return self._member_begins(text[at])
        if stop is Stop.END:
            return self._member_ended(events)
        if stop is (Stop.ITEM if self._is_list else Stop.DONE):
            return self._call_ended(events, at)
        return "expected a call" if stop is Stop.DONE and not self._count else ""

    def _member_begins(self, character: str) -> str:
        assert self._json is not None
        self._value = []
        if self._json.key in self.name_keys and not self._begun:
            self._capture = "name"
        elif self._json.key in self.argument_keys and not self._has_arguments:
            self._has_arguments = True
            if character not in '{"n':
                return "expected an object of arguments"
            self._capture = "arguments" if character == "{" else "text"
            self._waiting = []
        return ""

    def _member_ended(self, events: list[OutputEvent]) -> str:
        capture, self._capture = self._capture, ""
        value = "".join(self._value)
        if capture == "name":
            name = _decoded_string(value)
            if not name or name.split() != [name]:
                return "expected the name of a tool"
            self._begun = True
            self.output.tool = name
            self.output.begin_call(events)
            if self._waiting and self.output.in_call:
                events.append(ToolCallArguments("".join(self._waiting)))
        elif capture == "text":  # JSON in a string, or null
            arguments = "{}" if value == "null" else (_decoded_string(value) or "").strip(_SPACE)
            if not is_json(arguments, "{"):
                return "expected an object of arguments"
            if self._begun:
                events.append(ToolCallArguments(arguments))
            else:
                self._waiting = [arguments]
        return ""

    def _call_ended(self, events: list[OutputEvent], at: int) -> str:
        if not self._begun:
            return f"expected a member {' or '.join(self.name_keys)}"
        if not self._has_arguments:
            events.append(ToolCallArguments("{}"))
        self.output.end_call(events, at)
        self._count += 1
        self._next_call()
        return ""

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """End the calls."""
        if not self._ended:
            reason = "the output ended inside it" if cut else "it is not complete"
            self.output.fail_call(reason, events)


def is_json(text: str, first: str = "") -> bool:
    """Return whether a text is a JSON value that begins with `first`, and nothing else."""
    json = JsonText()
    at, _ = json.feed(text)
    return at == len(text) and json.is_done and text.startswith(first)


def arguments_format(tool: str, schema: Mapping[str, Any]) -> JsonSchemaFormat:
    """Return the grammar of a call's arguments as a JSON object.

    Raises:
        ValueError: the schema is of something else.
    """
    types = schema.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        raise ValueError(f"the tool {tool!r}: expected a schema of an object, got type {types!r}")
    return JsonSchemaFormat(json_schema={**schema, "type": "object"})


def call_as_json(
    tool: str, schema: Mapping[str, Any], *, arguments: str = "arguments"
) -> SequenceFormat:
    """Return the grammar of a call as a JSON object: a name and arguments, as `JsonCalls` reads.

    Args:
        tool: its name.
        schema: of its arguments.
        arguments: name of the member that has them.

    Raises:
        ValueError: the schema is not of an object.
    """
    head = f'{{"name": {quoted(tool)}, {quoted(arguments)}: '
    given = arguments_format(tool, schema)
    return SequenceFormat(
        elements=[ConstStringFormat(value=head), given, ConstStringFormat(value="}")]
    )


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema, or what it refers to in the schema that it is part of.

    A reference to something else is returned as it is; so is one with other keywords.
    """
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return schema
        others = restrictions(schema)
        if others == {"$ref"} and str(schema["$ref"]).startswith("#"):
            schema = _at(root, str(schema["$ref"]), schema)
        elif others == {"allOf"} and len(schema["allOf"]) == 1:
            schema = schema["allOf"][0]
        else:
            return schema
    return schema


def _at(root: Mapping[str, Any], pointer: str, otherwise: Any) -> Any:
    """Return what a JSON pointer (RFC 6901) with a leading # refers to."""
    found: Any = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return otherwise
        found = found[name]
    return found


_ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)


def restrictions(schema: Mapping[str, Any]) -> set[str]:
    """Return the keywords of a schema that may refuse a value; the others only describe it."""
    return {name for name in schema if name not in _ANNOTATIONS and not name.startswith("x-")}


def named_types(schema: object) -> set[str]:
    """Return the types that a parameter's schema names at its top; none if it leaves them open."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named or ())
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            types |= named_types(choice)
    return types


_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {"{": "object", "[": "array", '"': "text", "t": "boolean", "f": "boolean", "n": "null"}


def json_value(text: str, schema: object = None) -> str:
    """Return the JSON of a value that a model wrote as it likes.

    It is the text itself if that is JSON of a type that the schema names, or of any type without a
    schema; `True`, `False` and `None` are Python's for it. Else it is the text as a string.

    Args:
        text: of the value.
        schema: JSON schema of the value; None leaves its type open.
    """
    types = named_types(schema)
    found = text.strip()
    if "string" not in types:
        found = _WORDS.get(found, found)
    if (types and types <= {"string"}) or not is_json(found):
        return quoted(text)
    kind = _TYPES.get(found[0], "number" if set(".eE") & set(found) else "integer")
    wanted = {*types, "integer"} if "number" in types else types
    return quoted(text) if "string" in types and kind not in wanted else found


def quoted(text: str) -> str:
    """Return a text as a JSON string; half of a surrogate pair becomes a question mark."""
    return msgspec.json.encode(text.encode(errors="replace").decode()).decode()
