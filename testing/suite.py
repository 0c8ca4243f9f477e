"""What all conformance suites share: no test may be replaced, and failures look alike."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from .pytest_hooks import replay_line, seed_now

_SHRINKING_SECONDS = 2.0


@dataclass(frozen=True)
class Found:
    """A broken rule.

    Attributes:
        drawn: the case, as small as it was found.
        seed: makes the same search again.
    """

    violation: Violation
    drawn: dict[str, Any]
    seed: int


class _SmallEnough(BaseException):
    """Ends hypothesis' search at once, as an interrupt from the keyboard does."""


@dataclass(frozen=True)
class Search:
    """How to search.

    Attributes:
        examples: cases to try.
        seed: of the search; None draws one.
    """

    examples: int
    seed: int | None = None

    def run(self, check: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> Found | None:
        """Call `check` with drawn values until one raises a Violation.

        Raises:
            Unsatisfiable: nothing could be drawn that suits.
        """
        number = seed_now() if self.seed is None else self.seed
        found: Found | None = None  # the last one
        deadline = 0.0

        @seed(number)
        @settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            derandomize=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(**strategies)
        def search(**drawn: Any) -> None:
            nonlocal deadline, found
            if found is not None and time.monotonic() > deadline:
                raise _SmallEnough
            try:
                check(**drawn)
            except Violation as violation:
                deadline = deadline or time.monotonic() + _SHRINKING_SECONDS
                found = Found(violation, drawn, number)
                raise

        try:
            search()
        except Violation as violation:
            if found is None:  # it was met while a case was made
                return Found(violation, {}, number)
        except (Flaky, _SmallEnough):
            pass  # the last one that was found is the smallest
        return found


def describe(drawn: dict[str, Any]) -> str:
    """Return a case, one drawn value per line."""
    return "\n".join(f"    {name} = {short(value)}" for name, value in drawn.items())


_LONGEST = 600


class Violation(Exception):  # noqa: N818 - it is a finding
    """A rule that a component broke."""

    def __init__(self, saw: str, do: str) -> None:
        """Keep what was seen, and what its author should do."""
        super().__init__(saw)
        self.saw = saw
        self.do = do


def short(value: Any) -> str:
    """Return `repr`, cut where it gets too long to read."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def refuse_replaced_tests(derived: type, suite: type) -> None:
    """Refuse a class that replaces a test of its suite: a suite that was bent proves nothing.

    Raises:
        Violation: it does, without a reason.
    """
    for name, test in inspect.getmembers(suite, inspect.isfunction):
        own = getattr(derived, name)
        if name.startswith("test_") and own is not test and not _expected_to_fail(own):
            raise Violation(
                f"{derived.__name__} replaces {name}",
                "give the additional test another name; to leave a rule out, override its "
                "test with one that is marked pytest.mark.xfail(reason=...)",
            )


def fail(component: type, rule: str, violation: Violation, case: str = "") -> NoReturn:
    """Fail the test that runs: say which class breaks which rule, and what to do about it.

    Args:
        case: further lines, from `replayed`.
    """
    pytest.fail(
        f"{component.__module__}.{component.__qualname__} breaks a rule.\n"
        f"  rule: {rule}\n  saw: {violation.saw}\n  do: {violation.do}{case}",
        pytrace=False,
    )


def replayed(found: Found, told: str) -> str:
    """Return the lines that show a case, told in words, and how to see it again."""
    return f"\n  case:\n{told}\n  replay: {replay_line(found.seed)}"


def _expected_to_fail(test: Any) -> bool:
    marks = getattr(test, "pytestmark", [])
    return any(mark.name in ("xfail", "skip") and mark.kwargs.get("reason") for mark in marks)
