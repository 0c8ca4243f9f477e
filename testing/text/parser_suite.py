"""The conformance suite for reasoning parsers; the built-in one passes it too."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import (
    ReasoningContext,
    ReasoningMarkers,
    ReasoningParser,
    Tokenizer,
)
from hardpoint.plugins.arguments import prepared_type
from hardpoint.plugins.component import Component
from hardpoint.testing.component_suite import ComponentSuite
from hardpoint.testing.engine_access import load_tokenizer
from hardpoint.testing.snapshots import count_elements
from hardpoint.testing.suite import Rule, Violation, reject_replaced_tests, short_repr

MARKERS = Rule(
    "markers: token ids of the vocabulary, the same in every call",
    "encode the texts of the markers with context.tokenizer and add_special_tokens=False",
)
AGREEMENT = Rule(
    "agreement: split divides a text where the markers do",
    "let split look for the texts of the very tokens that markers() returns: reasoning begins "
    "after the start marker and ends before the end marker; a text that is cut off before it is "
    "reasoning; without a start marker, the end marker ends what the template began",
)
NOTHING_LOST = Rule(
    "nothing lost: reasoning, markers and content are the whole text",
    "put every character that is not part of a marker into reasoning or content, in order, once; "
    "set keeps_white_space = False in the suite if white space is dropped on purpose",
)
INDEPENDENT = Rule(
    "independent: the parts of a text depend on no text before it",
    "keep nothing between calls: a parser serves all requests",
)

_PIECES = st.sampled_from(["So", " ", "\n\n", "a < b", "é", "🙂", "...", "Yes.", "</", "<", ">"])
_PART = st.lists(_PIECES, min_size=1, max_size=4).map("".join).filter(str.strip)


class ReasoningParserSuite(ComponentSuite):
    """Base class of a test class, which sets `parser`; `options` and `arguments` if it has some.

    Attributes:
        parser: the class under test.
        tokenizer: what it gets: a tokenizer, or the folder of one; None is one token per byte.
        keeps_white_space: whether split changes no white space.
    """

    kind = "reasoning_parsers"
    parser: ClassVar[type[ReasoningParser]]
    tokenizer: ClassVar[Tokenizer | Path | str | None] = None
    keeps_white_space: ClassVar[bool] = True

    def _component(self) -> type[Component]:
        return self.parser

    def test_contract(self) -> None:
        """The class states its contract and can be built; its options survive pickling."""
        self._run_checks(
            "contract: the loader can check and build the class",
            lambda: reject_replaced_tests(type(self), ReasoningParserSuite),
            self._check_contract,
            lambda: self._make().close(),
        )

    def test_markers(self) -> None:
        """The markers are token ids of the vocabulary, the same in every call."""
        self._run_checks(MARKERS.text, self._check_markers)

    def test_agreement(self) -> None:
        """Split divides a text where the markers do."""
        self._skip_without_split()

        def check(reasoning: str, content: str, form: str) -> None:
            start, end = self._marker_texts
            text = f"{start if 's' in form else ''}{reasoning}"
            if "e" in form:
                text += f"{end}{content}"
            self._check_parts(text, reasoning, content if "e" in form else "")

        start, end = self._marker_texts
        markers = {"s": start, "e": end}
        forms = [form for form in ("se", "s", "e") if all(markers[letter] for letter in form)]
        texts = _PART.filter(lambda text: not any(m and m in text for m in (start, end)))
        if forms:
            self._search(
                AGREEMENT.text,
                60,
                check,
                reasoning=texts,
                content=texts,
                form=st.sampled_from(forms),
            )

    def test_nothing_lost(self) -> None:
        """Reasoning, markers and content are the whole text, whatever it is."""
        self._skip_without_split()
        markers = [marker for marker in self._marker_texts if marker]
        pieces = _PIECES | st.sampled_from([*markers, *(m[:-1] for m in markers), "x"])
        texts = st.lists(pieces, max_size=8).map("".join)
        self._search(NOTHING_LOST.text, 150, self._check_nothing_lost, text=texts)

    def test_without_markers(self) -> None:
        """A text without markers is all content, or all reasoning."""
        self._skip_without_split()

        def check(text: str) -> None:
            reasoning, content = self._split(self._subject, text)
            if self._plain(reasoning or "") and self._plain(content):
                raise NOTHING_LOST.violation(
                    f"{text!r}, which has no marker, became the reasoning {reasoning!r} and the "
                    f"content {content!r}",
                    "treat a text without markers as content, or as reasoning that was cut off",
                )
            self._check_nothing_lost(text)

        markers = [marker for marker in self._marker_texts if marker]
        texts = (st.just("") | _PART | st.text(max_size=8)).filter(
            lambda text: not any(marker in text for marker in markers)
        )
        self._search(NOTHING_LOST.text, 60, check, text=texts)

    def test_independent(self) -> None:
        """Split gives the same for a text, whatever came before it."""
        self._skip_without_split()

        def check(texts: list[str]) -> None:
            for text in texts:
                mine, new = self._split(self._subject, text), self._split(self._make(), text)
                if mine != new:
                    raise INDEPENDENT.violation(
                        f"{text!r} became {short_repr(mine)} after other texts, "
                        f"and {short_repr(new)} in a new instance"
                    )

        start, end = self._marker_texts
        pieces = _PIECES | st.sampled_from([start or "x", end or "y"])
        texts = st.lists(st.lists(pieces, max_size=5).map("".join), min_size=2, max_size=4)
        self._search(INDEPENDENT.text, 40, check, texts=texts)

    def test_arguments(self) -> None:
        """The rules hold for a parser with the arguments of a request."""
        if self.arguments is None:
            pytest.skip("arguments is not set: the parser is tested with the defaults")

        def check(arguments: Any, reasoning: str, content: str) -> None:
            self._use(self._make(arguments))
            self._check_markers()
            start, end = self._marker_texts
            if self._splits and not any(m and m in reasoning + content for m in (start, end)):
                self._check_parts(f"{start}{reasoning}{end}{content}", reasoning, content)

        self._search(
            AGREEMENT.text,
            40,
            check,
            arguments=self._drawn_arguments(self._vocab_size),
            reasoning=_PART,
            content=_PART,
        )

    def test_memory(self) -> None:
        """Nothing grows with the number of texts."""
        self._run_checks("memory: nothing grows with the number of texts", self._check_memory)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        given = self.tokenizer
        return given if isinstance(given, Tokenizer) else load_tokenizer(given)

    @property
    def _vocab_size(self) -> int:
        try:
            return self._tokenizer.vocab_size
        except NotImplementedError:
            return 1 << 31

    @cached_property
    def _subject(self) -> ReasoningParser:
        """The instance under test."""
        return self._make()

    def _use(self, parser: ReasoningParser) -> None:
        """Test another instance."""
        self._subject.close()
        self._subject = parser
        self.__dict__.pop("_marker_texts", None)

    @cached_property
    def _marker_texts(self) -> tuple[str, str]:
        """The texts of the start and of the end marker; empty for one that is left out."""
        markers = self._subject.markers()
        decode = self._tokenizer.decode
        return (
            decode(list(markers.start), skip_special_tokens=False),
            decode(list(markers.end), skip_special_tokens=False),
        )

    def _make(self, arguments: Any = None) -> ReasoningParser:
        """Return a parser as the engine builds it: with arguments, or for requests without any."""
        if arguments is None:
            arguments = prepared_type(self.parser)()
        parser: ReasoningParser = self._build(
            ReasoningContext, tokenizer=self._tokenizer, arguments=arguments
        )
        return parser

    @property
    def _splits(self) -> bool:
        with suppress(Exception):  # the rules say what is wrong
            try:
                self._subject.split("")
            except NotImplementedError:
                return False
        return True

    def _skip_without_split(self) -> None:
        if not self._splits:
            pytest.skip("split is left out: the engine uses the markers alone")

    def _split(self, parser: ReasoningParser, text: str) -> tuple[str | None, str]:
        try:
            parts = parser.split(text)
        except Exception as cause:
            raise Violation(
                f"split({text!r}) raised {type(cause).__name__}: {cause}",
                "return (None, text) for a text that has no reasoning",
            ) from cause
        match parts:
            case (str() | None as reasoning, str() as content):
                return reasoning, content
        raise Violation(
            f"split({text!r}) returned {short_repr(parts)}", "return (reasoning or None, content)"
        )

    def _plain(self, text: str) -> str:
        """Return a text as it is compared: without white space if that may be dropped."""
        return text if self.keeps_white_space else "".join(text.split())

    def _check_markers(self) -> None:
        found = []
        for parser in (self._subject, self._subject, self._make(self._subject.arguments)):
            markers = parser.markers()
            if not isinstance(markers, ReasoningMarkers):
                raise MARKERS.violation(
                    f"markers returned {short_repr(markers)}, no ReasoningMarkers"
                )
            found.append((list(markers.start), list(markers.end)))
            for name, ids in zip(("start", "end"), found[-1], strict=True):
                self._check_ids(name, ids)
            self._split_or_fail("".join(self._marker_texts))  # must not change the markers
        if found[1:] != found[:-1]:
            raise MARKERS.violation(
                f"markers returned {found[0]}, called again {found[1]}, and {found[2]} in a new "
                f"instance"
            )
        start, end = found[0]
        if start and start == end:
            raise MARKERS.violation(
                f"the start and the end marker are both {start}, so that reasoning never ends",
                "return different markers, or leave the start marker empty",
            )

    def _check_ids(self, name: str, ids: list[int]) -> None:
        size = self._vocab_size
        for token in ids:
            if type(token) is not int or not 0 <= token < size:
                raise MARKERS.violation(
                    f"the {name} marker {short_repr(ids)} has {short_repr(token)}; the vocabulary "
                    f"is 0 to {size - 1}"
                )

    def _split_or_fail(self, text: str) -> None:
        """Split a text; whether that works is for other rules."""
        with suppress(Exception):
            self._subject.split(text)

    def _check_parts(self, text: str, reasoning: str, content: str) -> None:
        given = self._split(self._subject, text)
        plain = (self._plain(given[0] or ""), self._plain(given[1]))
        if plain != (self._plain(reasoning), self._plain(content)):
            raise AGREEMENT.violation(
                f"{text!r} became the reasoning {given[0]!r} and the content {given[1]!r}; by its "
                f"markers {self._marker_texts} they are {reasoning!r} and {content!r}"
            )

    def _check_nothing_lost(self, text: str) -> None:
        reasoning, content = self._split(self._subject, text)
        # Reasoning of white space alone counts as none.
        keeps = self.keeps_white_space and reasoning is not None
        whole = text if keeps else "".join(text.split())
        parts = (reasoning or "") + content
        parts = parts if keeps else "".join(parts.split())
        start, end = ("".join(m.split()) if not keeps else m for m in self._marker_texts)
        lost, invented = Counter(whole) - Counter(parts), Counter(parts) - Counter(whole)
        if invented or not _is_made_of(lost, whole, start, end):
            raise NOTHING_LOST.violation(
                f"{text!r} became the reasoning {reasoning!r} and the content {content!r}"
            )
        for part in (reasoning or "", content):
            if not _is_subsequence(part, text):
                raise NOTHING_LOST.violation(
                    f"{text!r} became the reasoning {reasoning!r} and the content {content!r}, "
                    f"which is in another order"
                )

    def _check_memory(self) -> None:
        sizes, waves, (start, end) = [], 100, self._marker_texts
        for wave in range(2 * waves):
            self._subject.markers()
            self._split_or_fail(f"{start}thought {wave}{end}answer {wave}")
            if wave in (waves - 1, 2 * waves - 1):
                attributes = {n: v for n, v in vars(self._subject).items() if n != "context"}
                sizes.append(count_elements(attributes))
        if sizes[1] - sizes[0] >= waves:
            raise Violation(
                f"the parser's attributes grew from {sizes[0]} to {sizes[1]} elements while "
                f"{waves} texts were split",
                "keep nothing of a text",
            )


def _is_made_of(lost: Counter[str], text: str, start: str, end: str) -> bool:
    """Return whether characters are those of some of the markers of a text, whole ones."""
    for starts in range(text.count(start) + 1 if start else 1):
        for ends in range(text.count(end) + 1 if end else 1):
            if lost == Counter(start * starts + end * ends):
                return True
    return False


def _is_subsequence(part: str, text: str) -> bool:
    characters = iter(text)
    return all(character in characters for character in part)
