"""The conformance suite for logits processors: what the built-ins pass, in your tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import pytest
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from hardpoint.plugins import (
    BatchLogitsProcessor,
    Phase,
    Reads,
    ReasoningParser,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.logits import LogitsPlugin
from hardpoint.registry.loading import snake_case
from hardpoint.testing.suite import (
    Search,
    Violation,
    describe,
    fail,
    refuse_replaced_tests,
    replayed,
)

from .histories import check_history, steps
from .host_sync import Unknown
from .rules import claims as claims
from .rules import results as results
from .rules import states as states
from .subject import MAX_ROWS, Case, Subject


class LogitsSuiteBase:
    """Settings and searches; the rules are in LogitsProcessorSuite.

    Attributes:
        processor: the class under test, of any of the three forms.
        arguments: a hypothesis strategy for its Arguments, as instances or plain data; None for a
            processor that takes none. Token ids must be under `vocab_size`.
        options: what an operator would write under `[plugin.<name>]`.
        params: a strategy for what requests ask for beside.
        name: under which it is enabled; the class's in snake_case if None.
        vocab_size: width of the logits.
        stop_token_ids: every request's.
        tokenizer, reasoning: what `prepare` gets.
        budget_us_per_row: microseconds that one row may cost; None does not measure.
        budget_vocab_size: width of the logits for that.
        examples: scales how many cases each rule is tried on; 10 for a thorough run.
        replay_seed: makes the searches of an earlier run again; None draws new ones. The
            environment variable HARDPOINT_SEED does the same from outside.
    """

    processor: ClassVar[type[LogitsPlugin]]
    arguments: ClassVar[st.SearchStrategy[Any] | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    params: ClassVar[st.SearchStrategy[SamplingParams] | None] = None
    name: ClassVar[str | None] = None
    vocab_size: ClassVar[int] = 131
    stop_token_ids: ClassVar[tuple[int, ...]] = (2, 5)
    tokenizer: ClassVar[Tokenizer | None] = None
    reasoning: ClassVar[ReasoningParser | None] = None
    budget_us_per_row: ClassVar[float | None] = 2000.0
    budget_vocab_size: ClassVar[int] = 32_000
    examples: ClassVar[float] = 1.0
    replay_seed: ClassVar[int | None] = None

    def _subject(self, vocab_size: int | None = None) -> Subject:
        return Subject(
            cls=self.processor,
            name=self.name or snake_case(self.processor.__name__),
            options=self.options,
            vocab_size=vocab_size or self.vocab_size,
            stop_token_ids=self.stop_token_ids,
            tokenizer=self.tokenizer,
            reasoning=self.reasoning,
        )

    def _cases(self, subject: Subject) -> st.SearchStrategy[Case]:
        return subject.cases(self.arguments, self.params)

    def _users(self, subject: Subject) -> st.SearchStrategy[Case]:
        return subject.cases(self.arguments, self.params, users_only=True, sampled_only=True)

    def _several_users(self, subject: Subject) -> st.SearchStrategy[list[Case]]:
        return st.lists(self._users(subject), min_size=1, max_size=3)

    def _without_drafts(self, subject: Subject) -> None:
        if issubclass(subject.cls, BatchLogitsProcessor) and not subject.cls.supports_drafts:
            pytest.skip("supports_drafts is False: drafts never meet it")

    def _once(self, rule: str, check: Callable[[], None]) -> None:
        try:
            check()
        except Violation as violation:
            self._fail(rule, violation)

    def _search(
        self,
        subject: Subject,
        rule: str,
        examples: int,
        check: Callable[..., None],
        **strategies: st.SearchStrategy[Any],
    ) -> None:
        """Try a rule on drawn cases; fail with what an author needs to see it again."""
        search = Search(max(1, round(examples * self.examples)), self.replay_seed)
        try:
            found = search.run(check, **strategies)
        except Unsatisfiable:
            reason = f", lately because {subject.refusals[-1]!r}" if subject.refusals else ""
            self._fail(
                rule,
                Violation(
                    f"no request could be made: prepare refused whatever `arguments` gave{reason}",
                    "let the strategy `arguments` make what prepare accepts; set vocab_size, "
                    "stop_token_ids, tokenizer, reasoning or params if it needs them",
                ),
            )
        if found is not None:
            self._fail(rule, found.violation, replayed(found, describe(found.drawn)))

    def _fail(self, rule: str, violation: Violation, case: str = "") -> NoReturn:
        fail(self.processor, rule, violation, case)


_SEEDS = st.integers(0, 2**16)


class LogitsProcessorSuite(LogitsSuiteBase):
    """Derive a test class from it, and set what your processor needs.

    `processor`, `arguments` and `options` are the ones that most need; LogitsSuiteBase lists all.
    """

    def test_contract(self) -> None:
        """It states its contract, phase and types; options and arguments travel."""
        rule = "the contract: a loader must be able to check and build it"
        self._once(rule, lambda: refuse_replaced_tests(type(self), LogitsProcessorSuite))
        self._once(rule, lambda: claims.check_contract(self._subject()))
        subject = self._subject()
        self._search(
            subject,
            rule,
            30,
            lambda case: claims.check_round_trip(subject, case),
            case=self._users(subject),
        )

    def test_history(self) -> None:
        """In any history of a batch a row is what its request gives alone."""
        subject = self._subject()
        cases = st.lists(self._cases(subject), min_size=1, max_size=5)
        self._search(
            subject,
            "alone or in company: a row's result depends on its request only",
            50,
            lambda cases, history: check_history(subject, cases, history),
            cases=cases,
            history=steps(),
        )

    def test_swaps(self) -> None:
        """Rows may change places."""
        subject = self._subject()
        places = st.integers(0, MAX_ROWS - 1)
        self._search(
            subject,
            "swaps: requests that change places keep what is theirs",
            40,
            lambda cases, swaps, seed: states.check_swaps(subject, cases, swaps, seed),
            cases=st.lists(self._cases(subject), min_size=2, max_size=4),
            swaps=st.lists(st.tuples(places, places), min_size=1, max_size=4),
            seed=_SEEDS,
        )

    def test_bystanders(self) -> None:
        """Requests that do not use it notice nothing."""
        subject = self._subject()
        if subject.everybody_uses_it(SamplingParams()):
            pytest.skip("every request uses this processor: there are no bystanders")
        self._search(
            subject,
            "bystanders: rows of requests that do not use it keep their bits",
            60,
            lambda cases, seed: results.check_bystanders(subject, cases, seed),
            cases=st.lists(self._cases(subject), min_size=1, max_size=4),
            seed=_SEEDS,
        )

    def test_argmax_claim(self) -> None:
        """The likeliest token stays, if the class says so."""
        subject = self._subject()
        if not subject.cls.argmax_invariant:
            pytest.skip("argmax_invariant is False: nothing is claimed")
        self._search(
            subject,
            "argmax_invariant: the likeliest token never changes",
            120,
            lambda cases, seed, kind: results.check_argmax_claim(subject, cases, seed, kind),
            cases=self._several_users(subject),
            seed=_SEEDS,
            kind=st.sampled_from(["plain", "ties", "masked", "flat", "huge", "survivor"]),
        )

    def test_pure(self) -> None:
        """`apply` and `edits` change no state and may be called twice."""
        subject = self._subject()
        self._search(
            subject,
            "pure: apply and edits change nothing but their result",
            60,
            lambda cases, seed: states.check_pure(subject, cases, seed),
            cases=self._several_users(subject),
            seed=_SEEDS,
        )

    def test_advance(self) -> None:
        """A state carried on equals one started over."""
        subject = self._subject()
        tokens = st.integers(0, 3) | st.integers(0, self.vocab_size - 1)
        self._search(
            subject,
            "start over: start on the whole history equals start and advance",
            60,
            lambda cases, tokens, seed: states.check_advance(subject, cases, tokens, seed),
            cases=self._several_users(subject),
            tokens=st.lists(tokens, min_size=1, max_size=8),
            seed=_SEEDS,
        )

    def test_fork(self) -> None:
        """Drafts leave the request's own state alone."""
        subject = self._subject()
        self._without_drafts(subject)
        self._search(
            subject,
            "fork: advancing a forked state leaves the original as it was",
            60,
            lambda case, drafts, seed: states.check_fork(subject, case, drafts, seed),
            case=self._users(subject),
            drafts=st.lists(st.integers(0, 3), min_size=1, max_size=4),
            seed=_SEEDS,
        )

    def test_drafts(self) -> None:
        """The row of a draft equals that of the real token."""
        subject = self._subject()
        self._without_drafts(subject)
        drafts = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=3)
        self._search(
            subject,
            "drafts: a draft's row is that of a request which really said it",
            60,
            lambda cases, drafts, seed: states.check_drafts(subject, cases, drafts, seed),
            cases=self._several_users(subject),
            drafts=drafts,
            seed=_SEEDS,
        )

    def test_deterministic(self) -> None:
        """Equal inputs give equal results."""
        subject = self._subject()
        self._search(
            subject,
            "deterministic: equal inputs give equal logits",
            60,
            lambda cases, seed: results.check_deterministic(subject, cases, seed),
            cases=self._several_users(subject),
            seed=_SEEDS,
        )

    def test_sound(self) -> None:
        """There is always a token to choose."""
        subject = self._subject()
        self._search(
            subject,
            "sound: no NaN, no +inf, and a token left, for every argument that is accepted",
            120,
            lambda cases, seed, kind: results.check_sound(subject, cases, seed, kind),
            cases=self._several_users(subject),
            seed=_SEEDS,
            kind=st.sampled_from(["plain", "ties", "flat", "masked"]),
        )

    def test_masks_stay(self) -> None:
        """What a mask forbade stays forbidden."""
        subject = self._subject()
        if subject.cls.phase is Phase.FORCE:
            pytest.skip("a processor of Phase.FORCE has the last word")
        self._search(
            subject,
            "masks stay: a token at -inf stays at -inf",
            60,
            lambda cases, seed: results.check_masks_stay(subject, cases, seed),
            cases=self._several_users(subject),
            seed=_SEEDS,
        )

    def test_reads(self) -> None:
        """It reads no ids on the host, if the class says so."""
        subject = self._subject()
        if subject.cls.reads is Reads.HOST_IDS:
            pytest.skip("reads = Reads.HOST_IDS: it may look at everything")
        self._search(
            subject,
            "reads: only what is declared is looked at",
            60,
            lambda cases, seed: claims.check_reads(subject, cases, seed),
            cases=self._several_users(subject),
            seed=_SEEDS,
        )

    def test_no_sync(self) -> None:
        """It asks the device for no value, if the class says so."""
        subject = self._subject()
        if subject.cls.reads is Reads.HOST_IDS:
            pytest.skip("reads = Reads.HOST_IDS: it may make the host wait")
        try:
            self._search(
                subject,
                "no sync: apply, edits and advance_rows never wait for the device",
                20,
                lambda cases: claims.check_no_sync(subject, cases),
                cases=self._several_users(subject),
            )
        except Unknown as why:
            pytest.skip(f"it cannot be told without a device: {why}")

    def test_memory(self) -> None:
        """Requests that are gone leave nothing behind."""
        subject = self._subject()
        self._search(
            subject,
            "memory: nothing grows with the number of requests that were served",
            2,
            lambda cases: claims.check_memory(subject, cases, waves=10),
            cases=st.lists(self._users(subject), min_size=2, max_size=4),
        )

    def test_speed(self) -> None:
        """A row costs no more than the budget."""
        budget = self.budget_us_per_row
        if budget is None:
            pytest.skip("budget_us_per_row is None")
        subject = self._subject(self.budget_vocab_size)

        def check(cases: list[Case]) -> None:
            cost = claims.microseconds_per_row(subject, cases, rounds=3)
            if cost > budget:  # perhaps the machine was busy
                cost = min(cost, claims.microseconds_per_row(subject, cases, rounds=20))
            if cost > budget:
                raise Violation(
                    f"a row of {self.budget_vocab_size} logits cost {cost:.0f} microseconds, the "
                    f"budget is {budget:.0f}",
                    "work on whole tensors instead of token by token, cache what depends on the "
                    "rows alone by rows.version; or set budget_us_per_row to what you accept",
                )

        case = subject.cases(self.arguments, self.params, users_only=True, sampled_only=True)
        self._search(
            subject,
            "speed: a row costs no more than its budget",
            2,
            check,
            cases=st.lists(case, min_size=MAX_ROWS, max_size=MAX_ROWS),
        )
