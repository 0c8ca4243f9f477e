"""The conformance suite for logits processors; the built-in ones pass it too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import (
    Phase,
    Reads,
    ReasoningMarkers,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.requests import FinishedError
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.testing.component_suite import LIVE, check_live_change
from hardpoint.testing.engine_access import plugin_name
from hardpoint.testing.general.growth import RESOURCES
from hardpoint.testing.general.suite import GeneralSuite, InUse
from hardpoint.testing.pytest_hooks import examples_scale
from hardpoint.testing.scripted_tokenizer import ByteTokenizer
from hardpoint.testing.suite import (
    NOTHING_DRAWN,
    Violation,
    checks,
    reject_replaced_tests,
)

from .batch import make_logits
from .histories import HistoryStep, SimulatedBatch, check_history, steps
from .host_sync import UndecidableError
from .rules import claims, results, states
from .subject import MAX_ROWS, RequestCase, Subject, drawn_tokens

_SEEDS = st.integers(0, 2**16)
_DRAFTED = 4  # ids of drafts are less, or the arguments'


class LogitsProcessorSuite(GeneralSuite):
    """Base class of a test class, which sets `processor`, and `arguments` if it takes some.

    The attributes of ConformanceSuite hold too.

    Attributes:
        processor: the class under test, of any of the three forms.
        arguments: a hypothesis strategy for its Arguments, as instances or plain data; None for a
            processor without arguments. Token ids must be below `vocab_size`.
        params: a strategy for the other SamplingParams of requests.
        vocab_size: width of the logits.
        stop_token_ids: the stop tokens of every request.
        tokenizer: tokenizer for `prepare`. None, the default: one token per byte for most requests,
            and none for others; with a `vocab_size` below 257, for all.
        reasoning: reasoning markers for `prepare`.
        budget_us_per_row: maximum microseconds per row; None does not measure.
        budget_vocab_size: width of the logits for that measurement.
    """

    processor: ClassVar[type[LogitsPlugin]]
    arguments: ClassVar[st.SearchStrategy[Any] | None] = None
    params: ClassVar[st.SearchStrategy[SamplingParams] | None] = None
    vocab_size: ClassVar[int] = 257
    stop_token_ids: ClassVar[tuple[int, ...]] = (2, 5)
    tokenizer: ClassVar[Tokenizer | None] = None
    reasoning: ClassVar[ReasoningMarkers | None] = None
    budget_us_per_row: ClassVar[float | None] = 2000.0
    budget_vocab_size: ClassVar[int] = 32_000

    def test_contract(self) -> None:
        """The class states `contract` and `phase`, has the right types and can be built. `uses`
        returns True only if each field of Arguments has a default. Options and arguments survive
        the transport to another process: as plain data, and pickled.
        """
        rule = "contract: the loader can check and build the class"
        self._run_checks(
            rule,
            lambda: reject_replaced_tests(type(self), LogitsProcessorSuite),
            lambda: claims.check_contract(self._subject),
            lambda: claims.check_uses(self._subject),
        )
        self._search_cases(rule, 30, claims.check_round_trip, case=self._users())

    def test_effect(self) -> None:
        """In some of the cases it runs, changes a logit, and reads the state that it declares:
        otherwise the other rules would test nothing.
        """
        seen = results.Effects(self._subject)
        # It ends as soon as all was seen, so a short run tries as many cases: few may not show it.
        scale = min(self.examples * examples_scale(), 1.0)
        self._search_cases(
            results.EFFECT,
            round(300 / scale),
            lambda _, **drawn: seen.add(**drawn),
            cases=self._several_users(),
            tokens=drawn_tokens(self.vocab_size, max_size=6),
            seed=_SEEDS,
        )
        self._run_checks(results.EFFECT, seen.check)

    def test_history(self) -> None:
        """Requests are added, finish, are preempted and resumed, skip steps, and move between rows,
        among others that do not use the processor. After each step each row equals, bit for bit,
        the result of a new instance for that request alone, started on its whole history. With
        `observe`, the new instance has run the request from its start, without preemption. A state
        is as `State` and `max_state_bytes` declare.
        """
        self._search_cases(
            "history: a row's result depends on its own request only",
            50,
            check_history,
            cases=self._some_users(1, 5),
            history=steps(),
        )

    def test_swaps(self) -> None:
        """The same when two requests exchange their rows."""
        rows = st.integers(0, MAX_ROWS - 1)
        self._search_cases(
            "swaps: requests that exchange rows keep their state",
            40,
            states.check_swaps,
            cases=self._some_users(2, 4),
            swaps=st.lists(st.tuples(rows, rows), min_size=1, max_size=4),
            seed=_SEEDS,
        )

    def test_bystanders(self) -> None:
        """Rows of requests that do not use it keep their bits. If no request uses it, it is not
        called and the same tensor is returned.
        """
        rule = "bystanders: rows of requests that do not use the processor keep their bits"
        self._run_checks(rule, self._skip_without_bystanders)
        self._search_cases(
            rule,
            60,
            results.check_bystanders,
            cases=self._some_users(1, 4),
            seed=_SEEDS,
        )

    def test_argmax_claim(self) -> None:
        """If it declares `argmax_invariant = True`: the most likely token (the lowest id of equals)
        never changes, with ties, masks, huge values, equal values and a single survivor.
        """
        if not self.processor.argmax_invariant:
            pytest.skip("argmax_invariant is False: nothing is declared")
        self._search_cases(
            "argmax_invariant: the most likely token never changes",
            120,
            results.check_argmax_claim,
            cases=self._several_users(),
            seed=_SEEDS,
            kind=st.sampled_from(["plain", "ties", "masked", "flat", "huge", "survivor"]),
        )

    def test_pure(self) -> None:
        """`apply` or `edits` called twice, in another order of rows, or row by row gives the same.
        It changes no state, no list of ids and no arguments.
        """
        self._search_cases(
            "pure: apply and edits change nothing but their result",
            60,
            states.check_pure,
            cases=self._several_users(),
            seed=_SEEDS,
        )

    def test_advance(self) -> None:
        """A state advanced token by token equals a state started on all the tokens; likewise state
        on the device.
        """
        if self._subject.observes:
            pytest.skip("it observes: a state is never started on a history")
        self._search_cases(
            "advance: start on the whole history equals start and advance",
            60,
            states.check_advance,
            cases=self._several_users(),
            tokens=drawn_tokens(self.vocab_size, min_size=1, max_size=8),
            seed=_SEEDS,
        )

    def test_fork(self) -> None:
        """Advancing a forked state over draft tokens does not change the original."""
        self._skip_without_drafts()
        if self._subject.observes:
            pytest.skip("it observes: test_drafts checks the forks, too")
        self._search_drafts(
            "fork: advancing a forked state does not change the original", states.check_fork
        )

    def test_drafts(self) -> None:
        """The row of a draft token equals the row of a request that generated it; with `observe`
        row after row, on forks.
        """
        self._skip_without_drafts()
        rule = "drafts: a draft's row equals the row of a request that generated the token"
        if self._subject.observes:
            self._search_drafts(rule, states.check_observed_drafts)
            return
        drafts = st.lists(drawn_tokens(_DRAFTED, max_size=3), min_size=1, max_size=3)
        self._search_cases(
            rule,
            60,
            states.check_drafts,
            cases=self._several_users(),
            drafts=drafts,
            seed=_SEEDS,
        )

    def test_resume(self) -> None:
        """With `observe`: a new instance that starts without outputs, and observes each token with
        the logprob that it had, has the same state. So another engine can go on with a request.
        """
        if not self._subject.observes:
            pytest.skip("it does not observe: test_advance checks the states in another engine")
        if not self.processor.supports_resume:
            pytest.skip("supports_resume is False: no other engine goes on with its requests")
        self._search_cases(
            "resume: start and observe give another engine the same state",
            60,
            states.check_resumed,
            case=self._users(),
            tokens=drawn_tokens(self.vocab_size, min_size=1, max_size=5),
            seed=_SEEDS,
        )

    def test_ends(self) -> None:
        """If `advance` or `observe` returns a `Finish`: the request ends at the same token alone,
        in a batch, after a preemption, and where the token is a draft.
        """
        self._search_cases(
            "ends: a request ends at the same token in any batch, and over drafts",
            20,
            states.check_ends,
            cases=self._several_users(),
            tokens=drawn_tokens(self.vocab_size, min_size=1, max_size=5),
            seed=_SEEDS,
        )

    def test_deterministic(self) -> None:
        """Two new instances give equal results for equal inputs."""
        self._search_cases(
            "deterministic: equal inputs give equal logits",
            60,
            results.check_deterministic,
            cases=self._several_users(),
            seed=_SEEDS,
        )

    def test_valid_logits(self) -> None:
        """Right shape, type and device; no NaN, no +inf, and a token left to choose, for all
        accepted arguments.
        """
        self._search_cases(
            "valid logits: no NaN, no +inf, and a token left, for every accepted argument",
            120,
            results.check_valid_logits,
            cases=self._several_users(),
            seed=_SEEDS,
            kind=st.sampled_from(["plain", "ties", "flat", "masked"]),
        )

    def test_masks_stay(self) -> None:
        """A token at -inf stays there: masks and grammars ran before. (Not for `Phase.FORCE`.)"""
        if self.processor.phase is Phase.FORCE:
            pytest.skip("a processor of Phase.FORCE may unmask tokens")
        self._search_cases(
            "masks stay: a token at -inf stays at -inf",
            60,
            results.check_masks_stay,
            cases=self._several_users(),
            seed=_SEEDS,
        )

    def test_reads(self) -> None:
        """If it declares `Reads.LOGITS` or `DEVICE_IDS`: it does not read ids on the host."""
        if self.processor.reads is Reads.HOST_IDS:
            pytest.skip("reads = Reads.HOST_IDS: it may read everything")
        self._search_cases(
            "reads: only declared inputs are read",
            60,
            claims.check_reads,
            cases=self._several_users(),
            seed=_SEEDS,
        )

    def test_no_sync(self) -> None:
        """In the same case: it never reads a device value on the host (`.item()`, `if tensor`,
        `nonzero()`, `.cpu()`). No device is needed: it runs on tensors without values.
        """
        if self.processor.reads is Reads.HOST_IDS:
            pytest.skip("reads = Reads.HOST_IDS: it may make the host wait")
        try:
            self._search_cases(
                "no sync: apply, edits and advance_rows never wait for the device",
                20,
                claims.check_no_sync,
                cases=self._several_users(),
            )
        except UndecidableError as reason:
            pytest.skip(f"undecidable without a device: {reason}")

    @checks(LIVE)
    def test_live_change(self) -> None:
        """A second instance is built and closed next to the first, as a live change does: nothing
        of module and class changes, no thread of the first ends, and none is left at the end.
        """
        check_live_change(self.processor, lambda: self._subject.build().processor)

    def test_memory(self) -> None:
        """Finished requests are not referenced any more, and nothing grows with their number."""
        self._search_cases(
            "memory: nothing grows with the number of finished requests",
            2,
            partial(claims.check_memory, waves=10),
            cases=st.lists(self._users(), min_size=2, max_size=4),
        )

    def test_speed(self) -> None:
        """A row costs no more than the budget: the median of the best round."""
        if self.budget_us_per_row is None:
            pytest.skip("budget_us_per_row is None")
        subject = self._with_vocabulary(self.budget_vocab_size)
        case = subject.cases(self.arguments, self.params, users_only=True, sampled_only=True)
        self._search(
            "speed: a row costs no more than its budget",
            2,
            partial(claims.check_speed, subject, budget=self.budget_us_per_row),
            cases=st.lists(case, min_size=MAX_ROWS, max_size=MAX_ROWS),
        )

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        cases = self._sampled(RESOURCES, self._users(), 4)
        batch = SimulatedBatch(self._subject)

        def use(number: int) -> None:
            add = HistoryStep((("add", number % len(cases)),), 0, False)
            for step in (add, HistoryStep((), 0, False)):
                batch.apply_events(step, cases)
                sampled = batch.sampled_requests(step)
                logits = make_logits(number, len(sampled), self.vocab_size)
                batch.advance(sampled, logits, batch.process(sampled, logits))
            batch.apply_events(HistoryStep((("finish", 0),), 0, False), cases)

        yield InUse(batch.pipeline.processor, use)

    def _component(self) -> type[LogitsPlugin]:
        return self.processor

    @cached_property
    def _subject(self) -> Subject:
        return self._with_vocabulary(self.vocab_size)

    @cached_property
    def _rejections(self) -> list[str]:
        return []

    def _with_vocabulary(self, vocab_size: int) -> Subject:
        default = ByteTokenizer()
        return Subject(
            cls=self.processor,
            name=self.name or plugin_name(self.processor),
            options=self.options,
            vocab_size=vocab_size,
            stop_token_ids=self.stop_token_ids,
            tokenizer=self.tokenizer,
            default_tokenizer=default if default.vocab_size <= vocab_size else None,
            reasoning=self.reasoning,
            rejections=self._rejections,
        )

    def _some_users(self, min_size: int, max_size: int) -> st.SearchStrategy[list[RequestCase]]:
        """Return a strategy for requests, at least one with the processor."""
        cases = self._subject.cases(self.arguments, self.params)
        drawn = st.lists(cases, min_size=min_size, max_size=max_size)
        return drawn.filter(lambda cases: any(case.uses for case in cases))

    def _users(self) -> st.SearchStrategy[RequestCase]:
        return self._subject.cases(self.arguments, self.params, users_only=True, sampled_only=True)

    def _several_users(self) -> st.SearchStrategy[list[RequestCase]]:
        return st.lists(self._users(), min_size=1, max_size=3)

    def _skip_without_bystanders(self) -> None:
        if self._subject.used_by_default(SamplingParams()):
            pytest.skip("every request uses this processor: there are no bystanders")

    def _skip_without_drafts(self) -> None:
        if not self.processor.supports_drafts:
            pytest.skip("supports_drafts is False: it is never used with drafts")

    def _search_cases(
        self,
        rule: str,
        examples: int,
        check: Callable[..., None],
        **strategies: st.SearchStrategy[Any],
    ) -> None:
        def check_until_end(**drawn: Any) -> None:
            with contextlib.suppress(FinishedError):  # test_ends checks where requests end
                check(self._subject, **drawn)

        self._search(rule, examples, check_until_end, **strategies)

    def _search_drafts(self, rule: str, check: Callable[..., None]) -> None:
        """Run a check of a request with draft tokens on drawn cases."""
        drafts = drawn_tokens(_DRAFTED, min_size=1, max_size=4)
        self._search_cases(rule, 60, check, case=self._users(), drafts=drafts, seed=_SEEDS)

    def _nothing_drawn(self) -> Violation:
        rejections = self._rejections
        reason = f", the last time because {rejections[-1]!r}" if rejections else ""
        return Violation(
            f"{NOTHING_DRAWN}: prepare rejected everything from `arguments`{reason}",
            "let the strategy `arguments` draw values that prepare accepts; set vocab_size, "
            "stop_token_ids, tokenizer, reasoning or params if it needs them",
        )
