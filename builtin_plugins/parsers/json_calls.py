"""Tool calls that are JSON objects with a name and arguments."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.plugins.output_format import Beginning, Body, Content, FormatParser, State
from hardpoint.plugins.output_json import JsonCalls
from hardpoint.plugins.output_parser import (
    OutputEvent,
)


class Hermes(FormatParser):
    """Hermes 2, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    contract = 1
    roles = ("tools",)
    template_marks = ("<tool_call>", '"arguments"')

    def states(self) -> Mapping[str, State]:
        """Return content and call."""
        return {
            "content": State(Content, {"<tool_call>": "call"}),
            "call": State(JsonCalls, {"</tool_call>": "content"}),
        }


class Json(FormatParser):
    """Any model: an answer that is a JSON object with a name and arguments, or a list of them."""

    contract = 1
    roles = ("tools",)

    def states(self) -> Mapping[str, State]:
        """Return the first character's state, call and content."""
        return {
            "start": State(_First, {}),
            "content": State(Content, {}),
            "call": State(JsonCalls, {}, then="after"),
            "after": State(_Between, {}),
        }


class Llama3Json(Json):
    """Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, several separated by `;`."""

    contract = 1
    template_marks = ('"parameters": dictionary',)

    def states(self) -> Mapping[str, State]:
        """Return those of `json`, and the marker that may come first."""
        return {
            **super().states(),
            "start": State(_First, {"<|python_tag|>": "call"}),
            "content": State(Content, {"<|python_tag|>": "call"}),
        }


class _First(Beginning):
    begins = {"{": "call", "[": "call"}


class _Between(Body):
    """What may be between calls: white space and separators; else the rest is content."""

    is_start = True

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        rest = text.lstrip(" \t\r\n;,")
        if rest:
            self.next = "call" if rest[0] in "{[" else "content"
        return len(text) - len(rest)
