"""Harmony, the format of gpt-oss: messages with a channel and a recipient each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hardpoint.plugins import ReasoningMarkers
from hardpoint.plugins.output_parser import (
    ContentText,
    OutputEvent,
)
from hardpoint.plugins.structured import AnyTextFormat, Format, OrFormat
from hardpoint.toolkit.parsing.format_parser import (
    Between,
    Body,
    Content,
    FormatParser,
    OpenOutput,
    Reasoning,
    State,
    choice_of_calls,
)
from hardpoint.toolkit.parsing.json_text import JsonArguments, arguments_format

_TOOL = "to=functions."
_MESSAGE = "<|start|>assistant"
_FINAL = "<|channel|>final<|message|>"
_LONGEST = 512
_HEADER_WORD = re.compile(r"to=|(?:assistant|analysis|commentary|final|json)\Z")


class Harmony(FormatParser):
    """gpt-oss: messages with channels. `analysis` is reasoning, `functions.NAME` gets calls.

    A message is `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT<|constrain|>json<|message|>TEXT`
    and ends with `<|end|>`, `<|call|>` or `<|return|>`
    (https://cookbook.openai.com/articles/openai-harmony). Everything else is content. A message to
    another recipient, such as `browser.search`, is text of its channel: no tool of the request is
    meant.
    """

    contract = 2
    roles = ("reasoning", "tools")
    other_names = ("openai", "openai_gptoss")
    template_marks = ("<|channel|>", "<|message|>", "<|call|>")
    reasoning = "analysis"
    required_tokens = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")

    def states(self) -> Mapping[str, State]:
        """Return the parts of a message's header, and its text by channel."""
        begins = {"<|start|>": "start", "<|channel|>": "start"}
        header = {"<|channel|>": "header", "<|constrain|>": "header", "<|message|>": None}
        ends = {"<|end|>": "between", "<|call|>": "between", "<|return|>": "between", **begins}
        return {
            "first": State(_FirstHeader, {**header, "<|start|>": "start"}),
            "start": State(_Start, header),
            "header": State(_Header, header),
            "analysis": State(Reasoning, ends),
            "aside": State(_Aside, ends),
            "content": State(Content, ends),
            "arguments": State(JsonArguments, ends),
            "between": State(Between, begins),
        }

    def markers(self) -> ReasoningMarkers:
        """Return the usual headers of an analysis and of an answer, and what ends an analysis."""
        analysis, message, final = self.encoded("<|channel|>analysis<|message|>", _MESSAGE, _FINAL)
        usual = super().markers()
        return ReasoningMarkers(
            start=(analysis,),
            end=usual.end,
            boundaries=usual.boundaries,
            message_prefix=message,
            content_prefix=final,
        )

    def call_format(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        required: bool,
        parallel: bool = True,  # noqa: ARG002
    ) -> Format:
        """Return the grammar of the message of a call, or of either one or an answer.

        There is one call: the token `<|call|>` behind it ends the output.
        """

        def call(tool: str, schema: Mapping[str, Any]) -> Format:
            header = f"<|channel|>commentary {_TOOL}{tool} <|constrain|>json<|message|>"
            return self.sequence(header, arguments_format(tool, schema))

        calls = choice_of_calls(tools, call)
        return (
            calls
            if required
            else OrFormat(elements=[calls, self.sequence(_FINAL, AnyTextFormat())])
        )


class _Aside(Content):
    """Analysis for a built-in tool: it is reasoning, but its header is none of the markers."""

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        return Reasoning(self.output).feed(text, events)


class _Header(Body):
    """A part of a message's header; the last one decides what the message is.

    What is longer than any header is content.
    """

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._text = ""

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        taken = text[: _LONGEST - len(self._text)]
        self._text += taken
        return len(taken)

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        if len(self._text) == _LONGEST:
            events.append(ContentText(self._text))
            self.next = "content"
            return
        if cut:
            return
        for word in self._text.split():
            if word.startswith(_TOOL):
                self.output.tool = word.removeprefix(_TOOL)
            elif word.startswith("to="):
                self.output.notes["is_aside"] = True
            elif word in {"analysis", "commentary", "final"}:
                self.output.notes["channel"] = word
        analysis = "aside" if self.output.notes.get("is_aside") else "analysis"
        self.next = analysis if self.output.notes.get("channel") == "analysis" else "content"
        if self.output.tool:
            self.next = "arguments"


class _Start(_Header):
    """The first part of a header, to which nothing of the message before belongs."""

    is_start = True

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        output.notes.clear()
        output.tool = ""


class _FirstHeader(_Start):
    """The header that the prompt began, or text of the answer: before a message, or without one."""

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        is_header = all(map(_HEADER_WORD.match, self._text.split()))
        if len(self._text) == _LONGEST or (is_header and not cut):
            super().close(events, cut=cut)
        elif not (is_header and self._text.lstrip().startswith("to=")):
            events.append(ContentText(self._text))
            self.output.end_call(events)  # a call that fails later does not have this text, too
            self.next = "content"
