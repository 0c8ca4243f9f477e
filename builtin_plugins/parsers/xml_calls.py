"""Tool calls whose arguments are tags: one for each parameter."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hardpoint.plugins.output_format import (
    Between,
    Body,
    Content,
    FormatParser,
    Ignored,
    OpenOutput,
    Reasoning,
    State,
    ToolName,
)
from hardpoint.plugins.output_json import is_json
from hardpoint.plugins.output_parser import (
    OutputEvent,
    ToolCallArguments,
)


class Qwen3Coder(FormatParser):
    """Qwen3-Coder: calls with a tag for each parameter.

    `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`. A value is
    text where the tool's schema says so, else JSON if it is. It ends at `</parameter>`; where the
    model forgets that, at a line that begins with `<parameter=` or `</function>`.
    """

    contract = 1
    roles = ("tools",)
    template_marks = ("<tool_call>", "<function=", "<parameter=")

    def states(self) -> Mapping[str, State]:
        """Return content and the parts of a call."""
        content = {"<tool_call>": "call"}
        return {"content": State(Content, content), **_call_states("</tool_call>", content)}


class SeedOss(FormatParser):
    """Seed-OSS: reasoning in `<seed:think>`, calls in `<seed:tool_call>` as in `qwen3_coder`."""

    contract = 1
    roles = ("reasoning", "tools")
    template_marks = ("<seed:tool_call>",)
    reasoning = "thinking"

    def states(self) -> Mapping[str, State]:
        """Return content, thinking, and the parts of a call."""
        content = {"<seed:think>": "thinking", "<seed:tool_call>": "call"}
        return {
            "content": State(Content, content),
            "thinking": State(Reasoning, {"</seed:think>": "content"}),
            **_call_states("</seed:tool_call>", content),
        }


def _call_states(end: str, content: Mapping[str, str]) -> dict[str, State]:
    """Return the states of a call that the marker `end` ends, and of the content behind it."""
    value = {"</parameter>": "parameters", "\n</function>": "end", "\n<parameter=": "key"}
    return {
        "call": State(Between, {"<function=": "name", end: "content"}),
        "name": State(ToolName, {">": "opened"}),
        "opened": State(_Opened, {"<parameter=": "key", "</function>": "end", end: "after"}),
        "parameters": State(Ignored, {"<parameter=": "key", "</function>": "end", end: "after"}),
        "key": State(_Key, {">": "value"}),
        "value": State(_Value, value),
        "end": State(_End, {"<function=": "name", end: "content"}),
        "after": State(_After, content),
    }


class _Opened(Ignored):
    """Behind the name of a call."""

    def open(self, events: list[OutputEvent]) -> None:
        self.output.begin_call(events)
        self.output.notes["separator"] = "{"


class _Key(Body):
    """The name of a parameter."""

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._text = ""

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        self._text += text
        if len(self._text) > ToolName.longest:
            self.output.fail_call("the name of a parameter is too long", events)
        return len(text)

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:  # noqa: ARG002
        self.output.notes["key"] = self._text.strip()


class _Value(Body):
    """The value of a parameter, which is passed on when it is complete."""

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._parts: list[str] = []

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        self._parts.append(text)
        return len(text)

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        text = "".join(self._parts)
        if not cut:
            notes, key = self.output.notes, self.output.notes["key"]
            schema = self.output.request.tools.get(self.output.tool, {})
            properties = schema.get("properties")
            types = _types(properties.get(key) if isinstance(properties, Mapping) else None)
            value = _as_json(text.removeprefix("\n").removesuffix("\n"), types)
            events.append(ToolCallArguments(f"{notes['separator']}{_quoted(key)}: {value}"))
            notes["separator"] = ", "


class _End(Ignored):
    """Behind the last parameter of a call."""

    def open(self, events: list[OutputEvent]) -> None:
        if self.output.in_call:  # not of a call that failed
            separator = self.output.notes["separator"]
            events.append(ToolCallArguments("{}" if separator == "{" else "}"))
            self.output.end_call(events)


class _After(Content):
    """Content behind a call whose end tag is missing."""

    def open(self, events: list[OutputEvent]) -> None:
        _End.open(self, events)  # type: ignore[arg-type]


def _types(schema: object) -> set[str]:
    """Return the types that a parameter's schema names at its top; none if it leaves them open."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named or ())
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            types |= _types(choice)
    return types


_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {"{": "object", "[": "array", '"': "text", "t": "boolean", "f": "boolean", "n": "null"}


def _as_json(text: str, types: set[str]) -> str:
    """Return a parameter's text as JSON: as it is if it is JSON of a wanted type, else a string."""
    found = text.strip()
    if "string" not in types:
        found = _WORDS.get(found, found)
    if (types and types <= {"string"}) or not is_json(found):
        return _quoted(text)
    kind = _TYPES.get(found[0], "number" if set(".eE") & set(found) else "integer")
    wanted = {*types, "integer"} if "number" in types else types
    return _quoted(text) if "string" in types and kind not in wanted else found


def _quoted(text: str) -> str:
    return msgspec.json.encode(text.encode(errors="replace").decode()).decode()
