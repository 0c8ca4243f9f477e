"""Costs of a component that mean the same on a machine that is busy, or slow.

A budget is in seconds of a usual machine that does nothing else. On another one, time in which
other programs ran is not counted, and the rest is compared with reference work in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

__all__ = [
    "PYTHON",
    "TENSORS",
    "Reference",
    "cost_of",
    "cpu_cost",
    "cpu_seconds",
    "own_seconds",
    "slowdown",
]


@dataclass
class Evidence:
    """Figures of the running test of a suite, for who reports them.

    Attributes:
        num_cases: number of drawn cases that were tried.
        costs: each measured cost with its budget, in seconds.
        p99_seconds: the 99th percentile of the time of a call; None if none was measured.
    """

    num_cases: int = 0
    costs: list[tuple[float, float]] = field(default_factory=list)
    p99_seconds: float | None = None

    def clear(self) -> None:
        """Forget the figures, at the start of a test."""
        self.num_cases = 0
        self.costs.clear()
        self.p99_seconds = None


EVIDENCE = Evidence()

_DELAYS = Path("/proc/thread-self/schedstat")
_FEWEST_ROUNDS = 3
_HOPELESS = 4  # times the budget: no other round could be so much better
_SAMPLES = 3  # of reference work after a round


def _add_up() -> None:
    counts: dict[int, int] = {}
    for number in range(4000):
        counts[number & 63] = counts.get(number & 63, 0) + number


def _sort() -> None:
    torch.arange(8 * 8000, dtype=torch.float32).reshape(8, 8000).cos().sort()


@dataclass(frozen=True)
class Reference:
    """Work that takes a known time.

    Attributes:
        work: does it once.
        seconds: on a usual machine that does nothing else.
    """

    work: Callable[[], None]
    seconds: float


PYTHON = Reference(_add_up, 0.00025)
"""For calls of mostly Python."""

TENSORS = Reference(_sort, 0.004)
"""For calls of mostly tensor operations; their threads may compete."""


def cpu_seconds() -> float:
    """Return the time that processors spent on this process."""
    return time.process_time()


def own_seconds() -> float:
    """Return the time that passes, but for that in which this thread waited for a processor."""
    try:
        waited = int(_DELAYS.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # another system, or a sandbox
        waited = 0.0
    return time.perf_counter() - waited


def slowdown(reference: Reference, clock: Callable[[], float]) -> float:
    """Return how many times longer reference work takes now than on a usual machine."""
    least = min(_timed(reference.work, clock) for _ in range(_SAMPLES))
    return least / reference.seconds


def cost_of(
    measure: Callable[[], float],
    budget: float,
    *,
    rounds: int,
    clock: Callable[[], float] | None = None,
    reference: Reference = PYTHON,
) -> float:
    """Return the least cost of several rounds in seconds, as on a usual machine.

    Args:
        measure: returns the seconds of a round, by the clock.
        budget: a cost that is good enough; further rounds would change nothing.
        rounds: how many there are at most.
        clock: the clock of `measure`, for the reference work; None is `own_seconds`.
        reference: work of the same kind.
    """
    least = slow = cost = float("inf")
    for number in range(1, rounds + 1):
        least = min(least, measure())
        if least <= budget:
            cost = least
            break
        # The least of all rounds: a plugin is not excused by a moment in which others ran.
        slow = min(slow, slowdown(reference, clock or own_seconds))
        cost = least / max(slow, 1.0)
        if number >= _FEWEST_ROUNDS and not budget < cost < _HOPELESS * budget:
            break
    EVIDENCE.costs.append((cost, budget))
    return cost


def cpu_cost(
    work: Callable[[], None], budget: float, *, rounds: int = 4, reference: Reference = PYTHON
) -> float:
    """Return the least processor time of several calls in seconds, as on a usual machine.

    Args:
        work: is called in each round.
        budget: as of `cost_of`.
        rounds: how many there are at most; twice as many where the machine may have been busy.
        reference: work of the same kind.
    """
    return cost_of(
        lambda: _timed(work, cpu_seconds),
        budget,
        rounds=2 * rounds,
        clock=cpu_seconds,
        reference=reference,
    )


def _timed(work: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    work()
    return clock() - started
