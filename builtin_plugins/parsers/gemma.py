"""The format of Gemma 4: a channel of thoughts, and calls with almost JSON arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hardpoint.plugins.output_parser import (
    OutputEvent,
    ToolCallArguments,
)
from hardpoint.plugins.structured import Format
from hardpoint.toolkit.parsing.format_parser import (
    AfterCall,
    Body,
    Content,
    FormatParser,
    OpenOutput,
    ParserState,
    Reasoning,
    ToolName,
    choice_of_calls,
)
from hardpoint.toolkit.parsing.json_text import JsonArguments, quoted

from .values import (
    LiteralGrammar,
    in_lark,
    length_pattern,
    parameters_of,
    unsupported,
)

_QUOTE = '<|"|>'


class Gemma(FormatParser):
    """Gemma 4: `<|channel>thought\\n...<channel|>` is reasoning, `<|tool_call>` begins calls.

    A call is `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:5}<tool_call|>`
    (https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4).

    The arguments of a call are returned as JSON. An end marker without a start marker is
    ignored.
    """

    contract = 2
    roles = ("reasoning", "tools")
    other_names = ("gemma4",)
    template_marks = ("<|tool_call>",)
    reasoning = "thinking"
    required_tokens = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", _QUOTE)

    def states(self) -> Mapping[str, ParserState]:
        """Return content, thinking, and the parts of a call."""
        content = {"<|channel>": "thinking", "<|tool_call>": "name"}
        ends = ("<channel|>", "<tool_call|>")  # no text, also where nothing began
        after = {**content, **dict.fromkeys(ends, "behind")}
        return {
            "content": ParserState(Content, {**content, **dict.fromkeys(ends, "content")}),
            "thinking": ParserState(_Thinking, {"<channel|>": "content"}),
            "name": ParserState(_Name, {"<tool_call|>": "bare"}, then="opened"),
            "bare": ParserState(_Bare, after),
            "opened": ParserState(_Opened, {_QUOTE: "text", "<tool_call|>": "end"}),
            "arguments": ParserState(_Arguments, {_QUOTE: "text", "<tool_call|>": "end"}),
            "text": ParserState(_Text, {_QUOTE: "arguments", "<tool_call|>": "end"}),
            "end": ParserState(_End, after),
            "behind": ParserState(AfterCall, after),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of text with calls in it.

        Arguments are in the order of the schema.
        """
        quote = f"<[{self.context.tokenizer.special_tokens[_QUOTE]}]>"

        def call(tool: str, schema: Mapping[str, Any]) -> Format:
            writer = _GemmaLiterals(tool, schema, quote)
            parameters = parameters_of(tool, schema)
            members = writer.members(parameters, [writer.key(name) for name, _, _ in parameters])
            return writer.grammar(f'{in_lark(f"call:{tool}{{")} {members} "}}"')

        return self.tagged(
            "<|tool_call>",
            choice_of_calls(tools, call),
            "<tool_call|>",
            required=required,
            parallel=parallel,
        )


class _GemmaLiterals(LiteralGrammar):
    """Names without quotes, and strings between two special tokens."""

    literals = {"true": '"true"', "false": '"false"', "null": '("null" | "None")'}

    def __init__(self, tool: str, schema: Mapping[str, Any], quote: str) -> None:
        super().__init__(tool, schema)
        self._quote = quote

    def string(self, schema: Mapping[str, Any]) -> str:
        if "pattern" in schema:
            raise unsupported(self.tool, "pattern")
        return f"{self._quote} /{length_pattern(schema)}/ {self._quote}"

    def constant(self, text: str) -> str:
        return f"{self._quote} {in_lark(text)} {self._quote}"

    def key(self, name: str) -> str:
        if not _KEY.fullmatch(name):
            raise ValueError(
                f"the tool {self.tool!r}: expected parameter names without white space, "
                f"brackets, commas and colons, got {name!r}"
            )
        return in_lark(f"{name}:")

    def any_key(self) -> str:
        return '/[A-Za-z_][A-Za-z0-9_.-]*/ ":"'


class _Thinking(Reasoning):
    """Reasoning behind the name of its channel."""

    _NAME = "thought\n"

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._head: str | None = ""  # the beginning, while it may be the name

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        if self._head is None:
            return super().feed(text, events)
        head = self._head + text
        if len(head) < len(self._NAME) and self._NAME.startswith(head):
            self._head = head
        else:
            self._head = None
            super().feed(head.removeprefix(self._NAME), events)
        return len(text)

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:  # noqa: ARG002
        if self._head and self._head != self._NAME.strip():
            super().feed(self._head, events)


class _Name(ToolName):
    ends_at = "{"

    def parse(self, text: str) -> tuple[str, str | None]:
        return text.strip().removeprefix("call:"), None


_KEY = re.compile(r"[^{}\[\],:\s]+")
_WORD = re.compile(r"[^{}\[\],:\s]+|[{}\[\],:]|\s+")
_WORDS = {"None": "null", "True": "true", "False": "false"}


class _Arguments(Body):
    """Arguments outside of text, made JSON: names of members get quotes."""

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._json: JsonArguments = output.notes["arguments"]
        self._word: list[str] = []

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        for word in _WORD.finditer(text):
            self._add(word.group(), events)
        return len(text)

    def _add(self, part: str, events: list[OutputEvent]) -> None:
        if part.isspace():
            return
        if part not in "{}[],:":
            self._word.append(part)
            return
        self._end_word(events, is_key=part == ":")
        self._json.feed(part, events)

    def _end_word(self, events: list[OutputEvent], *, is_key: bool = False) -> None:
        word, self._word = "".join(self._word), []
        if word:
            self._json.feed(quoted(word) if is_key else _WORDS.get(word, word), events)

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        if not cut:
            self._end_word(events)


class _Opened(_Arguments):
    """The beginning of the arguments."""

    def __init__(self, output: OpenOutput) -> None:
        output.notes["arguments"] = JsonArguments(output)
        super().__init__(output)

    def open(self, events: list[OutputEvent]) -> None:
        self._json.open(events)


class _Text(Body):
    """A text among the arguments."""

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._json: JsonArguments = output.notes["arguments"]

    def open(self, events: list[OutputEvent]) -> None:
        self._json.feed('"', events)

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        self._json.feed(quoted(text)[1:-1], events)
        return len(text)

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        if not cut:
            self._json.feed('"', events)


class _End(Body):
    """The end of a call, behind which content begins."""

    next = "behind"
    is_start = True

    def open(self, events: list[OutputEvent]) -> None:
        if self.output.in_call:
            arguments: JsonArguments = self.output.notes["arguments"]
            arguments.close(events, cut=False)
            self.output.failed = ""

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        return 0


class _Bare(_End):
    """The end of a call without arguments."""

    def open(self, events: list[OutputEvent]) -> None:
        self.output.begin_call(events)
        if self.output.in_call:
            events.append(ToolCallArguments("{}"))
            self.output.end_call(events)
