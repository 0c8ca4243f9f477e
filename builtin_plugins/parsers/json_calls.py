"""Tool calls that are JSON objects with a name and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from hardpoint.plugins.output_parser import (
    OutputEvent,
)
from hardpoint.plugins.structured import Format, OptionalFormat, OrFormat, RegexFormat
from hardpoint.toolkit.parsing.format_parser import (
    Beginning,
    Body,
    Content,
    FormatParser,
    State,
    choice_of_calls,
    repeated,
)
from hardpoint.toolkit.parsing.json_text import JsonCalls, call_as_json

from .values import text_without


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

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of text with calls in it."""
        call = self.sequence("\n", choice_of_calls(tools, call_as_json), "\n")
        return self.tagged(
            "<tool_call>",
            call,
            "</tool_call>",
            required=required,
            parallel=parallel,
            separator="\n",
        )


class Json(FormatParser):
    """Any model: an answer that is a JSON object with a name and arguments, or a list of them."""

    contract = 1
    roles = ("tools",)
    _arguments: ClassVar = "arguments"

    def states(self) -> Mapping[str, State]:
        """Return the first character's state, call and content."""
        return {
            "start": State(_First, {}),
            "content": State(Content, {}),
            "call": State(JsonCalls, {}, then="after"),
            "after": State(_Between, {}),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of them and text that does not begin so."""
        call = choice_of_calls(tools, partial(call_as_json, arguments=self._arguments))
        calls = self._calls(call, parallel=parallel)
        if required:
            return calls
        others = [text for state in self.states().values() for text in state.moves]
        special = self.context.tokenizer.special_tokens
        text = text_without(_TEXT, [text for text in others if text not in special])
        return OrFormat(elements=[self.sequence(RegexFormat(pattern=r"\s*"), calls), text])

    def _calls(self, call: Format, *, parallel: bool) -> Format:
        """Return the grammar of a call, or of it and a list of them."""
        if not parallel:
            return call
        return OrFormat(elements=[call, self.sequence("[", repeated(call, ", "), "]")])


class Llama3Json(Json):
    """Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, several separated by `;`."""

    contract = 1
    template_marks = ('"parameters": dictionary',)
    _arguments = "parameters"

    def states(self) -> Mapping[str, State]:
        """Return those of `json`, and the marker that may come first."""
        return {
            **super().states(),
            "start": State(_First, {"<|python_tag|>": "call"}),
            "content": State(Content, {"<|python_tag|>": "call"}),
        }

    def _calls(self, call: Format, *, parallel: bool) -> Format:
        """Return the grammar of calls, behind the marker or without it."""
        marker = OptionalFormat(content=self.sequence("<|python_tag|>"))
        return self.sequence(marker, repeated(call, "; ", parallel=parallel))


_TEXT = r"[\s\x1c-\x1f]*([^\s\x1c-\x1f{\[](?s:.*))?"
"""Text that begins no call. Python has more white space than regular expressions of Rust."""


class _First(Beginning):
    begins = {"{": "call", "[": "call"}


class _Between(Body):
    """Text between calls: white space and separators; else the rest is content."""

    is_start = True

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        rest = text.lstrip(" \t\r\n;,")
        if rest:
            self.next = "call" if rest[0] in "{[" else "content"
        return len(text) - len(rest)
