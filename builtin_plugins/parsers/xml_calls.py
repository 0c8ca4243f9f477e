"""Tool calls whose arguments are tags: one for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hardpoint.plugins import OutputEvent, ToolCallArguments, ToolCallEnd
from hardpoint.plugins.output_format import (
    Body,
    Content,
    FormatParser,
    Ignored,
    OpenOutput,
    Reasoning,
    State,
    ToolName,
)


class Qwen3Coder(FormatParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    Qwen3-Coder writes it. A value is text where the tool's schema says so, else JSON if it is.
    """

    contract = 1
    roles = ("tools",)

    def states(self) -> Mapping[str, State]:
        """Return content and the parts of a call."""
        return {
            "content": State(Content, {"<tool_call>": "call"}),
            **call_states("</tool_call>"),
        }


class SeedOss(FormatParser):
    """Reasoning in `<seed:think>`, calls in `<seed:tool_call>` with tags as `qwen3_coder` has."""

    contract = 1
    roles = ("reasoning", "tools")
    reasoning = "thinking"

    def states(self) -> Mapping[str, State]:
        """Return content, thinking, and the parts of a call."""
        return {
            "content": State(Content, {"<seed:think>": "thinking", "<seed:tool_call>": "call"}),
            "thinking": State(Reasoning, {"</seed:think>": "content"}),
            **call_states("</seed:tool_call>"),
        }


def call_states(end: str) -> dict[str, State]:
    """Return the states of a call that the marker `end` ends."""
    return {
        "call": State(Ignored, {"<function=": "name", end: "content"}),
        "name": State(_Name, {">": "parameters"}),
        "parameters": State(_Parameters, {"<parameter=": "key", "</function>": "end", end: "content"}),
        "key": State(_Key, {">": "value"}),
        "value": State(_Value, {"</parameter>": "parameters", "</function>": "end"}),
        "end": State(_End, {"<function=": "name", end: "content"}),
    }


class _Name(ToolName):
    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        super().close(events, cut=cut)
        self.output.notes.pop("opened", None)


class _Parameters(Ignored):
    pass


class _Key(Body):
    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._text = ""

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        self._text += text
        return len(text)

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:  # noqa: ARG002
        self.output.notes["key"] = self._text.strip()


class _Value(Body):
    """A value: text is passed on as it comes, anything else when it is complete."""

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._key = output.notes.get("key", "")
        properties = output.request.tools.get(output.tool, {}).get("properties", {})
        schema: Mapping[str, Any] = properties.get(self._key, {})
        self._is_text = schema.get("type") == "string"
        self._parts: list[str] = []

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        self._parts.append(text)
        return len(text)

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        if cut:
            return
        text = "".join(self._parts).removeprefix("\n").removesuffix("\n")
        value: object = text
        if not self._is_text:
            try:
                value = msgspec.json.decode(text)
            except msgspec.DecodeError:
                value = text
        notes = self.output.notes
        opening = ", " if "opened" in notes else "{"
        notes["opened"] = "1"
        pair = f"{_json(self._key)}: {_json(value)}"
        events.append(ToolCallArguments(opening + pair))


class _End(Ignored):
    """Behind the last parameter."""

    def open(self, events: list[OutputEvent]) -> None:
        events.append(ToolCallArguments("}" if "opened" in self.output.notes else "{}"))
        events.append(ToolCallEnd())


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
