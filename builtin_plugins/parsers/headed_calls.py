"""Tool calls with the name before the arguments, with special tokens between."""

# ruff: noqa: RUF001 - the markers of DeepSeek are written so

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from hardpoint.plugins.output_parser import (
    OutputEvent,
)
from hardpoint.plugins.structured import (
    ConstStringFormat,
    Format,
    OptionalFormat,
    RegexFormat,
    SequenceFormat,
)
from hardpoint.toolkit.parsing.format_parser import (
    AfterCall,
    BeforeAnswer,
    Between,
    Body,
    Content,
    FormatParser,
    Kind,
    ParserState,
    Reasoning,
    ToolName,
    any_tag,
    choice_of_calls,
    repeated,
)
from hardpoint.toolkit.parsing.json_text import (
    JsonArguments,
    JsonCalls,
    arguments_format,
    call_as_json,
)


class KimiK2(FormatParser):
    """Kimi K2: a section of calls, each with its id and its arguments.

    `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`

    The model is known to write the markers of the section in the singular, or to leave them out.

    The id of a call is kept. An id that a client has changed, such as
    `functions_get_weather_0`, names the tool too. Arguments may be a JSON string of the object.
    """

    contract = 2
    roles = ("tools",)
    template_marks = ("<|tool_calls_section_begin|>",)
    required_tokens = (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )

    def states(self) -> Mapping[str, ParserState]:
        """Return content, section, name and arguments."""
        call = {"<|tool_call_begin|>": "name"}
        begins = {**dict.fromkeys((begin for begin, _ in _KIMI_SECTIONS), "section"), **call}
        ends = dict.fromkeys((end for _, end in _KIMI_SECTIONS), "behind")
        return {
            "content": ParserState(Content, begins),
            "section": ParserState(Between, {**call, **ends}),
            "name": ParserState(_KimiName, {"<|tool_call_argument_begin|>": "arguments"}),
            "arguments": ParserState(JsonArguments, {"<|tool_call_end|>": "next"}),
            "next": ParserState(AfterCall, {**begins, **ends}),
            "behind": ParserState(AfterCall, begins),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of a section of calls, or of text with one at its end."""

        def call(tool: str, schema: Mapping[str, Any], *, is_alone: bool = False) -> Format:
            return self.sequence(
                "" if is_alone else "<|tool_call_begin|>",
                f"functions.{tool}:",
                RegexFormat(pattern="0|[1-9][0-9]{0,5}"),
                "<|tool_call_argument_begin|>",
                arguments_format(tool, schema),
                "" if is_alone else "<|tool_call_end|>",
            )

        calls = choice_of_calls(tools, call)
        section, *others = (
            self.tagged(
                begin,
                repeated(calls, parallel=parallel),
                end,
                required=required,
                parallel=False,
            )
            for begin, end in _KIMI_SECTIONS
            if begin in self.context.tokenizer.special_tokens
        )
        if required:
            return section
        alone = self.tagged(
            "<|tool_call_begin|>",
            choice_of_calls(tools, lambda tool, schema: call(tool, schema, is_alone=True)),
            "<|tool_call_end|>",
            required=False,
            parallel=False,
        )
        return any_tag(section, *others, alone, parallel=False)


_KIMI_SECTIONS = (
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
)


class _KimiName(ToolName):
    """`functions.NAME:INDEX`, which is also the call's id.

    The model repeats ids as clients have changed them: `functions_NAME_INDEX` is known by the names
    of the request's tools.
    """

    def parse(self, text: str) -> tuple[str, str | None]:
        call_id, tools = text.strip(), self.output.request.tools
        name = (call_id.rpartition(":")[0] or call_id).removeprefix("functions.")
        changed = _KIMI_ID.fullmatch(call_id)
        if changed and name not in tools and changed["tool"] in tools:
            name = changed["tool"]
        return name, call_id or None


_KIMI_ID = re.compile(r"(?:functions[._:-])?(?P<tool>.+?)(?:[._:-]\d+)?")


class _DeepSeek(FormatParser):
    """Base class: a section of calls, each with the name before the arguments.

    Attributes:
        around: text before the name, between name and arguments, and after the arguments.
        separator: text between calls.
    """

    contract = 2
    roles = ("tools",)
    required_tokens = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )
    around: ClassVar[tuple[str, str, str]]
    separator: ClassVar[str] = ""

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of a section of calls, or of text with one at its end."""
        before, between, after = self.around

        def call(tool: str, schema: Mapping[str, Any]) -> Format:
            return self.sequence(f"{before}{tool}{between}", arguments_format(tool, schema), after)

        return self.tagged(
            "<｜tool▁calls▁begin｜>",
            repeated(choice_of_calls(tools, call), self.separator, parallel=parallel),
            "<｜tool▁calls▁end｜>",
            required=required,
            parallel=False,
        )


class DeepSeekV3(_DeepSeek):
    """DeepSeek-V3 and R1: the kind of tool, its name, and the arguments in a block of code."""

    contract = 2
    template_marks = ("<｜tool▁calls▁begin｜>", "```json")
    around = (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
    )
    separator = "\n"

    def states(self) -> Mapping[str, ParserState]:
        """Return content, section, kind, name and arguments."""
        section = {"<｜tool▁call▁begin｜>": "kind", "<｜tool▁calls▁end｜>": "content"}
        return {
            "content": ParserState(Content, {"<｜tool▁calls▁begin｜>": "section"}),
            "section": ParserState(Between, section),
            "kind": ParserState(Kind, {"<｜tool▁sep｜>": "name"}),
            "name": ParserState(ToolName, {"\n```json\n": "arguments"}),
            "arguments": ParserState(
                JsonArguments, {"\n```": "end", "<｜tool▁call▁end｜>": "section"}
            ),
            "end": ParserState(Between, {"<｜tool▁call▁end｜>": "section"}),
        }


class DeepSeekV31(_DeepSeek):
    """DeepSeek-V3.1 and later: the name, then the arguments."""

    contract = 2
    other_names = ("deepseek_v31",)
    template_marks = ("<｜tool▁calls▁begin｜>",)
    around = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")

    def states(self) -> Mapping[str, ParserState]:
        """Return content, section, name and arguments."""
        section = {"<｜tool▁call▁begin｜>": "name", "<｜tool▁calls▁end｜>": "content"}
        return {
            "content": ParserState(Content, {"<｜tool▁calls▁begin｜>": "section"}),
            "section": ParserState(Between, section),
            "name": ParserState(ToolName, {"<｜tool▁sep｜>": "arguments"}),
            "arguments": ParserState(JsonArguments, {"<｜tool▁call▁end｜>": "section"}),
        }


class MistralParser(FormatParser):
    """Mistral: `[THINK]...[/THINK]`, and `[TOOL_CALLS]` with calls in two forms.

    Up to Mistral Small 3.1 a list, `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`; later the
    name first, `[TOOL_CALLS]NAME[ARGS]{...}`, with `[CALL_ID]ID` between in some models.
    """

    contract = 2
    roles = ("reasoning", "tools")
    template_marks = ("[TOOL_CALLS]",)
    reasoning = "thinking"
    required_tokens = ("[TOOL_CALLS]",)

    def states(self) -> Mapping[str, ParserState]:
        """Return content, thinking, and the two forms of calls."""
        calls = {"[TOOL_CALLS]": "first"}
        head = {"[CALL_ID]": "id", "[ARGS]": "arguments"}
        return {
            "start": ParserState(BeforeAnswer, {"[THINK]": "thinking", **calls}),
            "content": ParserState(Content, calls),
            "thinking": ParserState(Reasoning, {"[/THINK]": "content"}),
            "first": ParserState(_MistralFirst, calls),
            "list": ParserState(JsonCalls, calls, then="content"),
            "name": ParserState(_MistralName, head, then="arguments"),
            "id": ParserState(_MistralId, {"[ARGS]": "arguments"}, then="arguments"),
            "arguments": ParserState(JsonArguments, calls),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of text with calls at its end.

        They have the form with `[ARGS]` where the tokenizer has it as a special token.
        """
        if "[ARGS]" in self.context.tokenizer.special_tokens:
            call = choice_of_calls(tools, self._call)
            calls = repeated(call, "[TOOL_CALLS]", parallel=parallel)
        else:
            call = choice_of_calls(tools, call_as_json)
            calls = self.sequence(RegexFormat(pattern=" ?"), _list(call, parallel=parallel))
        return self.tagged("[TOOL_CALLS]", calls, required=required, parallel=False)

    def _call(self, tool: str, schema: Mapping[str, Any]) -> Format:
        call_id: list[Format] = []
        if "[CALL_ID]" in self.context.tokenizer.special_tokens:
            format = self.sequence("[CALL_ID]", RegexFormat(pattern="[a-zA-Z0-9]{9}"))
            call_id = [OptionalFormat(content=format)]
        return self.sequence(tool, *call_id, "[ARGS]", arguments_format(tool, schema))


Mistral = MistralParser
"""Name in the entry points, which journals record."""


def _list(call: Format, *, parallel: bool) -> Format:
    calls = repeated(call, ", ", parallel=parallel)
    return SequenceFormat(
        elements=[ConstStringFormat(value="["), calls, ConstStringFormat(value="]")]
    )


class _MistralFirst(Body):
    """Decides by the first character between a list and a name."""

    is_start = True

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        space = len(text) - len(text.lstrip())
        if space < len(text):
            self.next = "list" if text[space] == "[" else "name"
        return space


class _MistralName(ToolName):
    ends_at = "{"


class _MistralId(ToolName):
    """The id of a call, after its name."""

    is_start = False
    ends_at = "{"

    def parse(self, text: str) -> tuple[str, str | None]:
        return self.output.tool, text.strip() or None


class GraniteParser(FormatParser):
    """Granite: `<think>...</think><response>...</response>` of 3.3, and the calls of 3.0 to 4.0.

    Calls are `<|tool_call|>[{"name": ..., "arguments": {...}}]`, in Granite 4
    `<tool_call>{...}</tool_call>`.
    """

    contract = 2
    roles = ("reasoning", "tools")
    other_names = ("granite4",)
    template_marks = ("<|tool_call|>", "<response>")
    reasoning = "thinking"

    def states(self) -> Mapping[str, ParserState]:
        """Return content, thinking, the answer behind it, and calls."""
        calls = {"<|tool_call|>": "calls", "<tool_call>": "call"}
        answer = {"<response>": "answer", "</response>": "answer", **calls}
        return {
            "start": ParserState(BeforeAnswer, {"<think>": "thinking", **calls}),
            "content": ParserState(Content, calls),
            "thinking": ParserState(Reasoning, {"</think>": "answer"}),
            "answer": ParserState(Content, answer),
            "calls": ParserState(JsonCalls, calls, then="answer"),
            "call": ParserState(JsonCalls, {"</tool_call>": "behind"}),
            "behind": ParserState(AfterCall, answer),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls in either form, or of text with calls in it."""
        call = choice_of_calls(tools, call_as_json)
        calls = self.tagged(
            "<|tool_call|>", _list(call, parallel=parallel), required=required, parallel=False
        )
        tagged = self.tagged(
            "<tool_call>",
            self.sequence("\n", call, "\n"),
            "</tool_call>",
            required=required,
            parallel=parallel,
            separator="\n",
        )
        return any_tag(calls, tagged, parallel=parallel)


Granite = GraniteParser
"""Name in the entry points, which journals record."""


class Granite32(FormatParser):
    """Granite 3.2: reasoning and answer begin with a sentence each; calls are as in `granite`.

    `Here is my thought process:` and `Here is my response:`

    Both sentences are ordinary text: a user who writes them can end the reasoning.
    """

    contract = 2
    roles = ("reasoning", "tools")
    template_marks = ("Here is my thought process:",)
    reasoning = "thinking"

    def states(self) -> Mapping[str, ParserState]:
        """Return content, thinking, and calls."""
        calls = {"<|tool_call|>": "calls"}
        return {
            "start": ParserState(
                BeforeAnswer, {"Here is my thought process:": "thinking", **calls}
            ),
            "content": ParserState(Content, calls),
            "thinking": ParserState(Reasoning, {"Here is my response:": "content"}),
            "calls": ParserState(JsonCalls, calls, then="content"),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of a list of calls, or of text with one in it."""
        calls = _list(choice_of_calls(tools, call_as_json), parallel=parallel)
        return self.tagged("<|tool_call|>", calls, required=required, parallel=False)
