"""Output parsers with one typical mistake each."""

from __future__ import annotations

import re

import msgspec

from hardpoint.builtin_plugins.parsers.json_sections import Hermes
from hardpoint.plugins import OutputParser, ParserRequest, ReasoningMarkers
from hardpoint.plugins.output_parser import (
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.plugins.structured import AnyTextFormat, TagFormat, TokenFormat
from hardpoint.testing import OutputSample
from hardpoint.toolkit.parsing.format_parser import (
    Content,
    FormatParser,
    Reasoning,
    State,
    choice_of_calls,
)
from hardpoint.toolkit.parsing.json_text import JsonCalls, call_as_json
from support.samples import Sample, spend

START, END = "<think>", "</think>"
CALL = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'
SAMPLES = (
    OutputSample(f"{START}So <b{END}Yes{CALL}", "So <b", "Yes", (("f", {"a": "</tool_call>"}),)),
    OutputSample(f"{START}cut </thi", "cut </thi"),
    OutputSample("Hello", content="Hello"),
    OutputSample(f"So{END}Yes", "So", "Yes", reasoning_open=True),
)


class Right(Sample, FormatParser, contract=1):
    """Correct: reasoning in tags, and calls."""

    roles = ("reasoning", "tools")
    reasoning = "thinking"

    def states(self):
        return {
            "content": State(Content, {START: "thinking", "<tool_call>": "call"}),
            "thinking": State(Reasoning, {END: "content"}),
            "call": State(JsonCalls, {"</tool_call>": "content"}),
        }


class Forwarding:
    """A state that does as another one; the mistakes override a method."""

    def __init__(self, parser, state, request):
        self.parser, self.state, self.request = parser, state, request

    def feed(self, text):
        return self.state.feed(text)

    @property
    def in_reasoning(self):
        return self.state.in_reasoning

    def feed_token(self, token_id, text):
        return self.state.feed_token(token_id, text)

    def finish(self):
        return self.state.finish()


class _Wrapped(Right):
    State = Forwarding

    def open(self, request):
        return self.State(self, super().open(request), request)


class RightWrapped(_Wrapped):
    """Correct."""


class WithoutContract(Right, contract=None):
    """States no contract of its own."""


class NoMarkersOverPieces(_Wrapped):
    """Looks for markers in each piece alone."""

    class State(Forwarding):
        def feed(self, text):
            return [*self.state.feed(text), *self.state.feed_token(-1, "")]


class SplitsWords(_Wrapped):
    """Drops the white space at the end of a piece."""

    class State(Forwarding):
        def feed(self, text):
            return self.state.feed(text.rstrip() or "")


class OtherTags(Right):
    def states(self):
        states = super().states()
        return {**states, "content": State(Content, {"<reason>": "thinking"})}


class OtherMarkers(Right):
    """Has the markers of another format."""

    def markers(self):
        return ReasoningMarkers(start=self.encoded("<reason>"), end=self.encoded(END))


class UnnamedCalls(Right):
    """A call ends its reasoning, and is not among its markers."""

    def states(self):
        calls = {"<tool_call>": "content"}
        return {**super().states(), "thinking": State(Reasoning, {END: "content"}, calls=calls)}

    def markers(self):
        return msgspec.structs.replace(super().markers(), calls=())


class IgnoresRoles(Right):
    """Finds both, always."""

    def open(self, request):
        return super().open(ParserRequest(reasoning_open=request.reasoning_open))


class MarkersInStrings(Right):
    """Finds markers in strings, too."""

    class Calls(JsonCalls):
        quotes = False

    def states(self):
        return {**super().states(), "call": State(self.Calls, {"</tool_call>": "content"})}


class RaisesForBadJson(_Wrapped):
    class State(Forwarding):
        def feed(self, text):
            events = self.state.feed(text)
            if any(type(event).__name__ == "MalformedText" for event in events):
                raise ValueError("bad JSON")
            return events


class GivesText(_Wrapped):
    class State(Forwarding):
        def finish(self):
            return [*self.state.finish(), "end"]


class RaisesAtTheEnd(_Wrapped):
    """Cannot end in a call."""

    class State(Forwarding):
        def finish(self):
            events = self.state.finish()
            if any(type(event).__name__ == "MalformedText" for event in events):
                raise AssertionError("open call")
            return events


class EndsCallsTwice(_Wrapped):
    class State(Forwarding):
        def feed(self, text):
            events = self.state.feed(text)
            return [e for event in events for e in ([event] * 2 if _is_end(event) else [event])]


class EndsCutCalls(_Wrapped):
    """Ends a call with truncated arguments as a complete one."""

    class State(Forwarding):
        def finish(self):
            events = self.state.finish()
            return [ToolCallEnd() if "ended inside" in str(event) else event for event in events]


class OneState(Right):
    """All outputs share one state."""

    state = None

    def open(self, request):
        if self.state is None or request.reasoning_open != self.state.request.reasoning_open:
            self.state = Forwarding(self, super().open(request), request)
        return self.state


class SharesTheBuffer(Sample, OutputParser, contract=1):
    """Keeps the text that waits in the parser."""

    roles = ("reasoning",)
    held = ""

    def open(self, request):
        self.held = ""
        return _SharedState(self, request.reasoning_open)


class _SharedState:
    """Waits for the whole output."""

    def __init__(self, parser, reasoning_open):
        self.parser, self.reasoning_open = parser, reasoning_open

    def feed(self, text):
        self.parser.held += text
        return []

    in_reasoning = False

    def feed_token(self, token_id, text):
        return []

    def finish(self):
        text, self.parser.held = self.parser.held, ""
        return whole(text, self.reasoning_open)


def whole(text, reasoning_open):
    """Return the events of a whole output."""
    events = []
    if reasoning_open or text.startswith(START):
        reasoning, _, text = text.removeprefix(START).partition(END)
        events.append(ReasoningText(reasoning))
    content, call, rest = text.partition("<tool_call>")
    events.append(ContentText(content))
    match = re.fullmatch(r'\{"name": "(\w+)", "arguments": (\{.*\})\}</tool_call>', rest)
    if match:
        events += [ToolCallBegin(match[1]), ToolCallArguments(match[2]), ToolCallEnd()]
    else:
        events.append(ContentText(call + rest))
    return events


class FormatAsText(Right):
    """Its grammar of calls is a text."""

    def call_format(self, tools, *, required, parallel=True):
        return '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


class FormatOfNoToken(Right):
    """Its grammar has a special token that the tokenizer lacks."""

    def call_format(self, tools, *, required, parallel=True):
        return TagFormat(
            begin="<tool_call>", content=AnyTextFormat(), end=TokenFormat(token="</tool_call>")
        )


class NeedsParallelCalls(Right):
    """Fails where the calls are not to be parallel."""

    def call_format(self, tools, *, required, parallel=True):
        if not parallel:
            raise KeyError("parallel")
        call = choice_of_calls(tools, call_as_json)
        return self.tagged(
            "<tool_call>", call, "</tool_call>", required=required, parallel=parallel
        )


class ParsesAllAgain(_Wrapped):
    """Parses the whole output for every piece."""

    class State(Forwarding):
        def __init__(self, parser, state, request):
            super().__init__(parser, state, request)
            self.text, self.given = "", ""

        def feed(self, text):
            self.text += text
            spend(1e-7 * len(self.text))
            return self.state.feed(text)


class GuessesEarly(_Wrapped):
    """Takes text for content before it can be known, and reports later that it was reasoning."""

    class State(Forwarding):
        def __init__(self, parser, state, request):
            super().__init__(parser, state, request)
            self.text = ""

        def feed(self, text):
            events = [] if self.text else [ContentText("")]
            self.text += text
            return [*events, ContentText(text)] if text.isalpha() else events

        def finish(self):
            return whole(self.text, self.request.reasoning_open)


class EarlyEnd(_Wrapped):
    """Says that a call has ended as soon as its arguments begin."""

    class State(Forwarding):
        def feed(self, text):
            events = [event for event in self.state.feed(text) if not _is_end(event)]
            begun = [index for index, e in enumerate(events) if isinstance(e, ToolCallArguments)]
            return [*events[: begun[0] + 1], ToolCallEnd()] if begun else events


class TypedTokens(_Wrapped):
    """Takes typed text for a special token."""

    class State(Forwarding):
        def feed(self, text):
            ids = self.parser.context.tokenizer.special_tokens
            events = []
            for part in re.split(f"({START}|{END})", text):
                known = ids.get(part) in self.parser.token_ids
                events += self.state.feed_token(ids[part], part) if known else self.state.feed(part)
            return events


class Remembers(_Wrapped):
    def __init__(self, context):
        super().__init__(context)
        self.seen = []

    def open(self, request: ParserRequest):
        self.seen.append(request)
        return super().open(request)


class LosesCalls(Sample, Hermes, contract=1):
    """Has no state for reasoning."""


def _is_end(event):
    return isinstance(event, ToolCallEnd)
