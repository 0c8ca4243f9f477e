"""Formats with calls as JSON between two markers: rows of a table, and their reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from hardpoint.plugins import ReasoningMarkers
from hardpoint.plugins.output_parser import ContentText, OutputEvent
from hardpoint.plugins.structured import Format, RegexFormat
from hardpoint.toolkit.parsing.format_parser import (
    AfterCall,
    BeforeAnswer,
    Beginning,
    Body,
    Content,
    FormatParser,
    OpenOutput,
    ParserState,
    Reasoning,
    any_tag,
    choice_of_calls,
    repeated,
)
from hardpoint.toolkit.parsing.json_text import (
    JsonCalls,
    arguments_format,
    call_as_json,
    quoted,
)


class JsonSections(FormatParser):
    """Calls in JSON between two markers. A format is a subclass that fills in the attributes.

    Attributes:
        sections: the markers around calls: their ends by their beginnings. A bracket that ends a
            beginning is part of the JSON.
        calls: reads the JSON.
        list_text: text before, between and behind the calls of a section, in a grammar: of a
            list, or of objects one after another. None where each call has a section, in which it
            has a line of its own.
        thinking: the markers around reasoning; none in a parser of tools only.
        answers: the markers around the answer behind it. White space next to them is left out.
    """

    sections: ClassVar[Mapping[str, str]]
    calls: ClassVar[type[JsonCalls]] = JsonCalls
    list_text: ClassVar[tuple[str, str, str] | None] = ("[", ", ", "]")
    thinking: ClassVar[tuple[str, str] | None] = None
    answers: ClassVar[Mapping[str, str]] = {}

    def states(self) -> Mapping[str, ParserState]:
        """Return content, calls, and where there are such, thinking and answer."""
        calls = {text: "list" if text.endswith("[") else "calls" for text in self.sections}
        answers = dict.fromkeys(self.answers, "answer")
        answer_ends = dict.fromkeys(self.answers.values(), "behind")
        ends = {**dict.fromkeys(filter(None, self.sections.values()), "behind"), **answer_ends}
        states = {}
        think = {} if self.thinking is None else {self.thinking[0]: "thinking"}
        if answers:  # the first state: an answer may come without thinking
            states["before"] = ParserState(_BeforeAnswer, {**think, **answers, **calls})
            states["between"] = ParserState(_BeforeAnswer, {**answers, **calls})
            states["answer"] = ParserState(_Answer, {**answer_ends, **calls})
        elif think:
            states["start"] = ParserState(BeforeAnswer, {**think, **calls})
        states["content"] = ParserState(Content, calls)
        if self.thinking is not None:
            to = "between" if answers else "content"
            states["thinking"] = ParserState(Reasoning, {self.thinking[1]: to})
        is_list = self.list_text is not None and self.list_text[0].startswith("[")
        after = "behind" if is_list else None  # text behind a list is none of calls
        return {
            **states,
            "calls": ParserState(self.calls, ends, then=after),
            "list": ParserState(self._in_list, ends, then=after),
            "behind": ParserState(AfterCall, {**answers, **calls, **ends}),
        }

    def _in_list(self, output: OpenOutput) -> Body:
        body = self.calls(output)
        body.feed("[", [])
        return body

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of text with calls in it."""
        call = choice_of_calls(tools, self.call)
        formats = []
        for begin, end in self.sections.items():
            if self.list_text is None:
                calls: Format = self.sequence("\n", call, "\n")
            else:
                first, between, last = self.list_text
                first = first.removeprefix("[") if begin.endswith("[") else first
                calls = self.sequence(first, repeated(call, between, parallel=parallel), last)
            several = parallel and self.list_text is None
            formats.append(
                self.tagged(begin, calls, end, required=required, parallel=several, separator="\n")
            )
        return formats[0] if len(formats) == 1 else any_tag(*formats, parallel=False)

    def call(self, tool: str, schema: Mapping[str, Any]) -> Format:
        """Return the grammar of a call."""
        return call_as_json(tool, schema)


class _BeforeAnswer(Beginning):
    """White space before an answer; without a marker, it is the beginning of the answer."""

    is_call = False
    begins: ClassVar[Mapping[str, str]] = {}


class _Answer(Content):
    """An answer between two markers, without the white space next to them."""

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._has_begun = False
        self._space: list[str] = []  # at the end of the text

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        stripped = text.rstrip()
        if stripped:
            begun = stripped if self._has_begun else stripped.lstrip()
            events.append(ContentText("".join([*self._space, begun])))
            self._has_begun, self._space = True, []
        if self._has_begun:
            self._space.append(text[len(stripped) :])
        return len(text)


class Hermes(JsonSections):
    """Hermes 2, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    `parameters` may replace `arguments`, and either may precede the name. A marker inside a
    JSON string is part of the string.
    """

    contract = 2
    roles = ("tools",)
    template_marks = ("<tool_call>", '"arguments"')
    sections = {"<tool_call>": "</tool_call>"}
    list_text = None


class Ernie45(JsonSections):
    """ERNIE 4.5: `<think>...</think><response>...</response>`, and calls as in `hermes`.

    `<response>` is a tag only at the beginning or after the reasoning. White space next to the
    tags of the answer is left out.
    """

    contract = 2
    roles = ("reasoning", "tools")
    template_marks = ("<think>", "<response>", "<tool_call>")
    reasoning = "thinking"
    sections = {"<tool_call>": "</tool_call>"}
    list_text = None
    thinking = ("<think>", "</think>")
    answers = {"<response>": "</response>"}


class Hunyuan(JsonSections):
    """Hunyuan A13B: `<think>...</think><answer>...</answer>`, and a list of calls.

    Calls are `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`.

    White space next to the tags of the answer is left out.
    """

    contract = 2
    roles = ("reasoning", "tools")
    template_marks = ("<think>", "</think>", "<tool_calls>")
    reasoning = "thinking"
    sections = {"<tool_calls>": "</tool_calls>"}
    thinking = ("<think>", "</think>")
    answers = {"<answer>": "</answer>"}


class Jamba(JsonSections):
    """Jamba: `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`.

    The end tag may be missing.
    """

    contract = 2
    roles = ("tools",)
    template_marks = ("<tool_calls>",)
    sections = {"<tool_calls>": "</tool_calls>"}


class Nemotron(JsonSections):
    """Nemotron up to Nano 2: `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`.

    Nemotron 3 writes the calls of `qwen3_coder`.
    """

    contract = 2
    roles = ("tools",)
    other_names = ("llama_nemotron_json", "nemotron_json", "nemotron_nano_v2")
    template_marks = ("<TOOLCALL>",)
    sections = {"<TOOLCALL>": "</TOOLCALL>"}


class Phi4Mini(JsonSections):
    """Phi-4-mini: `functools[{"name": ..., "arguments": {...}}]`, or the list in a tag.

    The tag is `<|tool_call|>...<|/tool_call|>`; in it, there may be an object as well.
    """

    contract = 2
    roles = ("tools",)
    other_names = ("phi4_mini_json",)
    template_marks = ("<|tool|>", "<|/tool|>")
    sections = {"functools[": "", "<|tool_call|>": "<|/tool_call|>"}


class MiniMax(JsonSections):
    """MiniMax-M1: calls as in `hermes`, a line each, between `<tool_calls>` and `</tool_calls>`.

    A line may hold a list of calls. The end tag may be missing at the end of the output; text
    between calls is malformed.
    """

    contract = 2
    roles = ("tools",)
    template_marks = ("tool_setting=tools", "<tool_calls>")
    sections = {"<tool_calls>": "</tool_calls>"}
    list_text = ("\n", "\n", "\n")


class Longcat(JsonSections):
    """LongCat-Flash: calls as in `hermes`, in `<longcat_tool_call>`."""

    contract = 2
    roles = ("tools",)
    template_marks = ("<longcat_tool_call>",)
    sections = {"<longcat_tool_call>": "</longcat_tool_call>"}
    list_text = None


class _CohereCalls(JsonCalls):
    name_keys = ("tool_name",)


class Cohere(JsonSections):
    """Command R7B and A: reasoning, answer and a list of calls, each between two tokens.

    `<|START_THINKING|>`, `<|START_RESPONSE|>` (later `<|START_TEXT|>`) and
    `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]`, each with its
    end. The ids begin at 0 in each conversation, so calls get others.

    Citations (`<co>...</co: 0:[0]>`) stay in the content. Requests with tools use the chat
    template `tool_use`.
    """

    contract = 2
    roles = ("reasoning", "tools")
    other_names = ("cohere_command3", "cohere_command4")
    template_marks = ("<|START_THINKING|>", "<|START_ACTION|>")
    reasoning = "thinking"
    required_tokens = (
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
    )
    sections = {"<|START_ACTION|>": "<|END_ACTION|>"}
    calls = _CohereCalls
    list_text = ("[\n    ", ",\n    ", "\n]")
    thinking = ("<|START_THINKING|>", "<|END_THINKING|>")
    answers = {f"<|START_{name}|>": f"<|END_{name}|>" for name in ("RESPONSE", "TEXT")}

    def markers(self) -> ReasoningMarkers:
        """Return the tokens of reasoning, and the token that begins an answer."""
        special = self.context.tokenizer.special_tokens
        begin = next((begin for begin in self.answers if begin in special), "")
        prefix = self.encoded(begin)[0] if begin else ()
        return msgspec.structs.replace(super().markers(), content_prefix=prefix)

    def call(self, tool: str, schema: Mapping[str, Any]) -> Format:
        """Return the grammar of a call, which begins with its id."""
        return self.sequence(
            '{"tool_call_id": "',
            RegexFormat(pattern="0|[1-9][0-9]{0,5}"),
            f'", "tool_name": {quoted(tool)}, "parameters": ',
            arguments_format(tool, schema),
            "}",
        )
