"""What a conformance suite for logits processors is told, and how it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import pytest
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from hardpoint.plugins import BatchLogitsProcessor, ReasoningParser, SamplingParams, Tokenizer
from hardpoint.plugins.logits import LogitsPlugin
from hardpoint.registry.loading import snake_case
from hardpoint.testing.searching import Search, describe
from hardpoint.testing.suite import fail, replayed
from hardpoint.testing.violations import Violation

from .subject import Case, Subject

__all__ = ["LogitsSuiteBase"]


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
