"""Output parsers as a table: states of an output, and the markers that lead from one to another."""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isabstract, isclass
from typing import Any, ClassVar

from hardpoint.errors import ConfigError
from hardpoint.plugins.markers import ReasoningMarkers
from hardpoint.plugins.output_parser import (
    ContentText,
    MalformedText,
    OutputEvent,
    OutputParser,
    OutputParserContext,
    OutputState,
    ParserRequest,
    ReasoningText,
    ToolCallBegin,
    ToolCallEnd,
)
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
from hardpoint.plugins.tokenizer import Tokenizer

__all__ = [
    "Beginning",
    "Between",
    "Body",
    "Content",
    "FormatParser",
    "Ignored",
    "OpenOutput",
    "Reasoning",
    "State",
    "ToolName",
    "Whole",
    "choice_of_calls",
    "repeated",
]


@dataclass
class OpenOutput:
    """What the bodies of one output share.

    Attributes:
        request: whose output it is.
        tool: name of the call that comes or is open; empty without one.
        call_id: of that call, where the format has one.
        in_call: whether a call has begun and not ended.
        failed: why the call cannot go on; its text is content then, until something new starts.
        notes: what a body leaves for another one.
    """

    request: ParserRequest
    tool: str = ""
    call_id: str | None = None
    in_call: bool = False
    failed: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    _text: list[str] = field(default_factory=list)  # of the call, before the piece being fed
    _piece: str = ""
    _from: int = 0  # where the call begins in the piece

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of the arguments of `tool`; empty if the request does not have the tool."""
        return self.request.tools.get(self.tool, {})

    def begin_call(self, events: list[OutputEvent]) -> None:
        """Begin the call of `tool`, if the output has its name.

        Where no calls are to be found, it fails at once: its text is content.
        """
        if "tools" not in self.request.roles:
            self.fail_call("", events)
        elif self.tool:
            events.append(ToolCallBegin(self.tool, self.call_id))
            self.in_call = True
        self.call_id = None

    def end_call(self, events: list[OutputEvent], at: int = 0) -> None:
        """End the call, if one is open.

        Args:
            events: to add to.
            at: how much of the text that is being fed belongs to it.
        """
        if self.in_call:
            events.append(ToolCallEnd())
        self.in_call, self.tool = False, ""
        self._text, self._from = [], at

    def fail_call(self, reason: str, events: list[OutputEvent]) -> None:
        """End a call that cannot go on: its text is content, all that is being fed included."""
        text = "".join(self._text) + self._piece[self._from :]
        self.failed = f"a call is malformed: {reason}"
        if text or self.in_call:
            events.append(self._void(text))
        self._text, self._piece, self._from = [], "", 0
        self.in_call, self.tool, self.call_id = False, "", None

    def feed_call(self, body: Body, piece: str, events: list[OutputEvent]) -> int:
        """Feed the body of a call, and keep its text, which is content if the call fails."""
        if self.failed:
            events.append(self._void(piece))
            return len(piece)
        self._piece, self._from = piece, 0
        taken = body.feed(piece, events)
        if self.failed:
            return len(piece)
        self._text.append(piece[self._from : taken])
        self._piece, self._from = "", 0
        return taken

    def _void(self, text: str) -> OutputEvent:
        """Return the event of text of a call that failed."""
        return (
            MalformedText(text, self.failed) if "tools" in self.request.roles else ContentText(text)
        )

    def enter(self, before: Body, body: Body, marker: str, events: list[OutputEvent]) -> None:
        """Go from one body to another, at a marker.

        A marker that starts a call is part of it, and of one that failed otherwise.
        """
        reasons = "reasoning" in self.request.roles
        if marker and self.failed and not (body.is_start and body.is_call):
            events.append(self._void(marker))
        elif (
            marker
            and not reasons
            and (isinstance(before, Reasoning) or isinstance(body, Reasoning))
        ):
            events.append(ContentText(marker))
        if body.is_start:
            self.failed = ""
        if not body.is_call:
            self._text = []
        elif not self.failed:
            self._text.append(marker)


class Body(ABC):
    """What the text of a state means; a new one each time that the state is entered.

    Attributes:
        next: the state to go to when the body ends, or at a marker that leads to None.
        is_call: whether its text is part of a call, or may become one.
        is_start: whether a call, or something else, starts here: one that failed before is over,
            and the marker before it is part of it.
    """

    next: str | None = None
    is_call: ClassVar[bool] = True
    is_start: ClassVar[bool] = False

    def __init__(self, output: OpenOutput) -> None:
        """Begin."""
        self.output = output

    def open(self, events: list[OutputEvent]) -> None:  # noqa: B027 - most need none
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

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:  # noqa: B027 - as `open`
        """End the body.

        Args:
            events: to add to.
            cut: whether the output ends here, and no marker.
        """


class Content(Body):
    """Text of the answer."""

    is_call = False
    is_start = True

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take all of it."""
        events.append(ContentText(text))
        return len(text)


class Reasoning(Body):
    """Text of the reasoning."""

    is_call = False
    is_start = True

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take all of it."""
        is_found = "reasoning" in self.output.request.roles
        events.append(ReasoningText(text) if is_found else ContentText(text))
        return len(text)


class Beginning(Body):
    """The white space at the beginning of an output, whose first character says what it is.

    Attributes:
        begins: the state that each character leads to; any other one leads to `content`, to which
            the white space belongs then.
    """

    is_start = True
    begins: ClassVar[Mapping[str, str]]

    def __init__(self, output: OpenOutput) -> None:
        """Begin without any."""
        super().__init__(output)
        self._space: list[str] = []

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take white space."""
        rest = text.lstrip()
        space = len(text) - len(rest)
        self._space.append(text[:space])
        if rest:
            self.next = self.begins.get(rest[0], "content")
            if self.next == "content":
                events.append(ContentText("".join(self._space)))
        return space

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """Give white space that nothing followed."""
        if cut:
            events.append(ContentText("".join(self._space)))


class Ignored(Body):
    """Text that belongs to nothing."""

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        """Take all of it."""
        return len(text)


class Between(Body):
    """White space between calls or messages, which is left out; other text is malformed."""

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take all of it."""
        if not text.isspace():
            self.output.fail_call("there is text where one is expected", events)
        return len(text)


class Whole(Body):
    """Text that is needed as a whole: `finish` gets it when the body ends."""

    def __init__(self, output: OpenOutput) -> None:
        """Begin with none."""
        super().__init__(output)
        self._parts: list[str] = []

    def feed(self, text: str, events: list[OutputEvent]) -> int:  # noqa: ARG002
        """Take all of it."""
        self._parts.append(text)
        return len(text)

    @abstractmethod
    def finish(self, text: str, events: list[OutputEvent]) -> None:
        """Take the whole text, and add its events."""

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """Give the text, unless the output ends here."""
        if not cut:
            self.finish("".join(self._parts), events)


class ToolName(Body):
    """The name of the tool whose arguments come next.

    Attributes:
        ends_at: a character that begins the arguments where no marker does.
    """

    is_start = True
    ends_at: str | None = None
    longest: ClassVar[int] = 256

    def __init__(self, output: OpenOutput) -> None:
        """Begin with no name."""
        super().__init__(output)
        self._text = ""

    def parse(self, text: str) -> tuple[str, str | None]:
        """Return the tool's name, and the call's id if the text has one."""
        return text.strip(), None

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take the name; what is longer than any name is malformed."""
        end = text.find(self.ends_at) if self.ends_at else -1
        end = end if end >= 0 else len(text)
        self._text += text[:end]
        if len(self._text) > self.longest:
            self.output.fail_call("its name is too long", events)
        return end

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        """Leave the name and the id for the arguments."""
        name, call_id = self.parse(self._text)
        if name.split() == [name] and not cut:
            self.output.tool, self.output.call_id = name, call_id
        else:
            reason = "the output ended inside it" if cut else "it has no name"
            self.output.fail_call(reason, events)


@dataclass(frozen=True)
class State:
    """A state of the output.

    Attributes:
        body: what its text means.
        moves: the state to which each marker leads; None is the body's `next`. A marker is a text;
            where the tokenizer has it as a special token, only that token is the marker. None of
            a state begins another one of it.
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
        required_tokens: the markers that have to be special tokens of the tokenizer, because
            users could write their text.
    """

    reasoning: ClassVar[str | None] = None
    required_tokens: ClassVar[Sequence[str]] = ()

    def __init__(self, context: OutputParserContext) -> None:
        """Look the markers up among the tokenizer's special tokens.

        Raises:
            ConfigError: the tokenizer lacks one that has to be there.
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
            return ReasoningMarkers()
        opening = {
            marker
            for state in self._states.values()
            for marker, to in state.moves.items()
            if to == self.reasoning
        }
        return ReasoningMarkers(
            start=self.encoded(*sorted(opening)),
            end=self.encoded(*self._states[self.reasoning].moves),
        )

    def encoded(self, *markers: str) -> tuple[tuple[int, ...], ...]:
        """Return the usual token ids of each marker."""
        encode = self.context.tokenizer.encode
        return tuple(tuple(encode(marker, add_special_tokens=False)) for marker in markers)

    def sequence(self, *parts: str | Format) -> SequenceFormat:
        """Return a grammar's parts one after the other; special tokens in a text are so by id."""
        special = self.context.tokenizer.special_tokens
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        found = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        elements: list[Format] = []
        for part in parts:
            if not isinstance(part, str):
                elements.append(part)
                continue
            at = 0
            for marker in found.finditer(part):
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
        """Return the grammar of an answer whose calls are between two markers.

        Args:
            begin: a marker, or a text that begins with one that only calls have.
            content: of one tag: a call, or a list of calls.
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
        return _FormatState(self._table, first, request)


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
    """

    name: str
    body: Callable[[OpenOutput], Body]
    then: str
    search: Callable[[str, int], re.Match[str] | None] | None
    by_text: Mapping[str, str | None]
    by_id: Mapping[int, str | None]


def _check_table(states: Mapping[str, State], reasoning: str | None) -> None:
    """Check that a table of states leads nowhere else.

    Raises:
        ValueError: saying which state is wrong.
    """
    if not states:
        raise ValueError("states() returned none; an output begins in the first one")
    for name, state in states.items():
        if not isinstance(state, State):
            raise ValueError(f"the state {name!r}: expected a State, got {state!r}")
        if isabstract(state.body):
            raise ValueError(f"the state {name!r}: its body {state.body.__name__} has no feed")
        for marker, to in (*state.moves.items(), ("then", state.then)):
            if to is not None and to not in states:
                raise ValueError(f"the state {name!r}: {marker!r} leads to {to!r}, which is none")
        if "" in state.moves:
            raise ValueError(f"the state {name!r}: expected markers, got an empty one")
        if isclass(state.body) and issubclass(state.body, Reasoning) and reasoning is None:
            raise ValueError(f"the state {name!r} is reasoning: add reasoning = {name!r}")
    if reasoning is not None and reasoning not in states:
        raise ValueError(f"reasoning: expected the name of a state, got {reasoning!r}")


def _compile(states: Mapping[str, State], tokenizer: Tokenizer) -> dict[str, _Compiled]:
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
        compiled[name] = _Compiled(name, state.body, state.then or name, search, by_text, by_id)
    return compiled


def _pattern(marker: str) -> str:
    """Return a pattern of a marker, or of a beginning of it at the end of the text."""
    pattern = re.escape(marker[-1])
    for character in marker[-2::-1]:
        pattern = rf"{re.escape(character)}(?:{pattern}|\Z)"
    return pattern


class _FormatState:
    """Where an output is in a table of states."""

    def __init__(self, table: Mapping[str, _Compiled], first: str, request: ParserRequest) -> None:
        self._table, self._output = table, OpenOutput(request)
        self._held = ""  # the end of the text, which may begin a marker
        self._idle = 0  # bodies that took nothing, one after another
        self._state = table[first]
        self._body = self._state.body(self._output)

    @property
    def in_reasoning(self) -> bool:
        """Whether the state is one of reasoning."""
        return isinstance(self._body, Reasoning) and "reasoning" in self._output.request.roles

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
        """Take text up to the next marker, and the marker; return where the rest begins."""
        search = self._state.search
        found = search(text, at) if search else None
        end = found.start() if found else len(text)
        if end > at:
            at = self._feed_body(text, at, end, events)
            if at < end:
                return at
        if found is None:
            return end
        marker = found.group()
        if marker not in self._state.by_text:
            self._held = marker
            return len(text)
        if self._body.quotes and not self._output.failed:
            # Only its first character is known to be no marker.
            return self._feed_body(text, at, at + 1, events)
        self._leave(self._state.by_text[marker], events, marker)
        return found.end()

    def _feed_body(self, text: str, at: int, end: int, events: list[OutputEvent]) -> int:
        """Give the body text; return where it ended, which leads to the next state."""
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
        if not output.failed:
            before.close(events, cut=False)
        self._state = self._table[name or before.next or self._state.name]
        self._body = self._state.body(output)
        output.enter(before, self._body, marker, events)
        if not output.failed:
            self._body.open(events)

    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        """Take a special token; where it is no marker, its text is as any other."""
        events = self._flush()
        if token_id in self._state.by_id:
            self._leave(self._state.by_id[token_id], events, text)
        else:
            self._feed_plain(text, events)
        return events

    def _flush(self) -> list[OutputEvent]:
        """Take the text that waited to become a marker."""
        events: list[OutputEvent] = []
        text, self._held = self._held, ""
        self._feed_plain(text, events)
        return events

    def _feed_plain(self, text: str, events: list[OutputEvent]) -> None:
        """Take text that has no markers."""
        at = 0
        while at < len(text):
            at = self._feed_body(text, at, len(text), events)

    def finish(self) -> Sequence[OutputEvent]:
        """Take what waited, and end."""
        events = self._flush()
        if not self._output.failed:
            self._body.close(events, cut=True)
        if self._output.in_call:
            self._output.fail_call("the output ended inside it", events)
        return events
