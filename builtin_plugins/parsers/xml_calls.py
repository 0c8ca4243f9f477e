"""Tool calls whose arguments are tags: one for each parameter."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.plugins.output_format import (
    Between,
    Content,
    FormatParser,
    Ignored,
    Reasoning,
    State,
    ToolName,
    Whole,
)
from hardpoint.plugins.output_json import json_value, quoted
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


class _Key(Whole):
    """The name of a parameter."""

    def finish(self, text: str, events: list[OutputEvent]) -> None:  # noqa: ARG002
        self.output.notes["key"] = text.strip()


class _Value(Whole):
    """The value of a parameter, which is passed on when it is complete."""

    def finish(self, text: str, events: list[OutputEvent]) -> None:
        notes, key = self.output.notes, self.output.notes["key"]
        properties = self.output.schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        value = json_value(text.removeprefix("\n").removesuffix("\n"), schema)
        events.append(ToolCallArguments(f"{notes['separator']}{quoted(key)}: {value}"))
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
