"""Output parsers as a table: states of an output, and the markers that lead from one to another."""

from __future__ import annotations

import functools
import itertools
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isabstract, isclass
from typing import Any, ClassVar

from hardpoint.errors import ConfigError
from hardpoint.plugins.output_parser import (
    OutputEvent,
    OutputParser,
    OutputParserContext,
    OutputState,
    ParserRequest,
)
from hardpoint.plugins.requests.markers import ReasoningMarkers
from hardpoint.plugins.structured import (
    ConstStringFormat,
    Format,
    OrFormat,
    SequenceFormat,
    TagFormat,
    TagsWithSeparatorFormat,
    TokenFormat,
    TriggeredTagsFormat,
)
from hardpoint.plugins.text.tokenizer import Tokenizer

from .bodies import (
    AfterCall,
    BeforeAnswer,
    Beginning,
    Between,
    Body,
    Content,
    Ignored,
    Kind,
    OpenOutput,
    Reasoning,
    ToolName,
    Whole,
)

__all__ = [
    "AfterCall",
    "BeforeAnswer",
    "Beginning",
    "Between",
    "Body",
    "Content",
    "FormatParser",
    "Ignored",
    "Kind",
    "OpenOutput",
    "ParserState",
    "Reasoning",
    "State",
    "ToolName",
    "Whole",
    "any_tag",
    "choice_of_calls",
    "repeated",
]


@dataclass(frozen=True)
class ParserState:
    """A state of the output.

    Attributes:
        body: parser of its text.
        moves: the state to which each marker leads; None is the body's `next`. A marker is a text;
            where the tokenizer has it as a special token, only that token is the marker. None of
            a state begins another one of it.
        then: the state after a body that ends on its own; None is the same one.
        calls: special tokens that begin a call inside reasoning, by the state that each leads to
            and is a marker or text of. They count in requests with tools; the text never does.
    """

    body: Callable[[OpenOutput], Body]
    moves: Mapping[str, str | None]
    then: str | None = None
    calls: Mapping[str, str] = field(default_factory=dict)


State = ParserState
"""Name of `ParserState` in packages of authors."""


class FormatParser(OutputParser):
    """An output parser that is a table of states.

    Attributes:
        reasoning: name of the state of reasoning, in a parser that finds it. Its markers are the
            markers that lead to it and from it.
        required_tokens: the markers that have to be special tokens of the tokenizer, because
            users could write their text.
    """

    reasoning: ClassVar[str | None] = None
    required_tokens: ClassVar[Sequence[str]] = ()

    def __init__(self, context: OutputParserContext) -> None:
        """Look the markers up among the tokenizer's special tokens.

        Raises:
            ConfigError: the tokenizer lacks a required token.
            ValueError: the table is wrong.
        """
        super().__init__(context)
        special = context.tokenizer.special_tokens
        missing = [repr(token) for token in self.required_tokens if token not in special]
        if missing:
            raise ConfigError(
                f"plugin.{context.name}: the format needs special tokens that the model's "
                f"tokenizer lacks: {', '.join(missing)}"
            )
        self._states = self.states()
        _check_table(self._states, self.reasoning)
        self._table = _compile(self._states, context.tokenizer)

    @abstractmethod
    def states(self) -> Mapping[str, ParserState]:
        """Return the states by name; an output begins in the first one.

        If the prompt ends inside reasoning, it begins in the state `reasoning`.
        """

    @property
    def token_ids(self) -> frozenset[int]:
        """The markers that are special tokens."""
        states = self._table.values()
        return frozenset(token for state in states for token in (*state.by_id, *state.calls))

    def markers(self) -> ReasoningMarkers:
        """Return the token ids of the markers that lead to reasoning and from it."""
        if self.reasoning is None:
            return ReasoningMarkers()
        opening = {
            marker
            for state in self._states.values()
            for marker, to in state.moves.items()
            if to == self.reasoning
        }
        start = self.encoded(*sorted(opening))
        end = self.encoded(*self._states[self.reasoning].moves)
        calls = tuple(self._table[self.reasoning].calls)
        used = {*itertools.chain(*start, *end), *calls}
        boundaries = tuple(token for token in self._boundaries if token not in used)
        return ReasoningMarkers(
            start=start, end=end, calls=calls, boundaries=boundaries, blanks=self._blanks()
        )

    def _blanks(self) -> tuple[int, ...] | None:
        """Return the tokens of white space, if reasoning begins in the first state alone."""
        first, *others = self._states.values()
        leads = any(self.reasoning in (*state.moves.values(), state.then) for state in others)
        is_blank = isclass(first.body) and issubclass(first.body, BeforeAnswer | Beginning)
        if leads or not is_blank:
            return None
        return tuple(sorted({token for ids in self.encoded(*_BLANKS) for token in ids}))

    @functools.cached_property
    def _boundaries(self) -> list[int]:
        tokenizer = self.context.tokenizer
        templates = "".join(tokenizer.chat_templates.values())
        named = (token for text, token in tokenizer.special_tokens.items() if text in templates)
        return sorted({*named, *tokenizer.eos_token_ids})

    def encoded(self, *markers: str) -> tuple[tuple[int, ...], ...]:
        """Return the usual token ids of each marker."""
        encode = self.context.tokenizer.encode
        return tuple(tuple(encode(marker, add_special_tokens=False)) for marker in markers)

    def sequence(self, *parts: str | Format) -> SequenceFormat:
        """Return a grammar's parts one after the other; special tokens in a text are so by id."""
        special = self.context.tokenizer.special_tokens
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        elements: list[Format] = []
        for part in parts:
            if not isinstance(part, str):
                elements.append(part)
                continue
            at = 0
            for marker in pattern.finditer(part):
                elements += _constant(part[at : marker.start()])
                elements.append(TokenFormat(token=special[marker.group()]))
                at = marker.end()
            elements += _constant(part[at:])
        return SequenceFormat(elements=elements)

    def tagged(
        self,
        begin: str,
        content: Format,
        end: str = "",
        *,
        required: bool,
        parallel: bool,
        separator: str = "",
    ) -> Format:
        """Return the grammar of an answer with calls between two markers.

        Args:
            begin: a marker, or a text that begins with a marker that only calls have.
            content: grammar of one tag: a call, or a list of calls.
            end: a marker; empty for none.
            required: whether there is nothing but tags.
            parallel: whether there may be several tags.
            separator: between tags where nothing else is.
        """
        tag = TagFormat(begin=self._marker(begin), content=content, end=self._marker(end))
        if required:
            return TagsWithSeparatorFormat(
                tags=[tag], separator=separator, at_least_one=True, stop_after_first=not parallel
            )
        return TriggeredTagsFormat(triggers=[begin], tags=[tag], stop_after_first=not parallel)

    def _marker(self, text: str) -> str | TokenFormat:
        token = self.context.tokenizer.special_tokens.get(text)
        return text if token is None else TokenFormat(token=token)

    def open(self, request: ParserRequest) -> OutputState:
        """Return the state of a new output."""
        first = next(iter(self._states))
        if request.reasoning_open and self.reasoning is not None:
            first = self.reasoning
        return _FormatState(self._table, first, request, self._is_text)

    def _is_text(self, token_id: int) -> bool:
        """Return whether a marker is an added token that is not special: grammars take its text."""
        return bool(self.context.tokenizer.decode([token_id], skip_special_tokens=True))


def any_tag(*formats: Format, parallel: bool) -> Format:
    """Return the grammar of an answer with calls in any of the formats of `tagged`."""
    texts = [format for format in formats if isinstance(format, TriggeredTagsFormat)]
    if len(texts) < len(formats):
        return OrFormat(elements=list(formats))
    return TriggeredTagsFormat(
        triggers=[trigger for format in texts for trigger in format.triggers],
        tags=[tag for format in texts for tag in format.tags],
        stop_after_first=not parallel,
    )


_BLANKS = (" ", "  ", "\t", "\n", "\n\n", "\r\n", " \n")
"""White space that models write before reasoning."""

_TOOL_NAME = re.compile(r"[^\s\"\\<>{}\[\]()|]{1,256}")


def choice_of_calls(
    tools: Mapping[str, Mapping[str, Any]], call: Callable[[str, Mapping[str, Any]], Format]
) -> Format:
    """Return the grammar of a call of one of the tools.

    Args:
        tools: JSON schemas of arguments, by the name of the tool.
        call: returns the grammar of a call, from the tool's name and schema.

    Raises:
        ValueError: a tool has a name that calls cannot have.
    """
    for name in tools:
        if not _TOOL_NAME.fullmatch(name):
            raise ValueError(
                f"expected a tool's name without white space, quotes and brackets, of at most 256 "
                f"characters, got {name!r}"
            )
    calls = [call(name, schema) for name, schema in tools.items()]
    return calls[0] if len(calls) == 1 else OrFormat(elements=calls)


def repeated(content: Format, separator: str = "", *, parallel: bool = True) -> Format:
    """Return the grammar of a part that comes once or, if `parallel`, several times."""
    tag = TagFormat(begin="", content=content)
    return TagsWithSeparatorFormat(
        tags=[tag], separator=separator, at_least_one=True, stop_after_first=not parallel
    )


def _constant(text: str) -> list[Format]:
    return [ConstStringFormat(value=text)] if text else []


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A state as it is matched.

    Attributes:
        search: finds the first marker that is text, or the end of the text if it may begin one;
            None without such markers.
        by_text: the state that each leads to.
        by_id: the same of the markers that are special tokens.
        calls: the state that each token of a call leads to.
    """

    name: str
    body: Callable[[OpenOutput], Body]
    then: str
    search: Callable[[str, int], re.Match[str] | None] | None
    by_text: Mapping[str, str | None]
    by_id: Mapping[int, str | None]
    calls: Mapping[int, str]


def _check_table(states: Mapping[str, ParserState], reasoning: str | None) -> None:
    """Check that a table of states leads nowhere else.

    Raises:
        ValueError: a state is wrong; the message names it.
    """
    if not states:
        raise ValueError("states() returned none; an output begins in the first one")
    for name, state in states.items():
        if not isinstance(state, ParserState):
            raise ValueError(f"the state {name!r}: expected a State, got {state!r}")
        if isabstract(state.body):
            raise ValueError(f"the state {name!r}: its body {state.body.__name__} has no feed")
        for marker, to in (*state.moves.items(), *state.calls.items(), ("then", state.then)):
            if to is not None and to not in states:
                raise ValueError(
                    f"the state {name!r}: {marker!r} leads to {to!r}, which does not exist"
                )
        if "" in state.moves:
            raise ValueError(f"the state {name!r}: expected markers, got an empty one")
        if isclass(state.body) and issubclass(state.body, Reasoning) and reasoning is None:
            raise ValueError(f"the state {name!r} is reasoning: add reasoning = {name!r}")
    if reasoning is not None and reasoning not in states:
        raise ValueError(f"reasoning: expected the name of a state, got {reasoning!r}")


def _compile(states: Mapping[str, ParserState], tokenizer: Tokenizer) -> dict[str, _Compiled]:
    special = tokenizer.special_tokens
    compiled = {}
    for name, state in states.items():
        by_text = {text: to for text, to in state.moves.items() if text not in special}
        by_id = {special[text]: to for text, to in state.moves.items() if text in special}
        for first, second in itertools.permutations(by_text, 2):
            if second.startswith(first):
                raise ValueError(
                    f"the state {name!r} has the markers {first!r} and {second!r}: expected none "
                    f"that begins another one"
                )
        search = re.compile("|".join(map(_pattern, by_text))).search if by_text else None
        calls = {special[text]: to for text, to in state.calls.items() if text in special}
        then = state.then or name
        compiled[name] = _Compiled(name, state.body, then, search, by_text, by_id, calls)
    return compiled


def _pattern(marker: str) -> str:
    pattern = re.escape(marker[-1])
    for character in marker[-2::-1]:
        pattern = rf"{re.escape(character)}(?:{pattern}|\Z)"
    return pattern


class _FormatState:
    """Where an output is in a table of states."""

    def __init__(
        self,
        table: Mapping[str, _Compiled],
        first: str,
        request: ParserRequest,
        is_text: Callable[[int], bool],
    ) -> None:
        self._table, self._output, self._is_text = table, OpenOutput(request), is_text
        self._held = ""  # the end of the text, which may begin a marker
        self._idle = 0  # bodies that took nothing, one after another
        self._state = table[first]
        self._body = self._state.body(self._output)

    @property
    def in_reasoning(self) -> bool:
        return isinstance(self._body, Reasoning) and "reasoning" in self._output.request.roles

    @property
    def _in_string(self) -> bool:
        return self._body.quotes and not self._output.failed

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Take text, but for an end that may begin a marker."""
        events: list[OutputEvent] = []
        if self._held:
            text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            at = self._step(text, at, events)
        return events

    def _step(self, text: str, at: int, events: list[OutputEvent]) -> int:
        search = self._state.search
        match = search(text, at) if search else None
        end = match.start() if match else len(text)
        if end > at:
            at = self._feed_body(text, at, end, events)
            if at < end:
                return at
        if match is None:
            return end
        marker = match.group()
        if marker not in self._state.by_text:
            self._held = marker
            return len(text)
        if self._in_string:
            # Only its first character is known to be no marker.
            return self._feed_body(text, at, at + 1, events)
        self._leave(self._state.by_text[marker], events, marker)
        return match.end()

    def _feed_body(self, text: str, at: int, end: int, events: list[OutputEvent]) -> int:
        body, piece = self._body, text[at:end]
        if body.is_call:
            taken = self._output.feed_call(body, piece, events)
        else:
            taken = body.feed(piece, events)
        if not 0 <= taken <= len(piece):
            raise ValueError(
                f"the body of the state {self._state.name!r} took {taken} characters of "
                f"{len(piece)}"
            )
        self._idle = 0 if taken else self._idle + 1
        if self._idle > len(self._table):
            raise ValueError(f"the state {self._state.name!r} takes no text, and leads to itself")
        if taken < len(piece):
            self._leave(body.next or self._state.then, events)
        return at + taken

    def _leave(self, name: str | None, events: list[OutputEvent], marker: str = "") -> None:
        before, output = self._body, self._output
        output.target = name
        if not output.failed:
            before.close(events, cut=False)
        self._state = self._table[name or before.next or self._state.name]
        self._body = self._state.body(output)
        output.enter(before, self._body, marker, events)
        if not output.failed:
            self._body.open(events)

    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        """Take a special or added token; its text is as any other if it is not a marker.

        In a string, a special token alone is a marker.
        """
        events = self._flush()
        if token_id in self._state.calls and self._output.request.tools:
            self._leave(self._state.calls[token_id], events)
        if token_id in self._state.by_id and not (self._in_string and self._is_text(token_id)):
            self._leave(self._state.by_id[token_id], events, text)
        else:
            self._feed_plain(text, events)
        return events

    def _flush(self) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        text, self._held = self._held, ""
        self._feed_plain(text, events)
        return events

    def _feed_plain(self, text: str, events: list[OutputEvent]) -> None:
        at = 0
        while at < len(text):
            at = self._feed_body(text, at, len(text), events)

    def finish(self) -> Sequence[OutputEvent]:
        events = self._flush()
        if not self._output.failed:
            self._body.close(events, cut=True)
        is_open = self._output.has_begun and self._body.is_call and not self._output.failed
        if self._output.in_call or is_open:
            self._output.fail_call("the output ended inside it", events)
        return events
