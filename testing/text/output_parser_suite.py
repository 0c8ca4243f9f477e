"""The conformance suite for output parsers; the built-in ones pass it too."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st

from hardpoint.plugins import (
    ContentText,
    MalformedText,
    OutputEvent,
    OutputParser,
    OutputParserContext,
    OutputState,
    ParserRequest,
    ReasoningMarkers,
    ReasoningText,
    Tokenizer,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.plugins.arguments import prepared_type
from hardpoint.plugins.component import Component
from hardpoint.plugins.output_parser import join_events
from hardpoint.testing.component_suite import ComponentSuite
from hardpoint.testing.engine_access import load_tokenizer
from hardpoint.testing.snapshots import count_elements
from hardpoint.testing.suite import Rule, Violation, reject_replaced_tests, short_repr

SPLITS = Rule(
    "splits: the events of an output do not depend on how its text is cut",
    "hold back the end of a piece that may begin a marker, and nothing else",
)
SAMPLES = Rule(
    "samples: each sample has the reasoning, content and calls that it states",
    "compare the parser's markers with the sample's text",
)
ANY_TEXT = Rule(
    "any text: a parser takes every text, and gives events only",
    "what is malformed is MalformedText; nothing may raise",
)
INDEPENDENT = Rule(
    "independent: two outputs share nothing",
    "keep what belongs to an output in its state, and nothing in the parser",
)
CALLS = Rule(
    "calls: a call begins, has arguments, and ends; complete arguments are a JSON object",
    "give ToolCallEnd only after ToolCallBegin and the whole arguments, and MalformedText where "
    "a call cannot go on",
)
LINEAR = Rule(
    "linear: a text twice as long takes twice as long",
    "look at every character once: no search from the beginning, no growing string that is copied",
)


@dataclass(frozen=True)
class Sample:
    """An output, and what it consists of.

    Attributes:
        text: as the model writes it, markers included.
        reasoning: of it.
        content: of it.
        calls: name and arguments of each.
        reasoning_open: whether the prompt ends inside reasoning.
        tools: JSON schemas of arguments by the name of the tool, for formats that need them.
    """

    text: str
    reasoning: str = ""
    content: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    reasoning_open: bool = False
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def request(self) -> ParserRequest:
        """The request whose output it is."""
        return ParserRequest(reasoning_open=self.reasoning_open, tools=self.tools)


class OutputParserSuite(ComponentSuite):
    """Base class of a test class, which sets `parser` and `samples`; `options` if it has some.

    Attributes:
        parser: the class under test.
        samples: outputs as models write them.
        tokenizer: what it gets: a tokenizer, or the folder of one; None is one token per byte.
    """

    kind = "reasoning_parsers"
    parser: ClassVar[type[OutputParser]]
    samples: ClassVar[Sequence[Sample]]
    tokenizer: ClassVar[Tokenizer | Path | str | None] = None

    def _component(self) -> type[Component]:
        return self.parser

    def test_contract(self) -> None:
        """The class states its contract and can be built; its options survive pickling."""
        self._run_checks(
            "contract: the loader can check and build the class",
            lambda: reject_replaced_tests(type(self), OutputParserSuite),
            self._check_contract,
            lambda: self._make().close(),
        )

    def test_samples(self) -> None:
        """Each sample has the reasoning, content and calls that it states."""
        self._run_checks(SAMPLES.text, *(lambda s=s: self._check_sample(s) for s in self.samples))

    def test_splits(self) -> None:
        """However a sample is cut into pieces, its events joined are the same."""
        self._run_checks(SPLITS.text, *(lambda s=s: self._check_splits(s) for s in self.samples))

    def test_any_text(self) -> None:
        """Every text, and every beginning of a sample, is taken; the calls in it are well formed."""

        def check(parts: list[str], reasoning_open: bool) -> None:
            request = ParserRequest(reasoning_open=reasoning_open)
            events = self._events(self._subject.open(request), parts)
            self._check_calls("".join(parts), events)

        pieces = st.sampled_from(self._fragments) | st.text(max_size=4)
        self._search(
            ANY_TEXT.text,
            200,
            check,
            parts=st.lists(pieces, max_size=12),
            reasoning_open=st.booleans(),
        )

    def test_cut_anywhere(self) -> None:
        """An output that ends anywhere gives the beginning of what the whole one gives."""
        self._run_checks(ANY_TEXT.text, *(lambda s=s: self._check_cuts(s) for s in self.samples))

    def test_independent(self) -> None:
        """Two outputs that come in turns are parsed as each alone."""
        self._run_checks(INDEPENDENT.text, self._check_independent)

    def test_linear(self) -> None:
        """A megabyte of any fragment is parsed in time that grows with its length alone."""
        self._run_checks(LINEAR.text, *(lambda f=f: self._check_linear(f) for f in self._fragments))

    def test_memory(self) -> None:
        """Nothing grows with the number of outputs."""
        self._run_checks("memory: nothing grows with the number of outputs", self._check_memory)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        given = self.tokenizer
        return given if isinstance(given, Tokenizer) else load_tokenizer(given)

    @cached_property
    def _subject(self) -> OutputParser:
        """The instance under test."""
        return self._make()

    def _make(self) -> OutputParser:
        arguments = prepared_type(self.parser)()
        parser: OutputParser = self._build(
            OutputParserContext, tokenizer=self._tokenizer, arguments=arguments
        )
        return parser

    @cached_property
    def _fragments(self) -> list[str]:
        """Pieces of the samples: their markers, words, and characters that formats are made of."""
        words = [word for sample in self.samples for word in sample.text.split()]
        return [*dict.fromkeys([*words, *'{}[]()"\\,:;<>|/= \n', "é", "🙂", "</", "\\u00"])]

    def _pieces(self, text: str, size: int) -> list[str | int]:
        """Return a text in pieces of so many characters, and its special tokens."""
        pieces: list[str | int] = []
        for part in self._tokens(text):
            if isinstance(part, int):
                pieces.append(part)
            else:
                pieces += [part[at : at + size] for at in range(0, len(part), size)]
        return pieces

    def _tokens(self, text: str) -> Iterator[str | int]:
        """Yield the parts of a text between the special tokens that the parser takes, and these."""
        special = {
            t: i for t, i in self._tokenizer.special_tokens.items() if i in self._subject.token_ids
        }
        while text:
            found = [(at, -len(token), token) for token in special if (at := text.find(token)) >= 0]
            if not found:
                yield text
                return
            at, _, token = min(found)
            if at:
                yield text[:at]
            yield special[token]
            text = text[at + len(token) :]

    def _events(self, state: OutputState, pieces: Sequence[str | int]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        try:
            for piece in pieces:
                fed = state.feed_token(piece) if isinstance(piece, int) else state.feed(piece)
                events += fed
            events += state.finish()
        except Exception as cause:
            raise ANY_TEXT.violation(
                f"{short_repr(pieces)} raised {type(cause).__name__}: {cause}"
            ) from cause
        return join_events(events)

    def _parsed(self, sample: Sample) -> list[OutputEvent]:
        whole = self._pieces(sample.text, len(sample.text) or 1)
        return self._events(self._subject.open(sample.request), whole)

    def _check_sample(self, sample: Sample) -> None:
        events = self._parsed(sample)
        self._check_calls(sample.text, events)
        reasoning = "".join(e.text for e in events if isinstance(e, ReasoningText))
        content = "".join(e.text for e in events if isinstance(e, ContentText | MalformedText))
        found = (reasoning, content, _calls(events))
        stated = (sample.reasoning, sample.content, [(n, dict(a)) for n, a in sample.calls])
        if found != stated:
            raise SAMPLES.violation(
                f"{sample.text!r} became {short_repr(found)}, stated are {short_repr(stated)}"
            )

    def _check_splits(self, sample: Sample) -> None:
        whole = self._parsed(sample)
        for size in range(1, len(sample.text)):
            events = self._events(
                self._subject.open(sample.request), self._pieces(sample.text, size)
            )
            if events != whole:
                raise SPLITS.violation(
                    f"{sample.text!r} in pieces of {size} became {short_repr(events)}, and whole "
                    f"{short_repr(whole)}"
                )
        for at in range(1, len(sample.text)):
            first, rest = sample.text[:at], sample.text[at:]
            if [*self._tokens(first), *self._tokens(rest)] == [*self._tokens(sample.text)]:
                continue

    def _check_cuts(self, sample: Sample) -> None:
        pieces = self._pieces(sample.text, 1)
        for count in range(len(pieces)):
            events = self._events(self._subject.open(sample.request), pieces[:count])
            self._check_calls(sample.text, events)

    def _check_calls(self, text: str, events: Sequence[OutputEvent]) -> None:
        arguments: str | None = None
        for event in events:
            match event:
                case ToolCallBegin(name, _):
                    if arguments is not None or not name:
                        raise CALLS.violation(f"{text!r}: {event} inside a call, or without a name")
                    arguments = ""
                case ToolCallArguments(part):
                    if arguments is None:
                        raise CALLS.violation(f"{text!r}: {event} outside of a call")
                    arguments += part
                case ToolCallEnd():
                    if arguments is None or not _is_object(arguments):
                        raise CALLS.violation(
                            f"{text!r}: a call ended with the arguments {arguments!r}"
                        )
                    arguments = None
                case MalformedText():
                    arguments = None

    def _check_independent(self) -> None:
        for first in self.samples:
            for second in self.samples:
                states = [self._subject.open(first.request), self._subject.open(second.request)]
                pieces = [self._pieces(sample.text, 1) for sample in (first, second)]
                found: list[list[OutputEvent]] = [[], []]
                for at in range(max(map(len, pieces))):
                    for which in (0, 1):
                        for piece in pieces[which][at : at + 1]:
                            state = states[which]
                            found[which] += (
                                state.feed_token(piece)
                                if isinstance(piece, int)
                                else state.feed(piece)
                            )
                for which, sample in enumerate((first, second)):
                    events = join_events([*found[which], *states[which].finish()])
                    if events != self._parsed(sample):
                        raise INDEPENDENT.violation(
                            f"{sample.text!r} in turns with another output became "
                            f"{short_repr(events)}, and alone {short_repr(self._parsed(sample))}"
                        )

    def _check_linear(self, fragment: str) -> None:
        seconds = []
        for size in (1 << 16, 1 << 18):
            text = (fragment * (size // len(fragment) + 1))[:size]
            start = time.process_time()
            state = self._subject.open(ParserRequest())
            for at in range(0, size, 64):
                state.feed(text[at : at + 64])
            state.finish()
            seconds.append(time.process_time() - start)
        if seconds[1] > 12 * seconds[0] + 0.5:
            raise LINEAR.violation(
                f"{fragment!r} repeated to 64 KiB took {seconds[0]:.2f} s, to 256 KiB "
                f"{seconds[1]:.2f} s"
            )

    def _check_memory(self) -> None:
        sizes, waves = [], 100
        for wave in range(2 * waves):
            for sample in self.samples:
                self._parsed(sample)
            if wave in (waves - 1, 2 * waves - 1):
                attributes = {n: v for n, v in vars(self._subject).items() if n != "context"}
                sizes.append(count_elements(attributes))
        if sizes[1] - sizes[0] >= waves:
            raise Violation(
                f"the parser's attributes grew from {sizes[0]} to {sizes[1]} elements while "
                f"{waves} outputs were parsed",
                "keep nothing of an output",
            )


def _calls(events: Sequence[OutputEvent]) -> list[tuple[str, Any]]:
    """Return name and arguments of each complete call."""
    calls: list[tuple[str, Any]] = []
    name, text = "", ""
    for event in events:
        match event:
            case ToolCallBegin(began, _):
                name, text = began, ""
            case ToolCallArguments(part):
                text += part
            case ToolCallEnd():
                calls.append((name, msgspec.json.decode(text)))
    return calls


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


__all__ = ["OutputParserSuite", "ReasoningMarkers", "Sample"]
