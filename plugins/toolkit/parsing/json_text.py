"""Tool calls in JSON, as bodies of an output format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hardpoint.plugins.output_parser import OutputEvent, ToolCallArguments
from hardpoint.plugins.structured import ConstStringFormat, JsonSchemaFormat, SequenceFormat

from .format_parser import Body, OpenOutput
from .json_scanner import SPACE, JsonText, Stop, decoded_string, is_json
from .json_values import json_value, named_types, quoted, resolved, restrictions

__all__ = [
    "JsonArguments",
    "JsonCalls",
    "JsonText",
    "arguments_format",
    "call_as_json",
    "json_value",
    "named_types",
    "quoted",
    "resolved",
    "restrictions",
]


_IGNORED = frozenset({"id", "index", "tool_call_id", "type"})
"""Members of calls that are neither name nor arguments, and are left out without a warning."""


def arguments_in(value: str) -> str | None:
    """Return the JSON object of arguments that are written as a JSON string or null.

    Null and an empty string are not arguments; None is another value.
    """
    if value == "null":
        return "{}"
    text = decoded_string(value)
    if text is None:
        return None
    text = text.strip(SPACE) or "{}"
    return text if is_json(text, "{") else None


class JsonArguments(Body):
    """The arguments of the call of `output.tool`, as a JSON object.

    They may be a JSON string that holds the object, null, or nothing.
    """

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._json = JsonText()
        self._is_open = False  # whether the value has begun
        self._whole: list[str] | None = None  # of a string or null

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
        """Emit the JSON text; nothing once the call has failed."""
        if not self.output.in_call:
            return len(text)
        start, stop = 0, None
        if not self._is_open:
            start = len(text) - len(text.lstrip(SPACE))
            if start == len(text):
                return start
            self._is_open = True
            stop = None if text[start] in '{"n' else Stop.ERROR
            self._whole = None if text[start] == "{" else []
        at = start
        if stop is None:
            at, stop = self._json.feed(text, start)
        if self._whole is not None:
            self._whole.append(text[start:at])
        elif at > start:
            events.append(ToolCallArguments(text[start:at]))
        if stop is Stop.DONE:
            at += len(text[at:]) - len(text[at:].lstrip(SPACE))
        if at < len(text):
            self.output.fail_call(self._json_reason(), events)
        return len(text)

    def _json_reason(self) -> str:
        return f"its arguments are no JSON object: expected {self._json.expected}"

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """End the call."""
        is_empty = not (self._is_open or cut) and self.output.in_call
        if self._whole is not None or is_empty:
            value = "null" if is_empty else "".join(self._whole or ())
            arguments = arguments_in(value) if self._json.is_done or is_empty else None
            if arguments is not None:
                events.append(ToolCallArguments(arguments))
                self.output.end_call(events)
            elif not cut or self._json.is_done:
                self.output.fail_call("its arguments are no JSON object", events)
        elif self._json.is_done:
            self.output.end_call(events)
        elif not cut:
            self.output.fail_call(self._json_reason(), events)


class JsonCalls(Body):
    """Calls as a JSON object, or as a list of them.

    Attributes:
        name_keys: keys of the member that has the tool's name.
        argument_keys: keys of the member that has the arguments.
    """

    is_start = True
    name_keys: Collection[str] = ("name",)
    argument_keys: Collection[str] = ("arguments", "parameters")

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._json: JsonText | None = None
        self._is_list = False
        self._ended = False
        self._count = 0  # of complete calls
        self._next_call()

    def _next_call(self) -> None:
        self._capture = ""  # the next member: name, arguments, string or nothing
        self._value: list[str] = []  # of a member that is needed as a whole
        self._waiting: list[str] | None = None  # arguments that came before the name
        self._has_arguments = self._begun = False
        self._left_out: list[str] = []  # keys of other members

    @property
    def quotes(self) -> bool:
        """Whether a string is open."""
        return self._json is not None and self._json.in_string

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Give the calls as they come; end after the value."""
        at = len(text) - len(text.lstrip(SPACE)) if self._json is None or self._ended else 0
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
                return at + len(text[at:]) - len(text[at:].lstrip(SPACE))
        return at

    def _keep(self, piece: str, events: list[OutputEvent]) -> None:
        if self._capture == "arguments" and self._begun:
            events.append(ToolCallArguments(piece))
            return
        if self._capture == "arguments":
            assert self._waiting is not None
            self._waiting.append(piece)
        elif self._capture:
            self._value.append(piece)

    def _stopped(self, stop: Stop | None, text: str, at: int, events: list[OutputEvent]) -> str:
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
        elif self._json.key not in _IGNORED or character in "{[":
            self._left_out.append(self._json.key[:100])
        return ""

    def _member_ended(self, events: list[OutputEvent]) -> str:
        capture, self._capture = self._capture, ""
        value = "".join(self._value)
        if capture == "name":
            name = decoded_string(value)
            if not name or name.split() != [name]:
                return "expected the name of a tool"
            self._begun = True
            self.output.tool = name
            self.output.begin_call(events)
            if self._waiting and self.output.in_call:
                events.append(ToolCallArguments("".join(self._waiting)))
        elif capture == "text":  # JSON in a string, or null
            arguments = arguments_in(value)
            if arguments is None:
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
        name = self.output.tool
        self.output.end_call(events, at)
        if self._left_out:
            members = ", ".join(map(repr, self._left_out[:10]))
            self.output.warn(
                f"the call of {name!r} has members that are left out: {members}", events
            )
        self._count += 1
        self._next_call()
        return ""

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """End the calls."""
        if not self._ended:
            reason = "the output ended inside it" if cut else "it is not complete"
            self.output.fail_call(reason, events)


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
        schema: JSON schema of its arguments.
        arguments: name of the member that has them.

    Raises:
        ValueError: the schema is not of an object.
    """
    head = f'{{"name": {quoted(tool)}, {quoted(arguments)}: '
    grammar = arguments_format(tool, schema)
    return SequenceFormat(
        elements=[ConstStringFormat(value=head), grammar, ConstStringFormat(value="}")]
    )
