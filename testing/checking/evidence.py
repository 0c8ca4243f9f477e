"""Figures of the running test of a suite: cases and costs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Evidence:
    """Figures of one test.

    Attributes:
        num_cases: number of drawn cases that were tried.
        costs: each measured cost with its budget, in seconds.
    """

    num_cases: int = 0
    costs: list[tuple[float, float]] = field(default_factory=list)


current = Evidence()
"""Of the running test; the reader clears it before the next one."""


def clear() -> None:
    """Forget the figures, at the start of a test."""
    current.num_cases = 0
    current.costs.clear()
