"""Tool calls whose name comes before their arguments, with special tokens between."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.plugins import OutputEvent
from hardpoint.plugins.output_format import (
    Body,
    Content,
    FormatParser,
    Ignored,
    Reasoning,
    State,
    ToolName,
)
from hardpoint.plugins.output_json import JsonArguments, JsonCalls


class KimiK2(FormatParser):
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

    contract = 1
    roles = ("tools",)
    needs_special_tokens = True

    def states(self) -> Mapping[str, State]:
        """Return content, section, name and arguments."""
        return {
            "content": State(Content, {"<|tool_calls_section_begin|>": "section"}),
            "section": State(
                Ignored, {"<|tool_call_begin|>": "name", "<|tool_calls_section_end|>": "content"}
            ),
            "name": State(_KimiName, {"<|tool_call_argument_begin|>": "arguments"}),
            "arguments": State(JsonArguments, {"<|tool_call_end|>": "section"}),
        }


class _KimiName(ToolName):
    """`functions.NAME:INDEX`, which is also the call's id."""

    def parse(self, text: str) -> tuple[str, str | None]:
        call_id = text.strip()
        name = call_id.rpartition(":")[0] or call_id
        return name.removeprefix("functions."), call_id or None


class DeepSeekV3(FormatParser):
    """DeepSeek-V3 and R1: the kind of tool, its name, and the arguments in a block of code."""

    contract = 1
    roles = ("tools",)
    needs_special_tokens = True

    def states(self) -> Mapping[str, State]:
        """Return content, section, kind, name and arguments."""
        section = {"<｜tool▁call▁begin｜>": "kind", "<｜tool▁calls▁end｜>": "content"}
        return {
            "content": State(Content, {"<｜tool▁calls▁begin｜>": "section"}),
            "section": State(Ignored, section),
            "kind": State(Ignored, {"<｜tool▁sep｜>": "name"}),
            "name": State(ToolName, {"\n```json\n": "arguments"}),
            "arguments": State(JsonArguments, {"\n```": "end", "<｜tool▁call▁end｜>": "section"}),
            "end": State(Ignored, {"<｜tool▁call▁end｜>": "section"}),
        }


class DeepSeekV31(FormatParser):
    """DeepSeek-V3.1 and later: the name, then the arguments."""

    contract = 1
    roles = ("tools",)
    needs_special_tokens = True

    def states(self) -> Mapping[str, State]:
        """Return content, section, name and arguments."""
        section = {"<｜tool▁call▁begin｜>": "name", "<｜tool▁calls▁end｜>": "content"}
        return {
            "content": State(Content, {"<｜tool▁calls▁begin｜>": "section"}),
            "section": State(Ignored, section),
            "name": State(ToolName, {"<｜tool▁sep｜>": "arguments"}),
            "arguments": State(JsonArguments, {"<｜tool▁call▁end｜>": "section"}),
        }


class Mistral(FormatParser):
    """`[THINK]...[/THINK]`, and `[TOOL_CALLS]` with a list of calls, or a name and arguments."""

    contract = 1
    roles = ("reasoning", "tools")
    reasoning = "thinking"
    needs_special_tokens = True

    def states(self) -> Mapping[str, State]:
        """Return content, thinking, and the two forms of calls."""
        calls = {"[TOOL_CALLS]": "first"}
        return {
            "content": State(Content, {"[THINK]": "thinking", **calls}),
            "thinking": State(Reasoning, {"[/THINK]": "content"}),
            "first": State(_MistralFirst, calls),
            "list": State(JsonCalls, calls, then="content"),
            "name": State(
                _MistralName,
                {"[ARGS]": "arguments", "[CALL_ID]": "id", **calls},
                then="arguments",
            ),
            "id": State(Ignored, {"[ARGS]": "arguments"}),
            "arguments": State(JsonArguments, calls),
        }


class _MistralFirst(Body):
    """Decides by the first character between a list and a name."""

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        space = len(text) - len(text.lstrip())
        if space < len(text):
            self.next = "list" if text[space] == "[" else "name"
        return space


class _MistralName(ToolName):
    ends_at = "{"


class Granite(FormatParser):
    """Granite 3.3: `<think>...</think><response>...</response>`, and `<|tool_call|>[...]`."""

    contract = 1
    roles = ("reasoning", "tools")
    reasoning = "thinking"

    def states(self) -> Mapping[str, State]:
        """Return content, thinking, and calls."""
        calls = {"<|tool_call|>": "calls", "<tool_call>": "call"}
        return {
            "content": State(
                Content,
                {"<think>": "thinking", "<response>": "content", "</response>": "content", **calls},
            ),
            "thinking": State(Reasoning, {"</think>": "content"}),
            "calls": State(JsonCalls, calls, then="content"),
            "call": State(JsonCalls, {"</tool_call>": "content"}),
        }
