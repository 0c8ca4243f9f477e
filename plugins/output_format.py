"""Output parsers as a table: states of an output, and the markers that lead from one to another."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .markers import ReasoningMarkers
from .output_parser import (
    ContentText,
    MalformedText,
    OutputEvent,
    OutputParser,
    OutputParserContext,
    OutputState,
    ParserRequest,
    ReasoningText,
    ToolCallBegin,
)
from .tokenizer import Tokenizer

__all__ = ["Body", "Content", "FormatParser", "Ignored", "OpenOutput", "Reasoning", "State", "ToolName"]


@dataclass
class OpenOutput:
    """What the bodies of one output share.

    Attributes:
        request: whose output it is.
        tool: name of the call that began last.
        notes: what a body leaves for the next one.
    """

    request: ParserRequest
    tool: str = ""
    notes: dict[str, str] = field(default_factory=dict)


class Body:
    """What the text of a state means; a new one each time that the state is entered.

    Attributes:
        next: the state to go to when the body ends, or at a marker that leads to None.
    """

    next: str | None = None

    def __init__(self, output: OpenOutput) -> None:
        """Begin."""
        self.output = output

    def open(self, events: list[OutputEvent]) -> None:
        """Add the events of entering the state."""

    @property
    def quotes(self) -> bool:
        """Whether the text so far ends inside a string, in which a marker's text is no marker."""
        return False

    @abstractmethod
    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take text, and add its events.

        Returns:
            How many characters it took: fewer than all of them where the body ends.
        """

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """End the body.

        Args:
            events: to add to.
            cut: whether the output ends here, and no marker.
        """


class Content(Body):
    """Text of the answer."""

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take all of it."""
        events.append(ContentText(text))
        return len(text)


class Reasoning(Body):
    """Text of the reasoning."""

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take all of it."""
        events.append(ReasoningText(text))
        return len(text)


class Ignored(Body):
    """Text that belongs to nothing, such as line breaks between calls."""

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        """Take all of it."""
        return len(text)


class ToolName(Body):
    """The name of a tool, whose arguments are the next state.

    Attributes:
        ends_at: a character that begins the arguments where no marker does.
    """

    ends_at: str | None = None
    _LONGEST = 256

    def __init__(self, output: OpenOutput) -> None:
        """Begin with no name."""
        super().__init__(output)
        self._text = ""

    def parse(self, text: str) -> tuple[str, str | None]:
        """Return the tool's name, and the call's id if the text has one."""
        return text.strip(), None

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take the name."""
        end = text.find(self.ends_at) if self.ends_at else -1
        end = end if end >= 0 else len(text)
        if len(self._text) > self._LONGEST:  # no name, so text
            events.append(ContentText(text[:end]))
            return end
        self._text += text[:end]
        if len(self._text) > self._LONGEST:
            events.append(MalformedText(self._text, "a call is malformed: its name is too long"))
        return end

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """Begin the call."""
        if len(self._text) > self._LONGEST:
            return
        name, call_id = self.parse(self._text)
        if name and not cut:
            self.output.tool = name
            events.append(ToolCallBegin(name, call_id))
        elif name or self._text or not cut:
            reason = "the output ended inside it" if cut else "it has no name"
            events.append(MalformedText(self._text, f"a call is malformed: {reason}"))


@dataclass(frozen=True)
class State:
    """A state of the output.

    Attributes:
        body: what its text means.
        moves: the state to which each marker leads; None is the body's `next`. A marker is a text;
            where the tokenizer has it as a special token, only that token is the marker.
        then: the state after a body that ends on its own; None is the same one.
    """

    body: Callable[[OpenOutput], Body]
    moves: Mapping[str, str | None]
    then: str | None = None


class FormatParser(OutputParser):
    """An output parser that is a table of states.

    Attributes:
        reasoning: name of the state of reasoning, in a parser that finds it. Its markers are those
            that lead to it and from it.
        needs_special_tokens: whether every marker has to be a special token of the tokenizer,
            because users could write its text.
    """

    reasoning: ClassVar[str | None] = None
    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, context: OutputParserContext) -> None:
        """Look the markers up among the tokenizer's special tokens.

        Raises:
            ConfigError: the tokenizer lacks one that has to be there.
        """
        super().__init__(context)
        self._states = self.states()
        self._table = _compile(self._states, context.tokenizer)

    @abstractmethod
    def states(self) -> Mapping[str, State]:
        """Return the states by name; an output begins in the first one.

        If the prompt ends inside reasoning, it begins in the state `reasoning`.
        """

    @property
    def token_ids(self) -> frozenset[int]:
        """The markers that are special tokens."""
        return frozenset(token for state in self._table.values() for token in state.by_id)

    def markers(self) -> ReasoningMarkers:
        """Return the token ids of the markers that lead to reasoning and from it."""
        if self.reasoning is None:
            return ReasoningMarkers((), ())
        moves = [pair for state in self._states.values() for pair in state.moves.items()]
        opening = next((marker for marker, to in moves if to == self.reasoning), "")
        closing = next(iter(self._states[self.reasoning].moves), "")
        encode = self.context.tokenizer.encode
        return ReasoningMarkers(
            start=encode(opening, add_special_tokens=False) if opening else (),
            end=encode(closing, add_special_tokens=False) if closing else (),
        )

    def open(self, request: ParserRequest) -> OutputState:
        """Return the state of a new output."""
        first = next(iter(self._states))
        if request.reasoning_open and self.reasoning is not None:
            first = self.reasoning
        return _FormatState(self._table, first, request)


@dataclass(frozen=True)
class _Compiled:
    """A state as it is matched.

    Attributes:
        pattern: matches the markers that are text, the longest one first; None without any.
        by_text: the state that each leads to.
        by_id: the same of the markers that are special tokens.
        prefixes: proper beginnings of the markers that are text.
        longest: of these beginnings, in characters.
    """

    name: str
    body: Callable[[OpenOutput], Body]
    then: str
    pattern: re.Pattern[str] | None
    by_text: Mapping[str, str | None]
    by_id: Mapping[int, str | None]
    prefixes: frozenset[str]
    longest: int


def _compile(states: Mapping[str, State], tokenizer: Tokenizer) -> dict[str, _Compiled]:
    special = tokenizer.special_tokens
    compiled = {}
    for name, state in states.items():
        by_text = {text: to for text, to in state.moves.items() if text not in special}
        ordered = sorted(by_text, key=len, reverse=True)
        prefixes = frozenset(text[:end] for text in by_text for end in range(1, len(text)))
        compiled[name] = _Compiled(
            name,
            state.body,
            state.then or name,
            re.compile("|".join(map(re.escape, ordered))) if ordered else None,
            by_text,
            {special[text]: to for text, to in state.moves.items() if text in special},
            prefixes,
            max(map(len, prefixes), default=0),
        )
    return compiled


class _FormatState:
    """Where an output is in a table of states."""

    def __init__(self, table: Mapping[str, _Compiled], first: str, request: ParserRequest) -> None:
        self._table, self._output = table, OpenOutput(request)
        self._held = ""  # the end of the text, which may begin a marker
        self._state = table[first]
        self._body = self._state.body(self._output)

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Take text, but for an end that may begin a marker."""
        events: list[OutputEvent] = []
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            at = self._step(text, at, events)
        return events

    def _step(self, text: str, at: int, events: list[OutputEvent]) -> int:
        """Take text up to the next marker, and the marker; return where the rest begins."""
        state, body = self._state, self._body
        found = state.pattern.search(text, at) if state.pattern else None
        end = found.start() if found else len(text) - self._held_at_end(text, at)
        if end > at:
            at = self._take(text, at, end, events)
            if at < end:
                return at
        if found is None:
            self._held = text[end:]
            return len(text)
        if body.quotes:  # only its first character is known to be no marker
            return self._take(text, at, at + 1, events)
        self._leave(state.by_text[found.group()], events)
        return found.end()

    def _take(self, text: str, at: int, end: int, events: list[OutputEvent]) -> int:
        """Give the body text; return where it ended, which leads to the next state."""
        taken = at + self._body.feed(text[at:end], events)
        if taken < end:
            self._leave(self._body.next or self._state.then, events)
        return taken

    def _held_at_end(self, text: str, at: int) -> int:
        """Return how many characters at the end may begin a marker."""
        for length in range(min(self._state.longest, len(text) - at), 0, -1):
            if text[len(text) - length :] in self._state.prefixes:
                return length
        return 0

    def _leave(self, name: str | None, events: list[OutputEvent]) -> None:
        before = self._body
        before.close(events, cut=False)
        self._state = self._table[name or before.next or self._state.name]
        self._body = self._state.body(self._output)
        self._body.open(events)

    def feed_token(self, token_id: int) -> Sequence[OutputEvent]:
        """Take a marker; one that leads nowhere from here is left out."""
        events = self._flush()
        if token_id in self._state.by_id:
            self._leave(self._state.by_id[token_id], events)
        return events

    def _flush(self) -> list[OutputEvent]:
        """Take the text that waited to become a marker."""
        events: list[OutputEvent] = []
        text, self._held = self._held, ""
        at = 0
        while at < len(text):
            at = self._take(text, at, len(text), events)
        return events

    def finish(self) -> Sequence[OutputEvent]:
        """Take what waited, and end."""
        events = self._flush()
        self._body.close(events, cut=True)
        return events
