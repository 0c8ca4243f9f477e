"""The base of all conformance suites: searches for violations, and failure reports."""

from __future__ import annotations

import functools
import inspect
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, HypothesisException, Unsatisfiable

from .engine_access import torch_state
from .pace import EVIDENCE
from .pytest_hooks import examples_scale, replay_line, search_seed

_MAX_REPR_LENGTH = 600
_SHRINKING_SECONDS = 2.0

NOTHING_DRAWN = "nothing to check was drawn"
"""Begins the observation of a test whose strategies gave nothing that concerns the component."""


class Violation(Exception):  # noqa: N818 - it is a finding
    """A rule that a component broke."""

    def __init__(self, observed: str, fix: str, rule: str | None = None) -> None:
        """Create a violation.

        Args:
            observed: what the component did.
            fix: what its author should do.
            rule: the broken rule; None for the one that the test is about.
        """
        super().__init__(observed)
        self.observed = observed
        self.fix = fix
        self.rule = rule


@dataclass(frozen=True)
class Rule:
    """A rule of a kind's contract.

    Attributes:
        text: a short name, a colon, and what always holds.
        fix: what an author does about a violation, unless the check has something better.
    """

    text: str
    fix: str

    def violation(self, observed: str, fix: str | None = None) -> Violation:
        """Return a violation of this rule, to be raised."""
        return Violation(observed, fix or self.fix, rule=self.text)


def checks(
    rule: Rule | str, cases: Callable[[Any], Iterable[tuple[Any, ...]]] = lambda _suite: ((),)
) -> Callable[[Callable[..., None]], Callable[[Any], None]]:
    """Return a decorator that makes a test of a suite's method, which may raise a Violation.

    Args:
        rule: the rule that a Violation without one breaks.
        cases: returns the arguments of each call of the method, for a suite.
    """
    text = rule if isinstance(rule, str) else rule.text

    def decorate(check: Callable[..., None]) -> Callable[[Any], None]:
        def test(self: Any) -> None:
            def run() -> None:
                for arguments in cases(self):
                    check(self, *arguments)

            self._run_checks(text, run)

        functools.update_wrapper(test, check)
        vars(test).pop("__wrapped__")  # pytest would take its arguments for fixtures
        return test

    return decorate


SETTINGS = Rule(
    "settings: process-wide settings stay unchanged",
    "draw from generators of your own, pass dtype and device to the functions of torch, use "
    "its modes in `with` statements, and leave processors, threads of torch, signals and the "
    "working folder to the engine",
)


@contextmanager
def unchanged_torch_settings() -> Iterator[None]:
    """Check that the body leaves torch's settings as they were, and restore them.

    Raises:
        Violation: it changed one; raised instead of what follows from the change.
    """
    before = torch_state.read()
    try:
        yield
    finally:
        if torch_state.read() != before:
            changes: list[str] = []
            torch_state.restore(
                before,
                lambda setting, old, new: changes.append(f"torch's {setting} from {old} to {new}"),
            )
            if changes:
                raise SETTINGS.violation(f"it changed {', '.join(changes)}")


EXCEPTIONS = Rule("exceptions: only exceptions of the contract are raised", "handle this case")


@contextmanager
def exceptions_as_violations() -> Iterator[None]:
    """Raise unexpected exceptions as violations.

    Raises:
        Violation: a rule was broken, or an exception was raised.
    """
    try:
        yield
    except (Violation, HypothesisException):
        raise
    except Exception as cause:
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        raise EXCEPTIONS.violation(
            f"{type(cause).__name__}: {cause} (in {frame.name}, line {frame.lineno} of "
            f"{frame.filename.rpartition('/')[2]})"
        ) from cause


class ReplayableCase:
    """A drawn case that prints itself as code instead of a value."""

    def code(self) -> str:
        """Return Python code that plays the case again."""
        raise NotImplementedError


@dataclass(frozen=True)
class FailingCase:
    """A violation and the case in which it was found.

    Attributes:
        drawn: the smallest failing case found.
        seed: repeats the search.
    """

    violation: Violation
    drawn: dict[str, Any]
    seed: int

    def report(self) -> str:
        """Return the lines of a failure message that show the case and how to replay it."""
        return f"\n  case:\n{_describe(self.drawn)}\n  replay: {replay_line(self.seed)}"


class EndOfSearchError(BaseException):
    """Ends hypothesis' search at once, as an interrupt from the keyboard does."""


@dataclass(frozen=True)
class Search:
    """A search for a violation over drawn cases.

    Attributes:
        examples: number of cases to try.
        seed: seed of the search; None draws one.
    """

    examples: int
    seed: int | None = None

    def run(
        self, check: Callable[..., None], **strategies: st.SearchStrategy[Any]
    ) -> FailingCase | None:
        """Call `check` with drawn values until one raises a Violation.

        Raises:
            Unsatisfiable: the strategies reject every value that they draw.
        """
        number = search_seed() if self.seed is None else self.seed
        failure: FailingCase | None = None  # the newest one
        deadline = 0.0

        @seed(number)
        @settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            derandomize=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(data=st.data())
        def search(data: st.DataObject) -> None:
            nonlocal deadline, failure
            if failure is not None and time.monotonic() > deadline:
                raise EndOfSearchError
            drawn: dict[str, Any] = {}
            try:
                for name, strategy in strategies.items():
                    drawn[name] = data.draw(strategy)
                EVIDENCE.num_cases += 1
                check(**drawn)
            except Violation as violation:
                deadline = deadline or time.monotonic() + _SHRINKING_SECONDS
                failure = FailingCase(violation, drawn, number)
                raise

        with suppress(Violation, Flaky, EndOfSearchError):
            search()
        return failure  # the newest case is the smallest


class ConformanceSuite:
    """Base class of the conformance suites.

    Attributes:
        options: what an operator would write under `[plugin.<name>]`.
        name: the name under which the plugin is enabled; the class name in snake_case if None.
        examples: scales the number of cases tried per rule. The environment variable
            HARDPOINT_EXAMPLES scales all suites of a run; 20 for a thorough one.
        replay_seed: repeats the searches of an earlier run; None draws new cases. The environment
            variable HARDPOINT_SEED does the same from outside.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    name: ClassVar[str | None] = None
    examples: ClassVar[float] = 1.0
    replay_seed: ClassVar[int | None] = None

    def _component(self) -> type[Any]:
        raise NotImplementedError

    def _exception_guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _run_checks(self, rule: str, *checks: Callable[[], None]) -> None:
        """Run checks that need no drawn cases; fail the test at the first violation."""
        for check in checks:
            failure: Violation | None = None
            try:
                with self._exception_guard(), unchanged_torch_settings():
                    check()
            except Violation as violation:
                failure = violation
            if failure is not None:  # outside the handler, so that the report has no traceback
                self._fail(rule, failure)

    def _search(
        self,
        rule: str,
        examples: int,
        check: Callable[..., None],
        **strategies: st.SearchStrategy[Any],
    ) -> None:
        """Run a check on drawn cases; fail the test with the smallest failing case.

        It fails, too, if no case could be drawn that the component takes.
        """
        count = max(1, round(examples * self.examples * examples_scale()))
        search = Search(count, self.replay_seed)

        def guarded(**drawn: Any) -> None:
            with self._exception_guard(), unchanged_torch_settings():
                check(**drawn)

        try:
            failure = search.run(guarded, **strategies)
        except Unsatisfiable:
            self._fail(rule, self._nothing_drawn())
        if failure is not None:
            self._fail(rule, failure.violation, failure.report())

    def _nothing_drawn(self) -> Violation:
        return Violation(
            f"{NOTHING_DRAWN}: the component refused each case",
            "let the strategies of the suite draw valid inputs of the component",
        )

    def _fail(self, rule: str, violation: Violation, case: str = "") -> NoReturn:
        """Fail the running test: name the class, the rule, the observation and the fix."""
        component = self._component()
        pytest.fail(
            f"{component.__module__}.{component.__qualname__} breaks a rule.\n"
            f"  rule: {violation.rule or rule}\n  observed: {violation.observed}\n"
            f"  fix: {violation.fix}{case}",
            pytrace=False,
        )


def reject_replaced_tests(derived: type, suite: type) -> None:
    """Check that a class overrides no test of its suite, except with a marked reason.

    Raises:
        Violation: it does.
    """
    for name, test in inspect.getmembers(suite, inspect.isfunction):
        override = getattr(derived, name)
        replaced = override is not test and not _is_left_out_with_reason(override)
        if name.startswith("test_") and replaced:
            raise Violation(
                f"{derived.__name__} replaces {name}",
                "give the additional test another name; to leave a rule out, override its "
                "test with a copy marked pytest.mark.xfail(reason=...) or skip(reason=...)",
            )


def short_repr(value: Any) -> str:
    """Return `repr(value)`, truncated to a readable length."""
    text = repr(value)
    if len(text) <= _MAX_REPR_LENGTH:
        return text
    return f"{text[:_MAX_REPR_LENGTH]}... ({len(text)} characters)"


def _describe(drawn: Mapping[str, Any]) -> str:
    """Return a drawn case: as code if it has some, else one value per line."""
    for value in drawn.values():
        if isinstance(value, ReplayableCase):
            return "\n".join(f"    {line}" for line in value.code().splitlines())
    return "\n".join(f"    {name} = {short_repr(value)}" for name, value in drawn.items())


def _is_left_out_with_reason(test: Any) -> bool:
    marks = getattr(test, "pytestmark", [])
    return any(mark.name in ("xfail", "skip") and mark.kwargs.get("reason") for mark in marks)
