"""The conformance suite for output parsers; the built-in ones pass it too."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import strategies as st

from hardpoint.plugins import (
    Finish,
    OutputParser,
    OutputParserContext,
    ParserRequest,
    ReasoningMarkers,
    ReasoningTracker,
    Tokenizer,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.output_parser import (
    ContentText,
    MalformedText,
    OutputEvent,
    OutputState,
    ReasoningText,
    Role,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.plugins.structured import Format, TagFormat, TokenFormat, walk_formats
from hardpoint.plugins.text.output_parser import join_events
from hardpoint.testing.component_suite import GeneralComponentSuite, LiveComponentSuite
from hardpoint.testing.engine_access import load_tokenizer
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.pace import PYTHON, cpu_seconds, slowdown
from hardpoint.testing.scripted_tokenizer import ByteTokenizer
from hardpoint.testing.snapshots import without_growth
from hardpoint.testing.suite import Violation, checks, short_repr
from hardpoint.typed import prepared_type

from . import output_parser_rules as rules

__all__ = ["OutputParserSuite", "OutputSample"]

Piece = str | int
"""A part of an output as a state is fed: text, or one of the parser's `token_ids`."""

_BOTH = (True, False)
_TOOLS: Mapping[str, Mapping[str, Any]] = {
    "now": {"type": "object", "properties": {}},
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
_MICROSECONDS = 5.0  # per character; a usual format takes 0.1 to 1
_LENGTH = 1 << 18  # of an adversarial text; what copies it all for a token takes far too long


@dataclass(frozen=True)
class OutputSample:
    """An output and its expected parts.

    Attributes:
        text: as the model writes it, markers included.
        reasoning: the reasoning in the text.
        content: the content in the text.
        calls: name and arguments of each.
        malformed: whether a call in it is malformed; its text is content.
        reasoning_open: whether the prompt ends inside reasoning.
        tools: JSON schemas of arguments by the name of the tool, for formats that need them.
    """

    text: str
    reasoning: str = ""
    content: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    malformed: bool = False
    reasoning_open: bool = False
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def request(self) -> ParserRequest:
        """The request for this output."""
        return ParserRequest(reasoning_open=self.reasoning_open, tools=self.tools)


def _samples(suite: OutputParserSuite) -> Iterator[tuple[OutputSample]]:
    return ((sample,) for sample in suite.samples)


class OutputParserSuite(GeneralComponentSuite, LiveComponentSuite):
    """Base class of a test class, which sets `parser` and `samples`; `options` if it has some.

    Attributes:
        parser: the class under test.
        samples: outputs as models write them.
        special_tokens: special tokens of the tokenizer that the parser gets, which has one token
            per byte, too.
        tokenizer: another one to give it: a tokenizer, or the folder of one.
    """

    kind = "reasoning_parsers"  # of a parser of tools only: "tool_parsers"
    parser: ClassVar[type[OutputParser]]
    samples: ClassVar[Sequence[OutputSample]]
    special_tokens: ClassVar[Sequence[str]] = ()
    tokenizer: ClassVar[Tokenizer | Path | str | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if getattr(getattr(cls, "parser", None), "roles", ()) == ("tools",):
            cls.kind = "tool_parsers"

    def _component(self) -> type[Component]:
        return self.parser

    def _check_construction(self) -> None:
        if not self.samples:
            raise Violation(
                "samples is empty, so nothing would be checked",
                "set `samples` of the test class to outputs as the model writes them: usual ones, "
                "malformed ones and cut ones",
            )
        super()._check_construction()

    @checks(rules.SAMPLES, cases=_samples)
    def test_samples(self, sample: OutputSample) -> None:
        """Each sample has the reasoning, content and calls that it states."""
        events = self._parsed(sample)
        self._check_calls(repr(sample.text), events)
        reasoning = "".join(e.text for e in events if isinstance(e, ReasoningText))
        content = "".join(e.text for e in events if isinstance(e, ContentText | MalformedText))
        malformed = any(isinstance(e, MalformedText) for e in events)
        calls = [(name, dict(arguments)) for name, arguments in sample.calls]
        for part, parsed, stated in (
            ("reasoning", reasoning, sample.reasoning),
            ("content", content, sample.content),
            ("calls", _calls(events), calls),
            ("malformed", malformed, sample.malformed),
        ):
            if parsed != stated:
                raise rules.SAMPLES.violation(
                    f"{sample.text!r}: its {part} became {short_repr(parsed)}, stated is "
                    f"{short_repr(stated)}"
                )

    @checks(rules.SPLITS, cases=_samples)
    def test_splits(self, sample: OutputSample) -> None:
        """Cut at every character and token, and in pieces of every size, it gives the same
        events.
        """
        whole, text = self._parsed(sample), sample.text
        for size in range(1, len(text)):
            self._check_same(sample.request, [text], self._pieces(text, size), whole)
        pieces = self._pieces(text)
        for index, piece in enumerate(pieces):
            before, after = pieces[:index], pieces[index + 1 :]
            for at in range(1, len(piece) if isinstance(piece, str) else 0):
                assert isinstance(piece, str)
                cut = [*before, piece[:at], piece[at:], *after]
                self._check_same(sample.request, [text], cut, whole)
        self._check_same(sample.request, [text], self._by_token(text), whole)

    def test_any_text(self) -> None:
        """Every text and token is taken, in any order; the calls in it are well formed."""

        def check(pieces: list[Piece], reasoning_open: bool) -> None:
            request = ParserRequest(reasoning_open=reasoning_open)
            events = self._events(request, pieces)
            self._check_calls(short_repr(pieces), events)
            by_character = [c for p in pieces for c in (p if isinstance(p, str) else [p])]
            self._check_same(request, pieces, by_character, events)

        pieces = st.sampled_from(self._fragments) | st.text(max_size=4)
        self._search(
            rules.ANY_TEXT.text,
            200,
            check,
            pieces=st.lists(pieces, max_size=12),
            reasoning_open=st.booleans(),
        )

    @checks(rules.CUTS, cases=_samples)
    def test_cuts(self, sample: OutputSample) -> None:
        """A truncated output gives the beginning of the parts of the whole one."""
        whole = self._parsed(sample)
        pieces = self._pieces(sample.text, 1)
        for count in range(len(pieces)):
            cut = pieces[:count]
            text = f"{sample.text!r}, cut after {count} pieces,"
            self._check_calls(text, self._events(sample.request, cut))
            events = self._events(sample.request, cut, finish=False)
            if not _is_beginning(events, whole):
                raise rules.CUTS.violation(
                    f"{text} gave {short_repr(events)} before its end, and the whole one "
                    f"{short_repr(whole)}"
                )

    @checks(rules.TOKENS, cases=_samples)
    def test_tokens(self, sample: OutputSample) -> None:
        """The text of a special token is not a marker; other text instead has the same effect."""
        if not self._subject.token_ids:
            pytest.skip("token_ids is empty: it takes no special token as an id")
        taken = [p for p in self._pieces(sample.text) if isinstance(p, int)]
        if not taken:
            return
        other = sample.text
        for text, token in self._tokenizer.special_tokens.items():
            other = other.replace(text, "x" * len(text)) if token in taken else other
        events = self._events(sample.request, [sample.text])

        def found(events: Sequence[OutputEvent]) -> int:
            begins = ToolCallBegin if sample.reasoning_open else (ToolCallBegin, ReasoningText)
            return sum(isinstance(event, begins) for event in events)

        if found(events) > found(self._events(sample.request, [other])):
            raise rules.TOKENS.violation(
                f"{sample.text!r} as a text without special tokens became {short_repr(events)}"
            )

    @checks(rules.MARKERS, cases=_samples)
    def test_markers(self, sample: OutputSample) -> None:
        """At every token, `markers()` and `in_reasoning` agree, also with the start marker in the
        prompt.
        """
        markers = self._subject.markers()
        if not isinstance(markers, ReasoningMarkers):
            raise rules.MARKERS.violation(
                f"markers returned {short_repr(markers)}, no ReasoningMarkers"
            )
        if not sample.tools:
            markers = msgspec.structs.replace(markers, calls=())
        tracker = ReasoningTracker(markers)
        opening = markers.start[0] if sample.reasoning_open and markers.start else ()
        position = tracker.after(opening)
        request = ParserRequest(reasoning_open=position.inside, tools=sample.tools)
        state = self._subject.open(request)
        stream = self._tokenizer.decode_stream([], skip_special_tokens=False)
        text = ""
        for token in (None, *self._tokenizer.encode(sample.text, add_special_tokens=False)):
            if token is not None:
                position = tracker.advance(position, token)
                piece = stream.step(token) or ""
                text += piece
                if token in self._subject.token_ids:
                    state.feed_token(token, piece)
                else:
                    state.feed(piece)
            if position.inside != state.in_reasoning:
                raise rules.MARKERS.violation(
                    f"{opening} is the prompt, and the output so far {text!r}: by the markers "
                    f"{short_repr(markers)} it is {_inside(position.inside)} reasoning, by "
                    f"in_reasoning {_inside(state.in_reasoning)}"
                )

    @checks(rules.ROLES, cases=_samples)
    def test_roles(self, sample: OutputSample) -> None:
        """A parser of two roles finds the same parts with each role alone as with both; the rest is
        content.
        """
        if len(self.parser.roles) == 1:
            pytest.skip(f"its only role is {self.parser.roles[0]!r}")
        both = self._parsed(sample)
        finds: tuple[tuple[Role, tuple[type, ...]], ...] = (
            ("reasoning", (ReasoningText,)),
            ("tools", (ToolCallBegin, ToolCallArguments, ToolCallEnd, MalformedText)),
        )
        for role, types in finds:
            if role == "tools" and sample.reasoning_open:
                continue  # without reasoning, the output begins elsewhere
            request = ParserRequest(
                roles=(role,), reasoning_open=sample.reasoning_open, tools=sample.tools
            )
            events = self._events(request, self._pieces(sample.text))
            wanted = join_events([event for event in both if isinstance(event, types)])
            if join_events([e for e in events if not isinstance(e, ContentText)]) != wanted:
                raise rules.ROLES.violation(
                    f"{sample.text!r} with the role {role!r} alone became {short_repr(events)}, "
                    f"and with both {short_repr(both)}"
                )
            content = "".join(e.text for e in events if isinstance(e, ContentText | MalformedText))
            lost = [name for name, _ in sample.calls if role == "reasoning" and name not in content]
            if lost or (role == "tools" and sample.reasoning not in content):
                raise rules.ROLES.violation(
                    f"{sample.text!r} with the role {role!r} alone has the content {content!r}, "
                    f"which lacks {lost or sample.reasoning!r}"
                )

    def test_call_format(self) -> None:
        """`call_format` returns a grammar of the calls of any tools; the tokenizer has its special
        tokens. A class may leave it out: then calls cannot be required.
        """
        if "tools" not in self.parser.roles:
            pytest.skip("its roles have no tools: it parses no calls")
        self._run_checks(rules.CALL_FORMAT.text, self._check_call_formats)

    @checks(rules.INDEPENDENT)
    def test_independent(self) -> None:
        """Two outputs that come in turns are parsed as each alone."""
        for first in self.samples:
            for second in self.samples:
                self._check_turns(first, second)

    @checks(rules.LINEAR)
    def test_linear(self) -> None:
        """Long texts of fragments take the same time per character."""
        texts = [piece for piece in self._fragments if isinstance(piece, str)]
        for index, sample in enumerate(self.samples):
            characters = self._pieces(sample.text, 1)
            opened = characters[: len(characters) // 2]
            for text in {texts[index % len(texts)], "x" if index == 0 else texts[-index]}:
                self._check_time(sample.request, opened, text)

    @checks("memory: nothing grows with the number of outputs")
    def test_memory(self) -> None:
        """Nothing grows with the number of outputs."""
        description = f"the parser: while {100 * len(self.samples)} outputs were parsed"
        for _ in without_growth(self._subject, 100, description, "keep nothing of an output"):
            for sample in self.samples:
                self._parsed(sample)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return ByteTokenizer(self.special_tokens)
        return tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        parser = self._make()

        def use(number: int) -> None:
            sample = self.samples[number % len(self.samples)]
            state = parser.open(sample.request)
            for piece in self._pieces(sample.text, 1):
                _fed(state, piece)
            state.finish()

        yield InUse(parser, use)

    @cached_property
    def _subject(self) -> OutputParser:
        return self._make()

    def _make(self) -> OutputParser:
        arguments = prepared_type(self.parser)()
        parser: OutputParser = self._build(
            OutputParserContext, tokenizer=self._tokenizer, arguments=arguments
        )
        return parser

    @cached_property
    def _fragments(self) -> list[Piece]:
        pieces = [p for sample in self.samples for p in self._pieces(sample.text)]
        parts: list[Piece] = []
        for piece in pieces:
            parts += piece.split() if isinstance(piece, str) else [piece]
        characters = "{}[]()\"',:;<>|/= \n\\"
        return [*dict.fromkeys([*parts, *characters, "é", "🙂", "</", "\\u00", "1,"])]

    def _pieces(self, text: str, size: int | None = None) -> list[Piece]:
        pieces: list[Piece] = []
        for part in self._parts(text):
            if isinstance(part, int):
                pieces.append(part)
            else:
                step = size or len(part)
                pieces += [part[at : at + step] for at in range(0, len(part), step)]
        return pieces

    def _parts(self, text: str) -> Iterator[Piece]:
        taken = self._subject.token_ids
        special = {t: i for t, i in self._tokenizer.special_tokens.items() if i in taken}
        while text:
            matches = [
                (at, -len(token), token) for token in special if (at := text.find(token)) >= 0
            ]
            if not matches:
                yield text
                return
            at, _, token = min(matches)
            if at:
                yield text[:at]
            yield special[token]
            text = text[at + len(token) :]

    def _by_token(self, text: str) -> list[Piece]:
        taken = self._subject.token_ids
        stream = self._tokenizer.decode_stream([], skip_special_tokens=False)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        pieces: list[Piece] = []
        for token in ids:
            piece = stream.step(token)
            if token in taken:
                pieces.append(token)
            elif piece:
                pieces.append(piece)
        return pieces

    def _events(
        self, request: ParserRequest, pieces: Sequence[Piece], *, finish: bool = True
    ) -> list[OutputEvent]:
        """Return the events of a new output, joined.

        Raises:
            Violation: the parser raised an exception, or returned something else.
        """
        events: list[OutputEvent] = []
        try:
            state = self._subject.open(request)
            for piece in pieces:
                events += _fed(state, piece)
            if finish:
                events += state.finish()
        except Exception as cause:
            raise rules.ANY_TEXT.violation(
                f"{short_repr(pieces)} raised {type(cause).__name__}: {cause}"
            ) from cause
        for event in events:
            if not isinstance(event, OutputEvent):
                raise rules.ANY_TEXT.violation(
                    f"{short_repr(pieces)} gave {event!r}, which is no event"
                )
        return join_events(events)

    def _parsed(self, sample: OutputSample) -> list[OutputEvent]:
        return self._events(sample.request, self._pieces(sample.text))

    def _check_same(
        self,
        request: ParserRequest,
        original: Sequence[Piece],
        pieces: Sequence[Piece],
        whole: Sequence[OutputEvent],
    ) -> None:
        events = self._events(request, pieces)
        if events != whole:
            raise rules.SPLITS.violation(
                f"{short_repr(original)} in the pieces {short_repr(pieces)} became "
                f"{short_repr(events)}, and whole {short_repr(whole)}"
            )

    def _check_calls(self, text: str, events: Sequence[OutputEvent]) -> None:
        arguments: str | None = None
        for event in events:
            match event:
                case ToolCallBegin(name, _):
                    if arguments is not None or not name:
                        raise rules.CALLS.violation(
                            f"{text}: {event} inside a call, or without a name"
                        )
                    arguments = ""
                case ToolCallArguments(part):
                    if arguments is None:
                        raise rules.CALLS.violation(f"{text}: {event} outside of a call")
                    arguments += part
                case ToolCallEnd():
                    if arguments is None or not _is_object(arguments):
                        raise rules.CALLS.violation(
                            f"{text}: a call ended with the arguments {arguments!r}"
                        )
                    arguments = None
                case MalformedText():
                    arguments = None

    def _check_call_formats(self) -> None:
        now = {"now": _TOOLS["now"]}
        for number, (tools, required, parallel) in enumerate(
            itertools.product((now, _TOOLS), _BOTH, _BOTH)
        ):
            call = f"call_format({list(tools)}, required={required}, parallel={parallel})"
            try:
                grammar = self._subject.call_format(tools, required=required, parallel=parallel)
            except NotImplementedError:
                if not number:
                    pytest.skip("call_format gives no grammar: calls cannot be required")
                return
            except Exception as cause:
                raise rules.CALL_FORMAT.violation(
                    f"{call} raised {type(cause).__name__}: {cause}"
                ) from cause
            if not isinstance(grammar, Format):
                raise rules.CALL_FORMAT.violation(
                    f"{call} returned {short_repr(grammar)}, no Format"
                )
            self._check_special_tokens(call, grammar)

    def _check_special_tokens(self, call: str, format: Format) -> None:
        special = self._tokenizer.special_tokens
        for part in walk_formats(format):
            ends = (part.begin, part.end) if isinstance(part, TagFormat) else (part,)
            for token in (end.token for end in ends if isinstance(end, TokenFormat)):
                if token not in special and token not in special.values():
                    raise rules.CALL_FORMAT.violation(
                        f"{call} has TokenFormat({token!r}), which the tokenizer has not among "
                        f"its special tokens"
                    )

    def _check_turns(self, *samples: OutputSample) -> None:
        """Check that samples that come in turns are as each alone."""
        outputs = [(self._subject.open(s.request), self._pieces(s.text, 1)) for s in samples]
        events_by_sample: list[list[OutputEvent]] = [[] for _ in samples]
        for at in range(max(len(pieces) for _, pieces in outputs)):
            for events, (state, pieces) in zip(events_by_sample, outputs, strict=True):
                for piece in pieces[at : at + 1]:
                    events += _fed(state, piece)
        for sample, events, (state, _) in zip(samples, events_by_sample, outputs, strict=True):
            events += state.finish()
            alone = self._parsed(sample)
            if join_events(events) != alone:
                raise rules.INDEPENDENT.violation(
                    f"{sample.text!r} in turns with another output became "
                    f"{short_repr(join_events(events))}, and alone {short_repr(alone)}"
                )

    def _check_time(self, request: ParserRequest, opened: Sequence[Piece], text: str) -> None:
        state = self._subject.open(request)
        for piece in opened:
            _fed(state, piece)
        repeated = text * (_LENGTH // len(text) + 1)
        start, limit = cpu_seconds(), _MICROSECONDS
        spent = 0.0
        for at in range(0, _LENGTH, 4):
            state.feed(repeated[at : at + 4])
            if at % 4096 == 0:
                spent = (cpu_seconds() - start) / _LENGTH * 1e6
            if spent > limit:  # as on a usual machine that does nothing else
                limit = max(limit, _MICROSECONDS * slowdown(PYTHON, cpu_seconds))
            if spent > limit:
                raise rules.LINEAR.violation(
                    f"{text!r} again and again, token by token, behind {short_repr(opened)}: "
                    f"after {at} of {_LENGTH} characters it had taken more than "
                    f"{_MICROSECONDS:g} microseconds for each of all of them"
                )
        state.finish()


def _fed(state: OutputState, piece: Piece) -> Sequence[OutputEvent]:
    return state.feed_token(piece, "") if isinstance(piece, int) else state.feed(piece)


def _inside(inside: object) -> str:
    return "inside" if inside else "outside of"


def _is_beginning(events: Sequence[OutputEvent], whole: Sequence[OutputEvent]) -> bool:
    """Return whether joined events are the beginning of others; the last text may go on."""
    if not events:
        return True
    *complete, last = events
    if complete != list(whole[: len(complete)]) or len(whole) < len(events):
        return False
    other = whole[len(complete)]
    if isinstance(last, ToolCallBegin | ToolCallEnd | Finish) or type(last) is not type(other):
        return last == other
    return other.text.startswith(last.text)


def _calls(events: Sequence[OutputEvent]) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []
    name, text = "", ""
    for event in events:
        match event:
            case ToolCallBegin(began, _):
                name, text = began, ""
            case ToolCallArguments(part):
                text += part
            case ToolCallEnd():
                calls.append((name, json.loads(text)))
    return calls


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
