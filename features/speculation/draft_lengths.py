"""How many drafts of each request the next step should verify."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hardpoint.plugins import StepCost

PROBE_EVERY = 32
"""Tokens after which a request whose drafts do not pay off gets one again: 3 % more rows."""

_MEMORY = 12.0
"""Drafts that count; those verified longer ago are forgotten."""
_PRIOR = 4.0
"""Drafts that the rate of all requests counts as, for a request with few of its own."""
_ROUNDS = 3
"""The threshold depends on the drafts, and these on it."""


@dataclass
class AcceptanceRate:
    """The share of drafts that were accepted, of those whose predecessors were."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, verified: int, accepted: int) -> None:
        """Add the outcome of a step; drafts after the first wrong one tell nothing."""
        tried = min(accepted + 1, verified)
        keep = max(0.0, 1.0 - tried / _MEMORY)
        self.accepted = keep * self.accepted + accepted
        self.tried = keep * self.tried + tried

    def estimate(self, all_requests: AcceptanceRate) -> float:
        """Return the probability that the next draft is accepted, between 0 and 1."""
        common = (all_requests.accepted + 1.0) / (all_requests.tried + 1.0)
        return (self.accepted + _PRIOR * common) / (self.tried + _PRIOR)


def draft_lengths(
    limits: Mapping[str, int],
    rates: Mapping[str, float],
    cost: StepCost,
    num_requests: int,
    context: int,
) -> dict[str, int]:
    """Return how many drafts of each request make the step give most tokens per second.

    A draft is worth its row if it adds more tokens per millisecond than the step gives without it.
    That of position i is accepted with the probability `rate ** i`.

    Args:
        limits: most drafts of each request.
        rates: probability that a draft of each is accepted.
        cost: fitted cost of steps.
        num_requests: requests of the step.
        context: tokens that these attend to, together.
    """
    if not cost.is_trained or cost.draft <= 0:
        return dict(limits)
    base = cost.milliseconds(single_queries=num_requests, context=context)
    lengths = dict.fromkeys(limits, 0)
    for _ in range(_ROUNDS):
        tokens = num_requests + sum(_expected(rates[name], n) for name, n in lengths.items())
        threshold = cost.draft * tokens / (base + cost.draft * sum(lengths.values()))
        lengths = {
            name: min(limit, _longest(rates[name], threshold)) for name, limit in limits.items()
        }
    return lengths


def _expected(rate: float, length: int) -> float:
    """Return how many of so many drafts are accepted on average."""
    return length if rate >= 1 else rate * (1 - rate**length) / (1 - rate)


def _longest(rate: float, threshold: float) -> int:
    """Return how many drafts have a probability above a threshold."""
    if threshold >= 1 or rate <= threshold:
        return 0
    if rate >= 1:
        return 1 << 16
    return math.ceil(math.log(threshold) / math.log(rate)) - 1
