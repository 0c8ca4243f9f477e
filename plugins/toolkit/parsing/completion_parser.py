"""Parsing of one completion as its text grows, by one output parser or by a chain of two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hardpoint.plugins import Finish, OutputParser
from hardpoint.plugins.output_parser import ContentText, OutputEvent, OutputState

from .completion_parts import CompletionParts

__all__ = ["ChainedState", "CompletionParser"]


class _Mark(NamedTuple):
    """A special token in a text."""

    token_id: int
    start: int
    end: int


class CompletionParser:
    """Feeds a parser with the text and the special tokens of one completion.

    Attributes:
        special: texts of the special tokens that the parser takes, by id.
        parts: reasoning, content and calls that the parser has found.
    """

    def __init__(
        self,
        state: OutputState,
        special: Mapping[int, str],
        *,
        delta: bool,
        parallel: bool = True,
    ) -> None:
        """Start with an empty text.

        Args:
            state: state of a new output.
            special: see the attribute.
            delta: whether `parse` gets the new text alone, and each output has only the new parts.
            parallel: whether there may be several calls; if not, calls after the first complete one
                are left out.
        """
        self.special = special
        self.parts = CompletionParts(delta=delta, parallel=parallel)
        self._state, self._delta = state, delta
        self._marks: list[_Mark] = []  # not parsed yet
        self._num_parsed = 0  # characters
        self._is_parsed = False
        self._num_read = 0  # characters before `parse` gets them, of deltas

    def mark(self, token_id: int, piece: str, end: int) -> None:
        """Mark a special token.

        Args:
            token_id: one of `special`.
            piece: text that the token has added.
            end: position in the whole text after it.
        """
        text = self.special[token_id]
        self._marks.append(_Mark(token_id, end - len(text) if piece.endswith(text) else end, end))

    def read(self, text: str) -> Finish | None:
        """Parse new text before `parse` gets it; return an end of the request by the parser.

        Raises:
            PluginFaultError: the parser failed.
        """
        self._parse(text, self._num_parsed, finished=False)
        if self._delta:
            self._num_read += len(text)
        return self.parts.end

    def parse(self, text: str, *, finished: bool) -> None:
        """Parse the text so far, or of deltas the new text.

        Args:
            text: the text.
            finished: whether it is complete; later calls do nothing.

        Raises:
            PluginFaultError: the parser failed.
        """
        if self._is_parsed:
            return
        self._is_parsed = finished
        first = self._num_parsed - self._num_read if self._delta else 0
        self._num_read = max(self._num_read - len(text), 0)
        self._parse(text, first, finished=finished)

    def _parse(self, text: str, first: int, *, finished: bool) -> None:
        """Parse the part of a text that begins at `first` which was not parsed yet."""
        at, end = self._num_parsed, max(first + len(text), self._num_parsed)
        count = 0
        for mark in self._marks:
            if mark.end > end and not (finished and mark.start <= end):
                break
            count += 1
            start = max(mark.start, at)
            if before := text[at - first : start - first]:
                self.parts.add(self._state.feed(before))
            marker = text[start - first : mark.end - first]
            self.parts.add(self._state.feed_token(mark.token_id, marker))
            at = start + len(marker)
        del self._marks[:count]
        if rest := text[at - first :]:
            self.parts.add(self._state.feed(rest))
        self._num_parsed = end
        if finished:
            if self._state.in_reasoning:
                self.parts.warn("the output ended inside the reasoning")
            self.parts.add(self._state.finish())
            self.parts.finish()


class ChainedState:
    """The state of two parsers: the second one looks for calls in the content of the first one."""

    def __init__(self, parser: OutputParser, reasoning: OutputState, tools: OutputState) -> None:
        """`tools`: state of a parser of tool calls, which gets the content."""
        self._ids, self._calls = parser.token_ids, parser.markers().calls
        self._reasoning, self._tools = reasoning, tools

    @property
    def in_reasoning(self) -> bool:
        """Whether the output is inside the reasoning."""
        return self._reasoning.in_reasoning

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Take a piece of text."""
        return self._parsed(self._reasoning.feed(text))

    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        """Take a special token."""
        is_taken = token_id in self._ids or self._reasoning.in_reasoning
        if is_taken and token_id not in self._calls:
            return self._parsed(self._reasoning.feed_token(token_id, text))
        # Without its text, it ends the text that waited to become a marker of the reasoning parser,
        # or, where it begins a call, the reasoning.
        events = self._parsed(self._reasoning.feed_token(token_id, ""))
        return [*events, *self._tools.feed_token(token_id, text)]

    def finish(self) -> Sequence[OutputEvent]:
        """End the output."""
        return [*self._parsed(self._reasoning.finish()), *self._tools.finish()]

    def _parsed(self, events: Iterable[OutputEvent]) -> list[OutputEvent]:
        parsed: list[OutputEvent] = []
        for event in events:
            if isinstance(event, ContentText):
                parsed += self._tools.feed(event.text)
            else:
                parsed.append(event)
        return parsed
