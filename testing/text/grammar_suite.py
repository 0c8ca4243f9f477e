"""The conformance suite for grammar backends; the built-in one passes it too."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import GrammarBackend, GrammarContext, RequestError
from hardpoint.plugins.component import Component
from hardpoint.plugins.grammars import GrammarState, Vocabulary
from hardpoint.plugins.structured import StructuredFormat, StructuredOutputs
from hardpoint.testing.component_suite import ComponentSuite
from hardpoint.testing.snapshots import count_elements
from hardpoint.testing.suite import Rule, Violation, checks, short_repr

from .grammar_samples import HOSTILE, KEYWORDS, REFUSED, STANDARD, GrammarSample, described
from .grammar_vocabulary import END, Mask, SampleTokens, build_vocabulary, large_vocabulary

__all__ = ["GrammarSample", "GrammarSuite"]

FORMATS = Rule(
    "formats: what a class states in `formats` it compiles, and nothing else",
    "state the fields of StructuredOutputs that compile() handles, and raise ValueError for others",
)
MASK = Rule(
    "mask: exactly the tokens are allowed with which a valid text begins",
    "compare all bytes of a token with what may come, also where it ends inside a character or "
    "crosses from one part of the grammar to the next",
)
NO_TEXT = Rule(
    "no text: a special token, an empty one and an id beyond the vocabulary are no text",
    "set bits of tokens with bytes alone; the ids from len(vocabulary.tokens) to vocab_size are "
    "rows that the model has and the tokenizer has not",
)
END_OF_TEXT = Rule(
    "end: fill_bitmask returns True exactly where the text may end",
    "return whether the tokens so far are a complete text, which more text may follow or not",
)
BYTES = Rule(
    "bytes: a token is allowed exactly where its bytes are, one after the other",
    "compute the mask and advance from the bytes of tokens alone, and not from their borders",
)
ADVANCE = Rule(
    "advance: returns True for exactly the tokens of the mask, and stays where it returns False",
    "let one function decide for both; check the whole token before the state changes",
)
TEXTS = Rule(
    "texts: valid texts are allowed, however they are cut into tokens, and invalid ones never end",
    "is it the backend or the sample? Walk the text token by token, and look at each mask",
)
ROLLBACK = Rule(
    "rollback: after n tokens are undone, all is as it was before them",
    "keep what advance changes, such as a stack with an entry per token; a token that was refused "
    "is none",
)
FORK = Rule(
    "fork: a copy and its original go on by themselves",
    "copy what advance and rollback change, and share only what never changes",
)
PURE = Rule(
    "pure: fill_bitmask changes nothing",
    "compute the mask from the state, which advance and rollback alone change",
)
WALKS = Rule(
    "walks: the mask depends on the tokens that were accepted and not undone, and on nothing else",
    "compare with a new fork that gets the same tokens",
)
THREADS = Rule(
    "threads: compile runs in several threads at once, and a state in another thread than it",
    "keep what a call of compile needs in local variables, or guard it with a lock",
)
REFUSED_RULE = Rule(
    "refused: compile raises ValueError, with a message, for a description that means nothing",
    "check the description in compile, and let no other exception out of it",
)
HOSTILE_RULE = Rule(
    "hostile: any description compiles, or is refused by a ValueError, within compile_seconds",
    "limit depth, size and time of a compilation; refuse what is beyond the limits",
)
KEYWORD = Rule(
    "keywords: a keyword of a JSON schema is enforced, or its schema is refused",
    "raise ValueError with the name of a keyword that the backend does not enforce; `lenient` is "
    "for requests that accept such schemas",
)

VALIDATE = Rule(
    "validate: what is wrong with an answer is found, and nothing else",
    "return a text that says what of the whole schema the answer breaks, and None if it breaks "
    "nothing",
)

_MAX_PREFIXES = 600  # of a language, that are walked
_MAX_DRAFTS = 8  # tokens that a rollback undoes
_POSITIONS = 6  # in a text, at which a check for every token is made
_LARGE = 32_000  # tokens of the vocabulary on which masks are measured
_BEYOND = 37  # ids of the model that the vocabulary has not
_FORKS = 1000
_THREADS = 4
_SLACK_KIB = 4096  # of the process, by which its memory grows anyway


class GrammarSuite(ComponentSuite):
    """Base class of a test class, which sets `grammar`, and `samples` of what it compiles.

    Attributes:
        grammar: the class under test.
        samples: descriptions and their texts. The suite has some for each format, which are left
            out where there is one here.
        refused: further descriptions that the backend refuses.
        special_tokens: further special tokens of the vocabulary.
        vocabulary: another one; None is a small one with all bytes, made of the samples.
        compile_seconds: maximum time to compile anything.
        budget_ms_per_mask: maximum milliseconds per mask, as a median, on 32 000 tokens; None does
            not measure.
        budget_kib_per_fork: maximum memory of a fork in KiB; None does not measure.
    """

    kind = "grammars"
    grammar: ClassVar[type[GrammarBackend]]
    samples: ClassVar[Sequence[GrammarSample]] = ()
    refused: ClassVar[Sequence[StructuredOutputs | Mapping[str, Any]]] = ()
    special_tokens: ClassVar[Sequence[str]] = ()
    vocabulary: ClassVar[Vocabulary | None] = None
    compile_seconds: ClassVar[float] = 10.0
    budget_ms_per_mask: ClassVar[float | None] = 5.0
    budget_kib_per_fork: ClassVar[float | None] = 64.0

    def _component(self) -> type[Component]:
        return self.grammar

    @checks(FORMATS)
    def test_formats(self) -> None:
        """Every format that the class states compiles, and the others are refused."""
        known, stated = get_args(StructuredFormat), self.grammar.formats
        if not stated or isinstance(stated, str) or set(stated) - {*known}:
            raise FORMATS.violation(
                f"its formats are {stated!r}", f"state a tuple of some of {', '.join(known)}"
            )
        for name in known:
            for sample in STANDARD[name] if name not in stated else ():
                self._check_raises(sample.checked, FORMATS, f"{name} is not in its formats")
        for _, state in self._compiled:
            for method in ("fill_bitmask", "advance", "rollback", "fork"):
                if not callable(getattr(state, method, None)):
                    raise FORMATS.violation(
                        f"compile returned {short_repr(state)}, which has no {method}()",
                        "return a GrammarState",
                    )

    def test_mask(self) -> None:
        """Everywhere in a finite language, the mask is that of all its texts."""
        self._run_checks(MASK.text, *self._for_samples(self._check_language))

    def test_bytes(self) -> None:
        """A token is allowed exactly where its bytes are."""
        self._run_checks(BYTES.text, *self._for_samples(self._check_bytes))

    def test_advance(self) -> None:
        """A token is accepted exactly if the mask allows it; a refused one changes nothing."""
        self._run_checks(ADVANCE.text, *self._for_samples(self._check_advance))

    def test_texts(self) -> None:
        """Valid texts are accepted whole, however they are cut; invalid ones never end."""
        self._run_checks(TEXTS.text, *self._for_samples(self._check_texts))

    def test_rollback(self) -> None:
        """Undone tokens leave no trace."""
        self._run_checks(ROLLBACK.text, *self._for_samples(self._check_rollback))

    def test_fork(self) -> None:
        """A fork and its original do not disturb each other."""
        self._run_checks(FORK.text, *self._for_samples(self._check_fork))

    def test_pure(self) -> None:
        """A mask that is asked for twice, or not at all, changes nothing."""
        self._run_checks(PURE.text, *self._for_samples(self._check_pure))

    def test_walks(self) -> None:
        """After any tokens, rollbacks and forks, a state is as one that got the same tokens."""

        def check(index: int, steps: list[tuple[str, int]]) -> None:
            self._check_walk(self._compiled[index % len(self._compiled)], steps)

        operations = st.sampled_from(
            ["advance", "advance", "advance", "rollback", "rollback", "fork"]
        )
        self._search(
            WALKS.text,
            80,
            check,
            index=st.integers(0, 99),
            steps=st.lists(st.tuples(operations, st.integers(0, 9999)), max_size=20),
        )

    @checks(THREADS)
    def test_threads(self) -> None:
        """Grammars are compiled in several threads at once, and used in others."""
        paths = [next(self._paths(sample), []) for sample, _ in self._compiled]
        alone = [
            self._masks(path, root.fork(), described(sample.checked))
            for path, (sample, root) in zip(paths, self._compiled, strict=True)
        ]
        shared = [[root.fork() for _ in range(_THREADS)] for _, root in self._compiled]
        start = threading.Barrier(_THREADS)

        def work(number: int) -> None:
            start.wait()
            for index in random.Random(number).sample(range(len(paths)), len(paths)):
                structured = self._compiled[index][0].checked
                for state, how in (
                    (self._compile(self._subject, structured), "compiled there"),
                    (shared[index][number], "compiled in another one"),
                ):
                    masks = self._masks(paths[index], state, described(structured))
                    if masks != alone[index]:
                        raise THREADS.violation(
                            f"{described(structured)}: a state of one of {_THREADS} threads at "
                            f"once, {how}, had other masks than alone"
                        )

        seconds = self.compile_seconds * len(paths)
        threads = [_Thread(partial(work, number)) for number in range(_THREADS)]
        for thread in threads:
            try:
                thread.result(seconds)
            except TimeoutError:
                raise THREADS.violation(f"a thread did not end within {seconds} s") from None
            except Violation as found:
                raise THREADS.violation(
                    f"in one of {_THREADS} threads at once: {found.observed}"
                ) from None
            except BaseException as cause:
                raise THREADS.violation(
                    f"in one of {_THREADS} threads at once it raised {type(cause).__name__}: "
                    f"{cause}"
                ) from cause

    def test_refused(self) -> None:
        """A description that means nothing is refused by a ValueError that gives the reason."""
        given = [one for name in self.grammar.formats for one in REFUSED.get(name, ())]
        self._run_checks(
            REFUSED_RULE.text, *(partial(self._check_refused, g) for g in (*given, *self.refused))
        )

    def test_hostile(self) -> None:
        """A description that is too large, too deep or endless does not stop the engine."""
        given = [one for name, one in HOSTILE if name in self.grammar.formats]
        self._run_checks(HOSTILE_RULE.text, *(partial(self._check_hostile, g) for g in given))

    def test_keywords(self) -> None:
        """Each keyword of a JSON schema is enforced, or refused."""
        if "json" not in self.grammar.formats:
            pytest.skip("it does not compile JSON schemas")
        self._run_checks(KEYWORD.text, *(partial(self._check_keyword, *k) for k in KEYWORDS))

    def test_validate(self) -> None:
        """Errors of an answer are found, if the backend validates answers."""
        if self.grammar.validate.__func__ is GrammarBackend.validate.__func__:  # type: ignore[attr-defined]
            pytest.skip("it leaves the validation of answers to the default backend")
        self._run_checks(VALIDATE.text, *(partial(self._check_validate, *k) for k in KEYWORDS))

    def test_memory(self) -> None:
        """A fork is small, and nothing grows with the number of grammars."""
        rule = "memory: a fork is small, and a backend keeps nothing of a grammar"
        self._run_checks(rule, self._check_growth, self._check_forks)

    def test_speed(self) -> None:
        """A mask costs no more than its budget."""
        if self.budget_ms_per_mask is None:
            pytest.skip("budget_ms_per_mask is None")
        rule = "speed: a mask costs no more than its budget, for the whole batch waits for it"
        self._run_checks(rule, self._check_speed)

    @cached_property
    def _all_samples(self) -> list[GrammarSample]:
        """The author's samples, and the suite's for formats of which there is none."""
        sampled = {sample.checked.format for sample in self.samples}
        standard = [s for name in self.grammar.formats for s in STANDARD.get(name, ())]
        return [*self.samples, *(s for s in standard if s.checked.format not in sampled)]

    @cached_property
    def _tokens(self) -> SampleTokens:
        texts = [text for sample in self._all_samples for text in [*sample.texts, *sample.invalid]]
        return SampleTokens(self.vocabulary or build_vocabulary(texts, self.special_tokens))

    @cached_property
    def _vocab_size(self) -> int:
        return len(self._tokens.vocabulary.tokens) + _BEYOND

    @cached_property
    def _end(self) -> int | None:
        """The token that the suite's vocabulary ends texts with."""
        return self._tokens.vocabulary.special_ids.get(END)

    @cached_property
    def _subject(self) -> GrammarBackend:
        """The instance under test."""
        return self._make()

    @cached_property
    def _compiled(self) -> list[tuple[GrammarSample, GrammarState]]:
        if not self._all_samples:
            raise Violation("the suite has no samples", "set `samples` in the test class")
        return [(s, self._compile(self._subject, s.checked)) for s in self._all_samples]

    def _make(self, tokens: SampleTokens | None = None) -> GrammarBackend:
        tokens = tokens or self._tokens
        backend: GrammarBackend = self._build(
            GrammarContext,
            vocabulary=tokens.vocabulary,
            vocab_size=len(tokens.vocabulary.tokens) + _BEYOND,
            compile_seconds=self.compile_seconds,
        )
        return backend

    def _compile(self, backend: GrammarBackend, structured: StructuredOutputs) -> GrammarState:
        try:
            return backend.compile(structured)
        except Exception as cause:
            raise FORMATS.violation(
                f"compile raised {type(cause).__name__}: {cause}, for {described(structured)}"
            ) from cause

    def _for_samples(
        self, check: Callable[[GrammarSample, GrammarState], None]
    ) -> Iterator[Callable[[], None]]:
        """Yield a check for each sample and its state before the first token."""

        def run(index: int) -> None:
            sample, root = self._compiled[index]
            check(sample, root.fork())

        for index in range(max(1, len(self._all_samples))):
            yield partial(run, index)

    def _texts(self, sample: GrammarSample, texts: Sequence[str]) -> list[str]:
        """Return texts of a sample with a character per byte and special token."""
        special = self._has_special(sample)
        return [self._tokens.text(text, special=special) for text in texts]

    def _has_special(self, sample: GrammarSample) -> bool:
        """Return whether special tokens in a sample's texts are tokens."""
        stated = sample.special_tokens
        return sample.checked.format == "structural_tag" if stated is None else stated

    def _paths(self, sample: GrammarSample, count: int = 3) -> Iterator[list[int]]:
        """Yield valid texts as tokens, in different ways."""
        for text in self._texts(sample, sample.texts[:6]):
            yield from self._tokens.tokenisations(text, count)

    def _mask(self, state: GrammarState) -> Mask:
        mask = Mask.of(state, self._vocab_size)
        if type(mask.may_end) is not bool:
            raise END_OF_TEXT.violation(
                f"fill_bitmask returned {short_repr(mask.may_end)}, no bool",
                "return True or False",
            )
        return mask

    def _allowed(self, sample: GrammarSample, mask: Mask, where: str) -> set[int]:
        """Return the tokens of a mask without the one that ends the text where that may end.

        Raises:
            Violation: an id that is no text is allowed.
        """
        ids = set(mask.ids)
        if mask.may_end:
            ids.discard(-1 if self._end is None else self._end)
        texts, special = self._tokens.texts, self._tokens.vocabulary.special
        for token in sorted(ids):
            is_text = token not in special or self._has_special(sample)
            if token >= len(texts) or not texts[token] or not is_text:
                raise NO_TEXT.violation(f"{where}, it allows {self._tokens.name(token)}")
        return ids

    def _move(self, state: GrammarState, token: int, where: str) -> None:
        """Advance by a token that is allowed.

        Raises:
            Violation: it is refused.
        """
        if (moved := state.advance(token)) is not True:
            raise ADVANCE.violation(
                f"{where}, advance({self._tokens.name(token)}) returned {moved!r}; the token is "
                f"allowed"
            )

    def _where(self, sample: GrammarSample, ids: Sequence[int]) -> str:
        names = [self._tokens.name(token) for token in ids]
        return f"{described(sample.checked)}: after the tokens [{', '.join(names)}]"

    def _check_raises(self, structured: StructuredOutputs, rule: Rule, reason: str) -> None:
        """Check that a description is refused by a ValueError that gives the reason."""
        text = described(structured)
        try:
            self._subject.compile(structured)
        except ValueError as error:
            if type(error) is UnicodeDecodeError or not str(error).strip():
                raise rule.violation(
                    f"{text}: compile raised {error!r}, which does not say what is wrong",
                    "say in the message what is wrong; it becomes the request's error",
                ) from None
            return
        except Exception as cause:
            raise rule.violation(
                f"{text}: compile raised {type(cause).__name__}: {cause}, expected ValueError"
            ) from cause
        raise rule.violation(f"{text}: it compiled, but {reason}")

    def _check_refused(self, given: StructuredOutputs | Mapping[str, Any]) -> None:
        try:
            structured = StructuredOutputs.checked(given)
        except RequestError:  # the engine refuses it before any backend sees it
            return
        self._check_raises(structured, REFUSED_RULE, "it means nothing")

    def _check_language(self, sample: GrammarSample, root: GrammarState) -> None:
        """Walk the tree of a language's beginnings."""
        valid = {*self._texts(sample, sample.language)}
        expected = self._tokens.next_by_prefix(valid)
        pending, seen = [("", root)] if valid else [], {""}
        while pending and len(seen) <= _MAX_PREFIXES:
            prefix, state = pending.pop()
            mask = self._mask(state)
            where = f"{described(sample.checked)}: after {self._tokens.shown(prefix)}"
            allowed, wanted = self._allowed(sample, mask, where), expected[prefix]
            for token in sorted(allowed ^ wanted):
                name = self._tokens.name(token)
                if token in allowed:
                    raise MASK.violation(
                        f"{where}, it allows token {name}, with which no valid text goes on"
                    )
                raise MASK.violation(
                    f"{where}, it does not allow token {name}, with which a valid text goes on"
                )
            if mask.may_end != (prefix in valid):
                raise END_OF_TEXT.violation(
                    f"{where}, fill_bitmask returned {mask.may_end}; that "
                    f"{'is' if prefix in valid else 'is not'} a whole text of the language"
                )
            for token in wanted:
                longer = prefix + self._tokens.texts[token]
                if longer not in seen:
                    seen.add(longer)
                    state_after = state.fork()
                    self._move(state_after, token, where)
                    pending.append((longer, state_after))

    def _check_bytes(self, sample: GrammarSample, root: GrammarState) -> None:
        singles = {text: token for token, text in enumerate(self._tokens.texts) if len(text) == 1}
        tree: dict[str, Any] = {}  # by character: the tokens that end there, and what goes on
        for token, text in enumerate(self._tokens.texts):
            if text and all(char in singles for char in text):
                node: dict[str, Any] = tree
                for char in text:
                    node = node.setdefault(char, {})
                node.setdefault("", []).append(token)

        def allowed(state: GrammarState, node: dict[str, Any]) -> Iterator[int]:
            ids = self._mask(state).ids
            for char, child in node.items():
                if char and singles[char] in ids:
                    yield from child.get("", ())
                    if child.keys() - {""}:
                        after = state.fork()
                        self._move(after, singles[char], "byte by byte")
                        yield from allowed(after, child)

        for path, state in self._positions(sample, root):
            where = self._where(sample, path)
            mask = self._allowed(sample, self._mask(state), where)
            special = {*self._tokens.vocabulary.special}
            mask, by_bytes = mask - special, {*allowed(state, tree)} - special
            for token in sorted(mask ^ by_bytes):
                verb = "allows" if token in mask else "does not allow"
                other = "are not" if token in mask else "are"
                raise BYTES.violation(
                    f"{where}, it {verb} token {self._tokens.name(token)}, whose bytes one by one "
                    f"{other} allowed"
                )

    def _positions(
        self, sample: GrammarSample, root: GrammarState
    ) -> Iterator[tuple[list[int], GrammarState]]:
        """Yield some places in valid texts: the tokens so far, and a state of its own."""
        places = [(path, at) for path in self._paths(sample) for at in range(len(path) + 1)]
        chosen = random.Random(0).sample(places, min(len(places), _POSITIONS))
        for path, at in [([], 0), *chosen]:
            state = root.fork()
            for index, token in enumerate(path[:at]):
                self._move(state, token, self._where(sample, path[:index]))
            yield path[:at], state

    def _check_advance(self, sample: GrammarSample, root: GrammarState) -> None:
        for path, state in self._positions(sample, root):
            where, mask = self._where(sample, path), self._mask(state)
            ends = {self._end} if mask.may_end else set()
            for token in sorted({*range(self._vocab_size)} - ends):
                probe = state.fork() if token in mask.ids else state
                moved = probe.advance(token)
                if moved is not (token in mask.ids):
                    name = "allows" if token in mask.ids else "does not allow"
                    raise ADVANCE.violation(
                        f"{where}, advance({self._tokens.name(token)}) returned {moved!r}, and the "
                        f"mask {name} it"
                    )
            if self._mask(state) != mask:
                raise ADVANCE.violation(
                    f"{where}, the mask has changed after advance() returned False"
                )
            if path:
                state.rollback(1)
                self._move(state, path[-1], f"{where}, after refused tokens and a rollback")
                self._check_same(ADVANCE, state, mask, f"{where}, with refused tokens undone")

    def _check_same(self, rule: Rule, state: GrammarState, mask: Mask, what: str) -> None:
        """Check that a state has a mask."""
        found = self._mask(state)
        if found.may_end != mask.may_end:
            raise rule.violation(
                f"{what}: the text may end is {found.may_end}, it was {mask.may_end}"
            )
        for token in sorted(found.ids ^ mask.ids):
            now = "is allowed" if token in found.ids else "is not allowed"
            raise rule.violation(
                f"{what}: token {self._tokens.name(token)} {now}, and should be as before"
            )

    def _check_texts(self, sample: GrammarSample, root: GrammarState) -> None:
        for text in self._texts(sample, sample.texts):
            for path in self._tokens.tokenisations(text):
                self._check_valid(sample, path, root.fork())
        for text in self._texts(sample, sample.invalid):
            for path in self._tokens.tokenisations(text):
                if self._is_whole(path, root.fork()):
                    raise TEXTS.violation(
                        f"{self._where(sample, path)}, the text may end; it is invalid"
                    )

    def _check_valid(self, sample: GrammarSample, path: list[int], state: GrammarState) -> None:
        for at, token in enumerate(path):
            if token not in self._mask(state).ids or state.advance(token) is not True:
                raise TEXTS.violation(
                    f"{self._where(sample, path[:at])}, it does not allow token "
                    f"{self._tokens.name(token)} of the valid text "
                    f"{self._tokens.shown(''.join(self._tokens.texts[t] for t in path))}"
                )
        if not self._mask(state).may_end:
            raise TEXTS.violation(
                f"{self._where(sample, path)}, the text may not end; it is valid and whole"
            )

    def _is_whole(self, path: Sequence[int], state: GrammarState) -> bool:
        """Return whether tokens are a text that may end."""
        return all(state.advance(token) for token in path) and self._mask(state).may_end

    def _masks(self, path: Sequence[int], state: GrammarState, where: str) -> list[Mask]:
        """Return the masks before, between and after tokens; advance the state over them."""
        masks = [self._mask(state)]
        for token in path:
            self._move(state, token, where)
            masks.append(self._mask(state))
        return masks

    def _check_rollback(self, sample: GrammarSample, root: GrammarState) -> None:
        for path in self._paths(sample):
            where = described(sample.checked)
            masks = self._masks(path, root.fork(), where)
            ends = sorted({len(path), len(path) // 2, min(2, len(path))})
            for end in ends:
                state = root.fork()
                for token in path[:end]:
                    self._move(state, token, where)
                for count in range(1, min(end, _MAX_DRAFTS) + 1):
                    state.rollback(count)
                    what = f"{self._where(sample, path[:end])} and a rollback of {count}"
                    self._check_same(ROLLBACK, state, masks[end - count], what)
                    for token in path[end - count : end]:
                        if state.advance(token) is not True:
                            raise ROLLBACK.violation(
                                f"{what}, token {self._tokens.name(token)} is not accepted again"
                            )
                    self._check_same(ROLLBACK, state, masks[end], f"{what}, and the same tokens")

    def _check_fork(self, sample: GrammarSample, root: GrammarState) -> None:
        paths = [path for path in self._paths(sample, 2) if path]
        where = described(sample.checked)
        before = self._mask(root)
        masks = []
        for path in paths:
            masks.append(self._masks(path, root.fork(), where))
            self._check_same(FORK, root, before, f"{where}: its fork advanced")
        states = [root.fork() for _ in paths]
        for at in range(max(map(len, paths), default=0)):  # in turns
            for path, state, own in zip(paths, states, masks, strict=True):
                if at >= len(path):
                    continue
                what = f"{self._where(sample, path[:at])}, in turns with other forks"
                self._check_same(FORK, state, own[at], what)
                copy = state.fork()
                self._check_same(FORK, copy, own[at], f"{what}: its fork")
                if not state.advance(path[at]):
                    raise FORK.violation(f"{what}, {self._tokens.name(path[at])} is refused")
                self._check_same(FORK, copy, own[at], f"{what}: the fork, its original advanced")
                if not copy.advance(path[at]):
                    raise FORK.violation(f"{what}: its fork refuses {path[at]}")
                copy.rollback(1)
                self._check_same(
                    FORK, state, own[at + 1], f"{what}: the original, its fork went back"
                )

    def _check_pure(self, sample: GrammarSample, root: GrammarState) -> None:
        for path in self._paths(sample):
            masks = self._masks(path, root.fork(), described(sample.checked))
            asked, silent = root.fork(), root.fork()
            for at, token in enumerate(path):
                what = self._where(sample, path[:at])
                for _ in range(2):
                    self._check_same(PURE, asked, masks[at], f"{what}, asked again")
                if not asked.advance(token) or not silent.advance(token):
                    raise PURE.violation(f"{what}, {self._tokens.name(token)} is refused")
            self._check_same(
                PURE, silent, masks[-1], f"{self._where(sample, path)}, and no mask between them"
            )

    def _check_walk(
        self, compiled: tuple[GrammarSample, GrammarState], steps: Sequence[tuple[str, int]]
    ) -> None:
        sample, root = compiled
        state, path = root.fork(), list[int]()
        own = 0  # tokens since the last fork
        for operation, number in [*steps, ("advance", 0)]:
            where = self._where(sample, path)
            if operation == "advance":
                again = root.fork()
                for token in path:
                    self._move(again, token, where)
                mask = self._mask(again)
                self._check_same(WALKS, state, mask, f"{where}, forked and undone between them")
                ids = sorted(
                    self._allowed(sample, mask, where),
                    key=lambda t: (len(self._tokens.texts[t]), t),
                )
                if ids:  # short ones more often: more of them are in a text
                    path.append(ids[number // 2 % len(ids) if number % 2 else 0])
                    self._move(state, path[-1], where)
                    own += 1
            elif operation == "rollback" and own:
                count = 1 + number % min(own, _MAX_DRAFTS)
                state.rollback(count)
                del path[-count:]
                own -= count
            elif operation == "fork":
                state, own = state.fork(), 0

    def _check_hostile(self, given: Mapping[str, Any]) -> None:
        structured = StructuredOutputs.checked(given)
        thread = _Thread(lambda: self._mask(self._subject.compile(structured).fork()))
        try:
            thread.result(self.compile_seconds)
        except TimeoutError:
            raise HOSTILE_RULE.violation(
                f"{described(structured)}: compile and the first mask took more than "
                f"{self.compile_seconds:g} s"
            ) from None
        except ValueError as error:
            if not str(error).strip():
                raise HOSTILE_RULE.violation(
                    f"{described(structured)}: compile raised {error!r} without a message",
                    "say in the message what is wrong; it becomes the request's error",
                ) from None
        except Violation:
            raise
        except BaseException as cause:
            raise HOSTILE_RULE.violation(
                f"{described(structured)}: it raised {type(cause).__name__}: "
                f"{short_repr(str(cause))}, expected ValueError"
            ) from cause

    def _check_keyword(self, schema: Mapping[str, Any], valid: str, invalid: str) -> None:
        strict = StructuredOutputs(json=dict(schema))
        refused = None
        try:
            root = self._subject.compile(strict)
        except ValueError as error:
            refused = error
            lenient = StructuredOutputs(json=dict(schema), lenient=True)
            try:
                root = self._subject.compile(lenient)
            except ValueError as still:
                raise KEYWORD.violation(
                    f"{described(strict)} with lenient=True: compile raised ValueError: {still}",
                    "leave keywords that are not enforced out of the grammar of such a request",
                ) from None
        for path in self._tokens.tokenisations(valid):
            if not self._is_whole(path, root.fork()):
                raise KEYWORD.violation(f"{described(strict)}: it does not allow {valid}")
        for path in self._tokens.tokenisations(invalid):
            if refused is None and self._is_whole(path, root.fork()):
                raise KEYWORD.violation(f"{described(strict)}: it allows {invalid}")

    def _check_validate(self, schema: Mapping[str, Any], valid: str, invalid: str) -> None:
        lenient = StructuredOutputs(json=dict(schema), lenient=True)
        for answer, is_valid in ((valid, True), (invalid, False), (invalid[:-1] + "{", False)):
            call = f"validate({described(lenient)}, {answer!r})"
            try:
                found = self.grammar.validate(lenient, answer)
            except BaseException as cause:
                raise VALIDATE.violation(f"{call} raised {cause!r}") from cause
            if found is not None and not isinstance(found, str):
                raise VALIDATE.violation(f"{call} returned {found!r}, expected text or None")
            if (found is None) is not is_valid:
                expected = "None" if is_valid else "what is wrong with it"
                raise VALIDATE.violation(f"{call} returned {found!r}, expected {expected}")

    def _check_growth(self) -> None:
        sizes, waves = [], 20
        for _ in range(2):
            for _ in range(waves):
                for sample in self._all_samples:
                    state = self._compile(self._subject, sample.checked).fork()
                    self._mask(state)
            attributes = {n: v for n, v in vars(self._subject).items() if n != "context"}
            sizes.append(count_elements(attributes))
        if sizes[1] - sizes[0] >= waves:
            raise Violation(
                f"the backend's attributes grew from {sizes[0]} to {sizes[1]} elements while "
                f"{waves * len(self._all_samples)} grammars were compiled",
                "keep nothing of a grammar: the engine has a cache of them",
            )

    def _check_forks(self) -> None:
        if self.budget_kib_per_fork is None or not _STATM.exists():
            return
        for sample, root in self._compiled:
            path = next(self._paths(sample), [])
            self._masks(path, root.fork(), described(sample.checked))
            _return_free_memory()
            before, states = _memory_kib(), []
            for _ in range(_FORKS):
                state = root.fork()
                for token in path[:_MAX_DRAFTS]:
                    state.advance(token)
                self._mask(state)
                states.append(state)
            used = (_memory_kib() - before - _SLACK_KIB) / _FORKS
            if used > self.budget_kib_per_fork:
                raise Violation(
                    f"{described(sample.checked)}: {_FORKS} forks, with a few tokens each, have "
                    f"{used:.0f} KiB each; the budget is {self.budget_kib_per_fork:g}",
                    "share what does not change between forks, such as tables of the vocabulary; "
                    "budget_kib_per_fork in the suite is the limit",
                )

    def _check_speed(self) -> None:
        budget = self.budget_ms_per_mask
        assert budget is not None
        texts = [text for sample in self._all_samples for text in sample.texts]
        tokens = SampleTokens(large_vocabulary(texts, _LARGE))
        backend = self._make(tokens)
        for sample in self._all_samples:
            root = self._compile(backend, sample.checked)
            rounds = []
            for _ in range(3):
                rounds.append(statistics.median(self._times(sample, root, tokens)))
                if rounds[-1] <= budget:
                    break
            if min(rounds) > budget:
                raise Violation(
                    f"{described(sample.checked)}: a mask of {_LARGE} tokens costs "
                    f"{min(rounds):.1f} ms (median); the budget is {budget:g}",
                    "walk a tree of the vocabulary's bytes rather than all tokens; "
                    "budget_ms_per_mask in the suite is the limit",
                )
        backend.close()

    def _times(
        self, sample: GrammarSample, root: GrammarState, tokens: SampleTokens
    ) -> Iterator[float]:
        """Yield the milliseconds of each mask in valid texts."""
        for text in sample.texts[:4]:
            text = tokens.text(text, special=self._has_special(sample))
            path, *_ = tokens.tokenisations(text)
            state = root.fork()
            for token in [*path[:20], None]:
                started = time.perf_counter()
                Mask.of(state, len(tokens.texts) + _BEYOND)
                yield (time.perf_counter() - started) * 1e3
                if token is not None:
                    state.advance(token)


_STATM = Path("/proc/self/statm")


def _return_free_memory() -> None:
    """Give the system what was freed, or new objects could be placed there and not be seen."""
    gc.collect()
    with suppress(AttributeError, OSError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def _memory_kib() -> float:
    """Return the resident memory of this process in KiB."""
    pages = int(_STATM.read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


class _Thread:
    """Work in a thread that is left behind if it does not end."""

    def __init__(self, work: Callable[[], Any]) -> None:
        """Start it."""
        self._error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self, seconds: float) -> None:
        """Wait for the end; raise what the work raised.

        Raises:
            TimeoutError: it does not end.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError
        if self._error is not None:
            raise self._error
