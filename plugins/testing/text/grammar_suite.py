"""The conformance suite for grammar backends; the built-in one passes it too."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import GrammarBackend, GrammarContext, RequestError
from hardpoint.plugins.component import Component
from hardpoint.plugins.grammars import GrammarState, Vocabulary
from hardpoint.plugins.structured import StructuredFormat, StructuredOutputs
from hardpoint.testing.component_suite import GeneralComponentSuite
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.suite import Rule, Violation, checks, short_repr
from hardpoint.testing.threads import in_thread

from . import grammar_rules as rules
from .grammar_limits import check_forks, check_growth, check_speed
from .grammar_samples import HOSTILE, KEYWORDS, REFUSED, STANDARD, GrammarSample, described
from .grammar_session import BEYOND, MAX_DRAFTS, GrammarSession, compiled_by
from .grammar_vocabulary import SampleTokens, build_vocabulary

__all__ = ["GrammarSample", "GrammarSuite"]

_MAX_PREFIXES = 600  # of a language, that are walked
_THREADS = 4


def _samples(suite: GrammarSuite) -> Iterator[tuple[GrammarSample, GrammarState]]:
    """Yield each sample and its state before the first token."""
    for sample, root in suite._session.compiled:
        yield sample, root.fork()


def _refused(suite: GrammarSuite) -> Iterator[tuple[StructuredOutputs | Mapping[str, Any]]]:
    for name in suite.grammar.formats:
        yield from ((structured,) for structured in REFUSED.get(name, ()))
    yield from ((structured,) for structured in suite.refused)


def _hostile(suite: GrammarSuite) -> Iterator[tuple[Mapping[str, Any]]]:
    return ((structured,) for name, structured in HOSTILE if name in suite.grammar.formats)


class GrammarSuite(GeneralComponentSuite):
    """Base class of a test class for a grammar backend; sets `grammar` and `samples`.

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
    num_uses = 200
    max_bytes_per_use = 256
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

    @checks(rules.FORMATS)
    def test_formats(self) -> None:
        """Every format that the class states compiles, and the others are refused."""
        known, stated = get_args(StructuredFormat), self.grammar.formats
        if not stated or isinstance(stated, str) or set(stated) - {*known}:
            raise rules.FORMATS.violation(
                f"its formats are {stated!r}", f"state a tuple of some of {', '.join(known)}"
            )
        for name in known:
            for sample in STANDARD[name] if name not in stated else ():
                self._check_raises(sample.checked, rules.FORMATS, f"{name} is not in its formats")
        for _, state in self._session.compiled:
            for method in ("fill_bitmask", "advance", "rollback", "fork"):
                if not callable(getattr(state, method, None)):
                    raise rules.FORMATS.violation(
                        f"compile returned {short_repr(state)}, which has no {method}()",
                        "return a GrammarState",
                    )

    @checks(rules.MASK, cases=_samples)
    def test_mask(self, sample: GrammarSample, root: GrammarState) -> None:
        """At each beginning of a language's texts, exactly the tokens are allowed with which one
        goes on, and the text may end exactly where it is whole. No special token, empty one or id
        beyond the vocabulary is allowed.
        """
        session = self._session
        valid = {*session.texts(sample, sample.language)}
        expected = session.tokens.next_by_prefix(valid)
        pending, seen = [("", root)] if valid else [], {""}
        while pending and len(seen) <= _MAX_PREFIXES:
            prefix, state = pending.pop()
            mask = session.mask(state)
            where = f"{described(sample.checked)}: after {session.tokens.shown(prefix)}"
            allowed, wanted = session.allowed(sample, mask, where), expected[prefix]
            for token in sorted(allowed ^ wanted):
                name = session.tokens.name(token)
                if token in allowed:
                    raise rules.MASK.violation(
                        f"{where}, it allows token {name}, with which no valid text goes on"
                    )
                raise rules.MASK.violation(
                    f"{where}, it does not allow token {name}, with which a valid text goes on"
                )
            if mask.may_end != (prefix in valid):
                raise rules.END_OF_TEXT.violation(
                    f"{where}, fill_bitmask returned {mask.may_end}; that "
                    f"{'is' if prefix in valid else 'is not'} a whole text of the language"
                )
            for token in wanted:
                longer = prefix + session.tokens.texts[token]
                if longer not in seen:
                    seen.add(longer)
                    state_after = state.fork()
                    session.move(state_after, token, where)
                    pending.append((longer, state_after))

    @checks(rules.BYTES, cases=_samples)
    def test_bytes(self, sample: GrammarSample, root: GrammarState) -> None:
        """In any language: a token is allowed exactly where its bytes are, one after the other."""
        session = self._session
        singles = {text: token for token, text in enumerate(session.tokens.texts) if len(text) == 1}
        tree: dict[str, Any] = {}  # by character: the tokens that end there, and what goes on
        for token, text in enumerate(session.tokens.texts):
            if text and all(char in singles for char in text):
                node: dict[str, Any] = tree
                for char in text:
                    node = node.setdefault(char, {})
                node.setdefault("", []).append(token)

        def allowed(state: GrammarState, node: dict[str, Any]) -> Iterator[int]:
            ids = session.mask(state).ids
            for char, child in node.items():
                if char and singles[char] in ids:
                    yield from child.get("", ())
                    if child.keys() - {""}:
                        after = state.fork()
                        session.move(after, singles[char], "byte by byte")
                        yield from allowed(after, child)

        for path, state in session.positions(sample, root):
            where = session.where(sample, path)
            mask = session.allowed(sample, session.mask(state), where)
            special = {*session.tokens.vocabulary.special}
            mask, by_bytes = mask - special, {*allowed(state, tree)} - special
            for token in sorted(mask ^ by_bytes):
                verb = "allows" if token in mask else "does not allow"
                other = "are not" if token in mask else "are"
                raise rules.BYTES.violation(
                    f"{where}, it {verb} token {session.tokens.name(token)}; its bytes one by "
                    f"one {other} allowed"
                )

    @checks(rules.ADVANCE, cases=_samples)
    def test_advance(self, sample: GrammarSample, root: GrammarState) -> None:
        """Every id is accepted exactly if the mask allows it; a refused one changes nothing."""
        session = self._session
        for path, state in session.positions(sample, root):
            where, mask = session.where(sample, path), session.mask(state)
            ends = {session.end} if mask.may_end else set()
            for token in sorted({*range(session.vocab_size)} - ends):
                probe = state.fork() if token in mask.ids else state
                moved = probe.advance(token)
                if moved is not (token in mask.ids):
                    name = "allows" if token in mask.ids else "does not allow"
                    raise rules.ADVANCE.violation(
                        f"{where}, advance({session.tokens.name(token)}) returned {moved!r}, and "
                        f"the mask {name} it"
                    )
            if session.mask(state) != mask:
                raise rules.ADVANCE.violation(
                    f"{where}, the mask has changed after advance() returned False"
                )
            if path:
                state.rollback(1)
                session.move(state, path[-1], f"{where}, after refused tokens and a rollback")
                session.check_same(
                    rules.ADVANCE, state, mask, f"{where}, with refused tokens undone"
                )

    @checks(rules.TEXTS, cases=_samples)
    def test_texts(self, sample: GrammarSample, root: GrammarState) -> None:
        """Valid texts are accepted however they are cut into tokens, and may end; invalid ones may
        not.
        """
        session = self._session
        for text in session.texts(sample, sample.texts):
            for path in session.tokens.tokenizations(text):
                self._check_valid(sample, path, root.fork())
        for text in session.texts(sample, sample.invalid):
            for path in session.tokens.tokenizations(text):
                if session.is_whole(path, root.fork()):
                    raise rules.TEXTS.violation(
                        f"{session.where(sample, path)}, the text may end; it is invalid"
                    )

    @checks(rules.ROLLBACK, cases=_samples)
    def test_rollback(self, sample: GrammarSample, root: GrammarState) -> None:
        """After a rollback of 1 to 8 tokens, the mask equals the mask before them; the same tokens
        can follow again.
        """
        session = self._session
        for path in session.paths(sample):
            where = described(sample.checked)
            masks = session.masks(path, root.fork(), where)
            ends = sorted({len(path), len(path) // 2, min(2, len(path))})
            for end in ends:
                state = root.fork()
                for token in path[:end]:
                    session.move(state, token, where)
                for count in range(1, min(end, MAX_DRAFTS) + 1):
                    state.rollback(count)
                    label = f"{session.where(sample, path[:end])} and a rollback of {count}"
                    session.check_same(rules.ROLLBACK, state, masks[end - count], label)
                    for token in path[end - count : end]:
                        if state.advance(token) is not True:
                            raise rules.ROLLBACK.violation(
                                f"{label}, token {session.tokens.name(token)} is not accepted again"
                            )
                    session.check_same(
                        rules.ROLLBACK, state, masks[end], f"{label}, and the same tokens"
                    )

    @checks(rules.FORK, cases=_samples)
    def test_fork(self, sample: GrammarSample, root: GrammarState) -> None:
        """A fork, its original and other forks do not disturb each other."""
        session = self._session
        paths = [path for path in session.paths(sample, 2) if path]
        where = described(sample.checked)
        before = session.mask(root)
        masks = []
        for path in paths:
            masks.append(session.masks(path, root.fork(), where))
            session.check_same(rules.FORK, root, before, f"{where}: its fork advanced")
        states = [root.fork() for _ in paths]
        for at in range(max(map(len, paths), default=0)):  # in turns
            for path, state, path_masks in zip(paths, states, masks, strict=True):
                if at >= len(path):
                    continue
                label = f"{session.where(sample, path[:at])}, in turns with other forks"
                session.check_same(rules.FORK, state, path_masks[at], label)
                copy = state.fork()
                session.check_same(rules.FORK, copy, path_masks[at], f"{label}: its fork")
                if not state.advance(path[at]):
                    raise rules.FORK.violation(
                        f"{label}, {session.tokens.name(path[at])} is refused"
                    )
                session.check_same(
                    rules.FORK, copy, path_masks[at], f"{label}: the fork, its original advanced"
                )
                if not copy.advance(path[at]):
                    raise rules.FORK.violation(f"{label}: its fork refuses {path[at]}")
                copy.rollback(1)
                session.check_same(
                    rules.FORK,
                    state,
                    path_masks[at + 1],
                    f"{label}: the original, its fork went back",
                )

    @checks(rules.PURE, cases=_samples)
    def test_pure(self, sample: GrammarSample, root: GrammarState) -> None:
        """A mask that is asked for twice, or not at all, changes nothing."""
        session = self._session
        for path in session.paths(sample):
            masks = session.masks(path, root.fork(), described(sample.checked))
            queried, silent = root.fork(), root.fork()
            for at, token in enumerate(path):
                label = session.where(sample, path[:at])
                for _ in range(2):
                    session.check_same(rules.PURE, queried, masks[at], f"{label}, asked again")
                if not queried.advance(token) or not silent.advance(token):
                    raise rules.PURE.violation(f"{label}, {session.tokens.name(token)} is refused")
            session.check_same(
                rules.PURE,
                silent,
                masks[-1],
                f"{session.where(sample, path)}, and no mask between them",
            )

    def test_walks(self) -> None:
        """After any tokens, rollbacks and forks, the mask equals the mask of a new fork with the
        same tokens.
        """
        session = self._session

        def check(index: int, steps: list[tuple[str, int]]) -> None:
            self._check_walk(session.compiled[index % len(session.compiled)], steps)

        operations = st.sampled_from(
            ["advance", "advance", "advance", "rollback", "rollback", "fork"]
        )
        self._search(
            rules.WALKS.text,
            80,
            check,
            index=st.integers(0, 99),
            steps=st.lists(st.tuples(operations, st.integers(0, 9999)), max_size=20),
        )

    @checks(rules.THREADS)
    def test_threads(self) -> None:
        """Grammars compile in several threads at once, and forks of one are used in several at
        once.
        """
        session = self._session
        paths = [next(session.paths(sample), []) for sample, _ in session.compiled]
        alone = [
            session.masks(path, root.fork(), described(sample.checked))
            for path, (sample, root) in zip(paths, session.compiled, strict=True)
        ]
        shared = [[root.fork() for _ in range(_THREADS)] for _, root in session.compiled]
        start = threading.Barrier(_THREADS)

        def work(number: int) -> None:
            start.wait()
            for index in random.Random(number).sample(range(len(paths)), len(paths)):
                structured = session.compiled[index][0].checked
                for state, how in (
                    (compiled_by(session.backend, structured), "compiled there"),
                    (shared[index][number], "compiled in another one"),
                ):
                    masks = session.masks(paths[index], state, described(structured))
                    if masks != alone[index]:
                        raise rules.THREADS.violation(
                            f"{described(structured)}: a state of one of {_THREADS} threads at "
                            f"once, {how}, had other masks than alone"
                        )

        seconds = self.compile_seconds * len(paths)
        threads = [in_thread(partial(work, number)) for number in range(_THREADS)]
        for thread in threads:
            try:
                thread.result(seconds)
            except TimeoutError:
                raise rules.THREADS.violation(f"a thread did not end within {seconds} s") from None
            except Violation as violation:
                raise rules.THREADS.violation(
                    f"in one of {_THREADS} threads at once: {violation.observed}"
                ) from None
            except BaseException as cause:
                raise rules.THREADS.violation(
                    f"in one of {_THREADS} threads at once it raised {type(cause).__name__}: "
                    f"{cause}"
                ) from cause

    @checks(rules.REFUSED, cases=_refused)
    def test_refused(self, description: StructuredOutputs | Mapping[str, Any]) -> None:
        """A description that means nothing is refused by a ValueError that gives the reason."""
        try:
            structured = StructuredOutputs.checked(description)
        except RequestError:  # the engine refuses it before any backend sees it
            return
        self._check_raises(structured, rules.REFUSED, "it means nothing")

    @checks(rules.HOSTILE, cases=_hostile)
    def test_hostile(self, description: Mapping[str, Any]) -> None:
        """Large, deep, contradictory and endless descriptions compile, or are refused by a
        ValueError, in time.
        """
        session = self._session
        structured = StructuredOutputs.checked(description)
        thread = in_thread(lambda: session.mask(session.backend.compile(structured).fork()))
        try:
            thread.result(self.compile_seconds)
        except TimeoutError:
            raise rules.HOSTILE.violation(
                f"{described(structured)}: compile and the first mask took more than "
                f"{self.compile_seconds:g} s"
            ) from None
        except ValueError as error:
            if not str(error).strip():
                raise rules.HOSTILE.violation(
                    f"{described(structured)}: compile raised {error!r} without a message",
                    "name the mistake in the message; it becomes the request's error",
                ) from None
        except Violation:
            raise
        except BaseException as cause:
            raise rules.HOSTILE.violation(
                f"{described(structured)}: it raised {type(cause).__name__}: "
                f"{short_repr(str(cause))}, expected ValueError"
            ) from cause

    @checks(rules.KEYWORD, cases=lambda _suite: KEYWORDS)
    def test_keywords(self, schema: Mapping[str, Any], valid: str, invalid: str) -> None:
        """Each keyword of a JSON schema is enforced, or its schema is refused; with `lenient` it
        compiles.
        """
        if "json" not in self.grammar.formats:
            pytest.skip("it does not compile JSON schemas")
        session = self._session
        strict = StructuredOutputs(json=dict(schema))
        refused = None
        try:
            root = session.backend.compile(strict)
        except ValueError as error:
            refused = error
            lenient = StructuredOutputs(json=dict(schema), lenient=True)
            try:
                root = session.backend.compile(lenient)
            except ValueError as still:
                raise rules.KEYWORD.violation(
                    f"{described(strict)} with lenient=True: compile raised ValueError: {still}",
                    "leave keywords that are not enforced out of the grammar of such a request",
                ) from None
        for path in session.tokens.tokenizations(valid):
            if not session.is_whole(path, root.fork()):
                raise rules.KEYWORD.violation(f"{described(strict)}: it does not allow {valid}")
        for path in session.tokens.tokenizations(invalid):
            if refused is None and session.is_whole(path, root.fork()):
                raise rules.KEYWORD.violation(f"{described(strict)}: it allows {invalid}")

    @checks(rules.VALIDATE, cases=lambda _suite: KEYWORDS)
    def test_validate(self, schema: Mapping[str, Any], valid: str, invalid: str) -> None:
        """`validate`, if a backend has it, finds the mistake in an invalid answer, and none in a
        valid one.
        """
        if self.grammar.validate.__func__ is GrammarBackend.validate.__func__:  # type: ignore[attr-defined]
            pytest.skip("it leaves the validation of answers to the default backend")
        lenient = StructuredOutputs(json=dict(schema), lenient=True)
        for answer, is_valid in ((valid, True), (invalid, False), (invalid[:-1] + "{", False)):
            call = f"validate({described(lenient)}, {answer!r})"
            try:
                problem = self.grammar.validate(lenient, answer)
            except BaseException as cause:
                raise rules.VALIDATE.violation(f"{call} raised {cause!r}") from cause
            if problem is not None and not isinstance(problem, str):
                raise rules.VALIDATE.violation(
                    f"{call} returned {problem!r}, expected text or None"
                )
            if (problem is None) is not is_valid:
                expected = "None" if is_valid else "the mistake"
                raise rules.VALIDATE.violation(f"{call} returned {problem!r}, expected {expected}")

    @checks("memory: a fork is small, and a backend keeps nothing of a grammar")
    def test_memory(self) -> None:
        """A fork is small, and nothing grows with the number of grammars."""
        check_growth(self._session)
        check_forks(self._session, self.budget_kib_per_fork)

    @checks("speed: a mask costs no more than its budget, for the whole batch waits for it")
    def test_speed(self) -> None:
        """A mask costs no more than its budget."""
        if self.budget_ms_per_mask is None:
            pytest.skip("budget_ms_per_mask is None")
        check_speed(self._session, self._make, self.budget_ms_per_mask)

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        samples = self._session.samples
        backend = self._make()

        def use(number: int) -> None:
            sample = samples[number % len(samples)]
            self._session.mask(compiled_by(backend, sample.checked).fork())

        yield InUse(backend, use)

    @cached_property
    def _session(self) -> GrammarSession:
        """The instance under test, with samples; formats without samples use the suite's."""
        sampled = {sample.checked.format for sample in self.samples}
        standard = [s for name in self.grammar.formats for s in STANDARD.get(name, ())]
        samples = [*self.samples, *(s for s in standard if s.checked.format not in sampled)]
        texts = [text for sample in samples for text in [*sample.texts, *sample.invalid]]
        vocabulary = self.vocabulary or build_vocabulary(texts, self.special_tokens)
        tokens = SampleTokens(vocabulary)
        return GrammarSession(self._make(tokens), samples, tokens)

    def _make(self, tokens: SampleTokens | None = None) -> GrammarBackend:
        if tokens is None:
            return self._make(self._session.tokens)
        backend: GrammarBackend = self._build(
            GrammarContext,
            vocabulary=tokens.vocabulary,
            vocab_size=len(tokens.vocabulary.tokens) + BEYOND,
            compile_seconds=self.compile_seconds,
        )
        return backend

    def _check_raises(self, structured: StructuredOutputs, rule: Rule, reason: str) -> None:
        text = described(structured)
        try:
            self._session.backend.compile(structured)
        except ValueError as error:
            if type(error) is UnicodeDecodeError or not str(error).strip():
                raise rule.violation(
                    f"{text}: compile raised {error!r} without the reason",
                    "name the mistake in the message; it becomes the request's error",
                ) from None
            return
        except Exception as cause:
            raise rule.violation(
                f"{text}: compile raised {type(cause).__name__}: {cause}, expected ValueError"
            ) from cause
        raise rule.violation(f"{text}: it compiled, but {reason}")

    def _check_valid(self, sample: GrammarSample, path: list[int], state: GrammarState) -> None:
        session = self._session
        for at, token in enumerate(path):
            if token not in session.mask(state).ids or state.advance(token) is not True:
                raise rules.TEXTS.violation(
                    f"{session.where(sample, path[:at])}, it does not allow token "
                    f"{session.tokens.name(token)} of the valid text "
                    f"{session.tokens.shown(''.join(session.tokens.texts[t] for t in path))}"
                )
        if not session.mask(state).may_end:
            raise rules.TEXTS.violation(
                f"{session.where(sample, path)}, the text may not end; it is valid and whole"
            )

    def _check_walk(
        self, compiled: tuple[GrammarSample, GrammarState], steps: Sequence[tuple[str, int]]
    ) -> None:
        session = self._session
        sample, root = compiled
        state, path = root.fork(), list[int]()
        depth = 0  # tokens since the last fork
        for operation, number in [*steps, ("advance", 0)]:
            where = session.where(sample, path)
            if operation == "advance":
                again = root.fork()
                for token in path:
                    session.move(again, token, where)
                mask = session.mask(again)
                session.check_same(
                    rules.WALKS, state, mask, f"{where}, forked and undone between them"
                )
                ids = sorted(
                    session.allowed(sample, mask, where),
                    key=lambda t: (len(session.tokens.texts[t]), t),
                )
                if ids:  # short ones more often: more of them are in a text
                    path.append(ids[number // 2 % len(ids) if number % 2 else 0])
                    session.move(state, path[-1], where)
                    depth += 1
            elif operation == "rollback" and depth:
                count = 1 + number % min(depth, MAX_DRAFTS)
                state.rollback(count)
                del path[-count:]
                depth -= count
            elif operation == "fork":
                state, depth = state.fork(), 0
