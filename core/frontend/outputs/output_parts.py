"""Reasoning, content and tool calls of completions, from their text; validation of answers."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hardpoint.boundary.guard import checked
from hardpoint.errors import PluginFaultError
from hardpoint.plugins import (
    OutputParser,
    ParserRequest,
    ReasoningMarkers,
    Tokenizer,
)
from hardpoint.plugins.config import GrammarConfig
from hardpoint.plugins.grammars import GrammarBackend
from hardpoint.plugins.manifest import PluginEntry
from hardpoint.plugins.output_parser import (
    ContentText,
    MalformedText,
    OutputEvent,
    OutputState,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.plugins.requests import ToolCall
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.registry.blame import describe, raise_unless_fault
from hardpoint.registry.plugin_set import PluginSet

from .detokenizer import Mark


class OutputParsers:
    """The parsers of a request's outputs, for as long as somebody holds them.

    Attributes:
        special: texts of the special tokens that they take, by id.
        reasoning: finds reasoning; None without one.
        tools: finds tool calls in requests that have tools; None without one.
        by_kind: the same parsers, by the kind that they are on under.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        by_kind: Mapping[str, OutputParser],
        own: Collection[OutputParser] = (),
    ) -> None:
        """Use a parser for each kind; one of both roles may be given twice.

        Args:
            tokenizer: whose special tokens they take.
            by_kind: the parsers.
            own: those of them that are of one request alone, and are closed with it.

        Raises:
            RequestError: a parser failed.
        """
        self._tokenizer, self.by_kind, self._to_close = tokenizer, by_kind, list(own)
        self._holders = 1
        self.reasoning = by_kind.get("reasoning_parsers")
        self.tools = by_kind.get("tool_parsers")
        self._reasoning_ids = (
            frozenset[int]() if self.reasoning is None else self.reasoning.token_ids
        )
        ids = frozenset[int]().union(*(parser.token_ids for parser in by_kind.values()))
        texts = {token: text for text, token in tokenizer.special_tokens.items()} if ids else {}
        self.special: Mapping[int, str] = {token: texts.get(token, "") for token in ids}

    def with_own(self, own: Mapping[str, OutputParser]) -> OutputParsers:
        """Return the parsers of a request that has some of its own, by kind."""
        by_kind = {**self.by_kind, **own}
        if self.reasoning is self.tools and self.reasoning is not None:
            by_kind = dict.fromkeys(by_kind, next(iter(own.values())))
        return OutputParsers(self._tokenizer, by_kind, own.values())

    def entries(self, plugins: PluginSet) -> list[PluginEntry]:
        """Return the entry of each parser; of one of both roles, that of reasoning."""
        found: dict[OutputParser, PluginEntry] = {}
        for kind, parser in self.by_kind.items():
            found.setdefault(parser, plugins.get(kind, parser.name))
        return list(found.values())

    def __bool__(self) -> bool:
        return bool(self.by_kind)

    @property
    def components(self) -> list[OutputParser]:
        """Each parser once."""
        return list(dict.fromkeys(self.by_kind.values()))

    def hold(self) -> OutputParsers:
        """Return them to another holder, who closes them too: a completion, for example."""
        self._holders += 1
        return self

    def close(self) -> None:
        """Close the parsers that are of one request alone, once the last holder has closed them."""
        self._holders -= 1
        while self._to_close and not self._holders:
            self._to_close.pop().close()

    @property
    def markers(self) -> ReasoningMarkers | None:
        """The token ids that enclose reasoning; None without a reasoning parser.

        Raises:
            RequestError: the parser failed.
        """
        return None if self.reasoning is None else self.reasoning.markers()

    def open(
        self, prompt_token_ids: Sequence[int], tools: Mapping[str, Mapping[str, Any]] | None
    ) -> OutputState | None:
        """Return the state of a new output; None if nothing is to be found in it.

        Args:
            prompt_token_ids: before the output.
            tools: JSON schemas of arguments, by the name of the tool; None without tools.

        Raises:
            PluginFaultError: a parser failed.
        """
        markers = self.markers
        is_open = markers is not None and markers.is_open(prompt_token_ids)
        with_tools = None if tools is None else self.tools
        if self.reasoning is not None and self.reasoning is with_tools:
            both = ParserRequest(reasoning_open=is_open, tools=tools or {})
            return with_tools.open(both)
        found = reasoning = tool_calls = None
        if self.reasoning is not None:
            request = ParserRequest(roles=("reasoning",), reasoning_open=is_open)
            found = reasoning = self.reasoning.open(request)
        if with_tools is not None:
            inside = reasoning is None and with_tools.markers().is_open(prompt_token_ids)
            request = ParserRequest(roles=("tools",), reasoning_open=inside, tools=tools or {})
            found = tool_calls = with_tools.open(request)
        if reasoning is None or tool_calls is None:
            return found
        return _ChainedState(reasoning, self._reasoning_ids, tool_calls)


class _ChainedState:
    """The state of two parsers: the content that the first one finds is parsed for tools."""

    def __init__(
        self, reasoning: OutputState, reasoning_ids: frozenset[int], tools: OutputState
    ) -> None:
        self._reasoning, self._ids, self._tools = reasoning, reasoning_ids, tools

    @property
    def in_reasoning(self) -> bool:
        return self._reasoning.in_reasoning

    def feed(self, text: str) -> Sequence[OutputEvent]:
        return self._parsed(self._reasoning.feed(text))

    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        if token_id in self._ids or self._reasoning.in_reasoning:
            return self._parsed(self._reasoning.feed_token(token_id, text))
        # Without its text, it ends what waited to become a marker of the reasoning parser.
        events = self._parsed(self._reasoning.feed_token(token_id, ""))
        return [*events, *self._tools.feed_token(token_id, text)]

    def finish(self) -> Sequence[OutputEvent]:
        return [*self._parsed(self._reasoning.finish()), *self._tools.finish()]

    def _parsed(self, events: Iterable[OutputEvent]) -> list[OutputEvent]:
        parsed: list[OutputEvent] = []
        for event in events:
            if isinstance(event, ContentText):
                parsed += self._tools.feed(event.text)
            else:
                parsed.append(event)
        return parsed


@dataclass
class _Call:
    """A call so far, and whether an output has shown it."""

    index: int
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    shown: bool = False


_CANNOT = "the answer cannot be validated"


class AnswerValidator:
    """Asks the backend of a request, or the default one where that validates no answers."""

    def __init__(self, plugins: PluginSet, use: str) -> None:
        """`use` names the backend of requests that name none."""
        self._plugins, self._use = plugins, use

    def use_plugins(self, plugins: PluginSet) -> None:
        """Take the backends of another generation of the plugins."""
        self._plugins = plugins

    def error(self, structured: StructuredOutputs, answer: str) -> str | None:
        """Return what is wrong with an answer that is to be JSON of a schema; None if nothing is.

        What a backend does wrong is named in the text: the answer itself is there.
        """
        own = structured.backend or self._use
        for name in dict.fromkeys((own, GrammarConfig().use)):
            entry = self._plugins.find("grammars", name)
            if entry is None:
                continue
            try:
                found: str | None = self._plugins.target(entry).validate(structured, answer)
            except NotImplementedError:
                continue
            except BaseException as cause:
                raise_unless_fault(cause)
                return f"{_CANNOT}: {entry.source}: its validate failed: {describe(cause)}"
            try:
                return checked(found, GrammarBackend, "validate", entry.source)
            except PluginFaultError as wrong:
                return f"{_CANNOT}: {wrong}"
        return f"{_CANNOT}: the grammar backend {own!r} has no `validate`"


_OF_CALLS = (ToolCallBegin, ToolCallArguments, ToolCallEnd, MalformedText)


class OutputParts:
    """Gathers what a parser finds in one completion, for its outputs.

    Attributes:
        warning: what is wrong with the output, if anything is.
        has_calls: whether there is a complete tool call.
    """

    def __init__(self, state: OutputState, *, delta: bool, parallel: bool = True) -> None:
        """Begin.

        Args:
            state: of the completion's output.
            delta: whether each output has only what is new.
            parallel: whether there may be several calls; if not, those after the first complete one
                are left out.
        """
        self._state, self._delta, self._parallel = state, delta, parallel
        self._in_extra_call = False
        self._void: list[int] = []  # indexes of calls that were output and then broke
        self._length = 0  # of the text so far
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[_Call] = []
        self._num_calls = 0
        self._in_call = self._finished = self.has_calls = False
        self.warning: str | None = None

    def resume(self, state: OutputState) -> None:
        """Go on after a further part of the prompt, by another state."""
        self._state, self._finished = state, False

    def feed(self, text: str, marks: list[Mark], *, finished: bool) -> None:
        """Take the text so far, or of deltas what is new, and the special tokens in it.

        Args:
            text: that no stop string can cut any more.
            marks: in order; those that the text reaches are removed.
            finished: whether nothing follows.

        Raises:
            PluginFaultError: the parser failed.
        """
        if self._finished:
            return
        first = self._length if self._delta else 0  # where `text` begins
        self._finished = finished
        at, end = self._length, first + len(text)
        count = 0
        for mark in marks:
            if mark.end > end and not (finished and mark.start <= end):
                break
            count += 1
            start = max(mark.start, at)
            self._feed_text(text[at - first : start - first])
            own = text[start - first : mark.end - first]
            self._add(self._state.feed_token(mark.token_id, own))
            at = start + len(own)
        del marks[:count]
        self._feed_text(text[at - first :])
        self._length = end
        if finished:
            if self._state.in_reasoning:
                self.warning = "the output ended inside the reasoning"
            self._add(self._state.finish())

    def _feed_text(self, text: str) -> None:
        if text:
            self._add(self._state.feed(text))

    def _add(self, events: Iterable[OutputEvent]) -> None:
        for event in itertools.filterfalse(self._is_left_out, events):
            match event:
                case ContentText(text):
                    self._content.append(text)
                case ReasoningText(text):
                    self._reasoning.append(text)
                case ToolCallArguments(text):
                    self._calls[-1].arguments.append(text)
                case ToolCallBegin(name, call_id):
                    call_id = call_id or f"call_{secrets.token_hex(12)}"
                    self._calls.append(_Call(self._num_calls, call_id, name))
                    self._num_calls += 1
                    self._in_call = True
                case MalformedText(text, reason):
                    if self._in_call:
                        self._void_call()
                    self._content.append(text)
                    self.warning = reason
                    if self._void:  # a stream cannot take back what it has shown
                        void = ", ".join(map(str, self._void))
                        self.warning += f"; void are the calls begun with index {void}"
                case ToolCallEnd():
                    self.has_calls, self._in_call = True, False

    def _is_left_out(self, event: OutputEvent) -> bool:
        """Return whether an event belongs to a call after the only one that there may be."""
        if isinstance(event, ToolCallBegin):
            self._in_extra_call = self.has_calls and not self._parallel
        if not self._in_extra_call or not isinstance(event, _OF_CALLS):
            return False
        self._in_extra_call = not isinstance(event, ToolCallEnd | MalformedText)
        return True

    def _void_call(self) -> None:
        """Drop the open call, whose text is content; a part that was output stays so."""
        self._in_call = False
        call = self._calls.pop()
        if call.shown:
            self._void.append(call.index)
        else:
            self._num_calls -= 1

    def pop(self) -> tuple[str | None, str | None, list[ToolCall] | None]:
        """Return reasoning, content and tool calls: all of them, or what is new; None is none."""
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        calls = [shown for call in self._calls if (shown := self._part_of(call))]
        if self._delta:
            self._reasoning, self._content = [], []
            self._calls = self._calls[-1:] if self._in_call else []
        return reasoning or None, content or None, calls or None

    def _part_of(self, call: _Call) -> ToolCall | None:
        arguments = "".join(call.arguments)
        if not self._delta:
            return ToolCall(index=call.index, id=call.id, name=call.name, arguments=arguments)
        call.arguments = []
        if call.shown and not arguments:
            return None
        first, call.shown = not call.shown, True
        return ToolCall(
            index=call.index,
            id=call.id if first else None,
            name=call.name if first else None,
            arguments=arguments,
        )
