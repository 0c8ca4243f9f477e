"""Harmony, the format of gpt-oss: messages with a channel and a recipient each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    ParserState,
    Reasoning,
    choice_of_calls,
)
from hardpoint.toolkit.parsing.json_text import JsonArguments, arguments_format

_TOOL = "to=functions."
_MESSAGE = "<|start|>assistant"
_FINAL = "<|channel|>final<|message|>"
_LONGEST = 512
_CHANNELS = frozenset({"analysis", "commentary", "final"})
_HEADER_WORD = re.compile(r"to=|(?:assistant|analysis|commentary|final|json|code|text)\Z")
_HEADER = re.compile(
    r"\s*(?:(?:to=\S*|assistant|analysis|commentary|final|json|code|text)(?!\S)\s*)*"
)


class Harmony(FormatParser):
    """gpt-oss: messages with channels. `analysis` is reasoning, `functions.NAME` gets calls.

    A message is `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT<|constrain|>json<|message|>TEXT`
    and ends with `<|end|>`, `<|call|>` or `<|return|>`
    (https://cookbook.openai.com/articles/openai-harmony). Everything else is content. A message to
    another recipient, such as `browser.search`, is text of its channel: no tool of the request is
    meant.

    Text of a header without `<|message|>` is content, or reasoning in the channel `analysis`,
    with a warning. So is a message to a built-in tool.
    """

    contract = 2
    roles = ("reasoning", "tools")
    other_names = ("openai", "openai_gptoss")
    template_marks = ("<|channel|>", "<|message|>", "<|call|>")
    reasoning = "analysis"
    required_tokens = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")

    def states(self) -> Mapping[str, ParserState]:
        """Return the parts of a message's header, and its text by channel."""
        begins = {"<|start|>": "start", "<|channel|>": "start"}
        over = dict.fromkeys(("<|end|>", "<|call|>", "<|return|>"), "between")
        header = {"<|channel|>": "header", "<|constrain|>": "header", "<|message|>": None, **over}
        ends = {**over, **begins}
        return {
            "first": ParserState(_FirstHeader, {**header, "<|start|>": "start"}),
            "start": ParserState(_Start, {**header, "<|start|>": "start"}),
            "header": ParserState(_Header, {**header, "<|start|>": "start"}),
            "analysis": ParserState(Reasoning, ends),
            "aside": ParserState(_Aside, ends),
            "content": ParserState(Content, ends),
            "arguments": ParserState(JsonArguments, ends),
            "between": ParserState(_Between, begins),
        }

    def markers(self) -> ReasoningMarkers:
        """Return the usual headers of an analysis and of an answer, and the end of an analysis."""
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


class _Between(Between):
    """White space between messages: an output may end here."""

    def open(self, events: list[OutputEvent]) -> None:  # noqa: ARG002
        self.output.has_begun = False


class _Header(Body):
    """A part of a message's header; the last one decides the kind of the message.

    A longer header is content. So is text of a header without `<|message|>`, and the
    output has a warning.
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
        notes = self.output.notes
        header = _HEADER.match(self._text)
        assert header is not None
        if rest := self._text[header.end() :]:
            notes["rest"] = [*notes.get("rest", ()), rest]
        if cut or self.output.target not in (None, "header"):
            self._read(header.group().split())
            self._lose(events, cut=cut)
            return
        self._read(self._text.split())
        if self.output.target is None:
            self._begin_message(events)

    def _read(self, parts: Iterable[str]) -> None:
        notes = self.output.notes
        for word in parts:
            if word.startswith(_TOOL):
                self.output.tool = word.removeprefix(_TOOL)
            elif word.startswith("to="):
                notes["aside"] = word.removeprefix("to=")
            elif word in _CHANNELS:
                notes["channel"] = word

    def _begin_message(self, events: list[OutputEvent]) -> None:
        notes = self.output.notes
        if rest := " ".join(notes.pop("rest", ())):
            # Where no calls are to be found, the whole header of a call is content.
            is_shown = "tools" in self.output.request.roles or self.output.tool
            reason = f"the header of a message has the text {rest[:100]!r}"
            self.output.warn(reason, events, "" if is_shown else rest)
        aside = notes.get("aside")
        if aside is not None:
            reason = f"a message is for {aside[:100]!r}, which is no tool of the request"
            self.output.warn(reason, events)
        analysis = "analysis" if aside is None else "aside"
        self.next = analysis if notes.get("channel") == "analysis" else "content"
        if self.output.tool:
            self.next = "arguments"

    def _lose(self, events: list[OutputEvent], *, cut: bool) -> None:
        notes, output = self.output.notes, self.output
        rest = " ".join(notes.pop("rest", ()))
        if "tools" not in output.request.roles and not cut:  # there is no warning
            recipient = f"to={notes['aside']}" if "aside" in notes else ""
            tool = output.tool and f"{_TOOL}{output.tool}"
            rest = " ".join(filter(None, (tool, recipient, rest)))
        if rest and notes.get("channel") == "analysis":
            Reasoning(output).feed(rest, events)
            rest = ""
        tool = f" for {output.tool[:100]!r}" if output.tool else ""
        output.warn(f"the header of a message{tool} has no <|message|> behind it", events, rest)
        output.end_call(events)  # a call that fails later does not have this text, too


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
        is_cut = cut and not self._text.lstrip().startswith("to=")
        if len(self._text) == _LONGEST or (is_header and not is_cut):
            super().close(events, cut=cut)
        else:
            events.append(ContentText(self._text))
            self.output.end_call(events)  # a call that fails later does not have this text, too
            self.next = "content"
