"""Reasoning, content and tool calls of a completion, from the events of its parser."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from hardpoint.plugins import Finish
from hardpoint.plugins.output_parser import (
    ContentText,
    MalformedText,
    OutputEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.plugins.requests import ToolCall

__all__ = ["CompletionParts"]


@dataclass
class _PartialCall:
    """A call so far, and whether an output has shown it."""

    index: int
    id: str
    name: str
    content_before: int
    arguments: list[str] = field(default_factory=list)
    shown: bool = False


_MOST_WARNINGS = 16
_OF_CALLS = (ToolCallBegin, ToolCallArguments, ToolCallEnd, MalformedText)


class CompletionParts:
    """Reasoning, content and tool calls of one completion, as its outputs show them.

    White space next to a call is not content, and where content begins it waits for the rest of it:
    a call may follow.

    Attributes:
        warning: problem of the output, if there is one.
        has_calls: whether there is a complete tool call.
        void_calls: indexes of calls that were output and then broke.
        end: the end of the request by the parser; None without any.
    """

    def __init__(self, *, delta: bool, parallel: bool = True) -> None:
        """Start with nothing.

        Args:
            delta: whether each output has only the new parts.
            parallel: whether there may be several calls; if not, calls after the first complete one
                are left out.
        """
        self._delta, self._parallel = delta, parallel
        self._in_extra_call = False
        self.void_calls: list[int] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._space: list[str] = []  # that waits
        self._in_content = False
        self._calls: list[_PartialCall] = []
        self._num_calls = 0
        self._in_call = self.has_calls = False
        self.end: Finish | None = None
        self._warnings: dict[str, None] = {}  # each once, in order

    @property
    def warning(self) -> str | None:
        """Descriptions of malformed text in the completion; None without any."""
        if not self._warnings:
            return None
        reasons = list(self._warnings)
        if (more := len(reasons) - _MOST_WARNINGS) > 0:
            reasons[_MOST_WARNINGS:] = [f"{more} more"]
        if self.void_calls:  # a stream cannot take back its earlier outputs
            void = ", ".join(map(str, self.void_calls))
            reasons.append(f"void are the calls begun with index {void}")
        return "; ".join(reasons)

    def warn(self, reason: str) -> None:
        """Add a description of malformed text; one reason counts once."""
        self._warnings[reason] = None

    def add(self, events: Iterable[OutputEvent]) -> None:
        """Process the parser's events, in order."""
        for event in itertools.filterfalse(self._is_left_out, events):
            match event:
                case ContentText(text):
                    self._add_content(text)
                case ReasoningText(text):
                    self._in_content = False
                    self._reasoning.append(text)
                case ToolCallArguments(text):
                    self._calls[-1].arguments.append(text)
                case ToolCallBegin(name, call_id):
                    call_id = call_id or f"call_{secrets.token_hex(12)}"
                    place = sum(map(len, self._content))
                    self._calls.append(_PartialCall(self._num_calls, call_id, name, place))
                    self._num_calls += 1
                    self._in_call, self._in_content, self._space = True, False, []
                case MalformedText(text, reason):
                    if self._in_call:
                        self._void_call()
                    self._add_content(text)
                    self.warn(reason)
                case ToolCallEnd():
                    self.has_calls, self._in_call = True, False
                case Finish():
                    self.end = event
                    break

    def finish(self) -> None:
        """End the completion: white space that is not part of anything is content without calls."""
        if not self.has_calls:
            self._content += self._space
        self._space = []

    def _add_content(self, text: str) -> None:
        self._space.append(text)
        if self._in_content or (text and not text.isspace()):
            self._content += self._space
            self._space, self._in_content = [], True

    def _is_left_out(self, event: OutputEvent) -> bool:
        if isinstance(event, ToolCallBegin):
            self._in_extra_call = self.has_calls and not self._parallel
        if not self._in_extra_call or not isinstance(event, _OF_CALLS):
            return False
        self._in_extra_call = not isinstance(event, ToolCallEnd | MalformedText)
        return True

    def _void_call(self) -> None:
        """Drop the open call and treat its text as content; streamed parts remain."""
        self._in_call = False
        call = self._calls.pop()
        if call.shown:
            self.void_calls.append(call.index)
        else:
            self._num_calls -= 1

    def pop(self) -> tuple[str | None, str | None, list[ToolCall] | None]:
        """Return reasoning, content and tool calls, complete or incremental; None if absent."""
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        calls = [shown for call in self._calls if (shown := self._part_of(call))]
        if self._delta:
            self._reasoning, self._content = [], []
            self._calls = self._calls[-1:] if self._in_call else []
            for call in self._calls:
                call.content_before = 0
        return reasoning or None, content or None, calls or None

    def _part_of(self, call: _PartialCall) -> ToolCall | None:
        arguments = "".join(call.arguments)
        first = not (self._delta and call.shown)
        if not first and not arguments:
            return None
        if self._delta:
            call.arguments, call.shown = [], True
        return ToolCall(
            index=call.index,
            id=call.id if first else None,
            name=call.name if first else None,
            arguments=arguments,
            content_before=call.content_before,
        )
