"""Reasoning, content and tool calls of one completion, from its text as it comes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hardpoint.plugins import (
    ContentText,
    MalformedText,
    OutputEvent,
    OutputState,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from hardpoint.plugins.requests import ToolCall


class ChainedState:
    """The state of two parsers: the content that the first one finds is parsed for tools."""

    def __init__(
        self, reasoning: OutputState, reasoning_ids: frozenset[int], tools: OutputState
    ) -> None:
        """Chain them.

        Args:
            reasoning: of the reasoning parser.
            reasoning_ids: the special tokens that it takes; the others are for the tool parser.
            tools: of the tool parser.
        """
        self._reasoning, self._ids, self._tools = reasoning, reasoning_ids, tools

    @property
    def in_reasoning(self) -> bool:
        """Whether the output is inside reasoning."""
        return self._reasoning.in_reasoning

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Take text."""
        return self._parsed(self._reasoning.feed(text))

    def feed_token(self, token_id: int) -> Sequence[OutputEvent]:
        """Take a special token."""
        if token_id in self._ids:
            return self._parsed(self._reasoning.feed_token(token_id))
        events = self._parsed(self._reasoning.flush())
        if not self.in_reasoning:
            events += self._tools.feed_token(token_id)
        return events

    def finish(self) -> Sequence[OutputEvent]:
        """End both."""
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
    """A call so far; `sent` characters of its arguments were output."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    sent: int = 0
    shown: bool = False


class OutputParts:
    """Gathers the events of one completion for its outputs.

    Attributes:
        warning: what is wrong with the output, if anything is.
    """

    def __init__(self, state: OutputState, *, delta: bool) -> None:
        """Begin.

        Args:
            state: of the completion's parser.
            delta: whether each output has what is new only.
        """
        self._state, self._delta = state, delta
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[_Call] = []
        self.warning: str | None = None

    def feed(self, text: str) -> None:
        """Take text."""
        self._add(self._state.feed(text))

    def feed_token(self, token_id: int) -> None:
        """Take a special token of the parser."""
        self._add(self._state.feed_token(token_id))

    def finish(self) -> None:
        """End the output."""
        if self._state.in_reasoning:
            self.warning = "the output ended inside the reasoning"
        self._add(self._state.finish())

    @property
    def has_calls(self) -> bool:
        """Whether there is a tool call."""
        return bool(self._calls)

    def _add(self, events: Iterable[OutputEvent]) -> None:
        for event in events:
            match event:
                case ContentText(text):
                    self._content.append(text)
                case ReasoningText(text):
                    self._reasoning.append(text)
                case ToolCallArguments(text):
                    self._calls[-1].arguments.append(text)
                case ToolCallBegin(name, call_id):
                    self._calls.append(_Call(call_id or f"call_{secrets.token_hex(12)}", name))
                case MalformedText(text, reason):
                    self._content.append(text)
                    self.warning = reason
                case _:
                    pass

    def pop(self) -> tuple[str | None, str | None, list[ToolCall] | None]:
        """Return reasoning, content and tool calls: all of them, or what is new; None is none."""
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        calls = [self._shown(index, call) for index, call in enumerate(self._calls)]
        if self._delta:
            self._reasoning, self._content = [], []
        return reasoning or None, content or None, [call for call in calls if call] or None

    def _shown(self, index: int, call: _Call) -> ToolCall | None:
        arguments = "".join(call.arguments)
        if not self._delta:
            return ToolCall(index=index, id=call.id, name=call.name, arguments=arguments)
        call.arguments = []
        if call.shown and not arguments:
            return None
        first, call.shown = not call.shown, True
        return ToolCall(
            index=index,
            id=call.id if first else None,
            name=call.name if first else None,
            arguments=arguments,
        )
