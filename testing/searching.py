"""Searching for a case that breaks a rule, and telling how to see it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from .seeds import seed_now
from .violations import Violation, short

__all__ = ["Found", "Search", "describe"]

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
