"""Comparisons of what requests get in two sessions, and a plain half whose time counts as one."""

from __future__ import annotations

from typing import Any

import numpy as np

from hardpoint.plugins import EngineHalf, GrammarBitmask, SchedulerOutput
from hardpoint.testing.suite import Rule

from .session import RequestScript, Trace

__all__ = ["PlainHalf", "compare"]


class PlainHalf(EngineHalf):
    """Allows every token, row by row."""

    def __init__(self, vocab_size: int) -> None:
        self._columns, self._users = -(-vocab_size // 32), set[str]()

    def gate(self, request: Any) -> None:
        """Follow a request."""
        self._users.add(request.request_id)

    def mask(self, plan: SchedulerOutput) -> GrammarBitmask:
        """Return rows of its requests."""
        drafts = plan.draft_token_ids
        users = [name for name in plan.num_scheduled_tokens if name in self._users]
        names = [name for name in users for _ in range(1 + len(drafts.get(name, ())))]
        bits = np.zeros((len(names), self._columns), dtype=np.int32)
        for index in range(len(names)):
            bits[index] = -1
        return GrammarBitmask(names, bits)

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._users.discard(request_id)


def compare(
    script: RequestScript, first: Trace, second: Trace, rule: Rule, where: str, elsewhere: str
) -> None:
    """Compare what a request got in two sessions.

    Raises:
        Violation: it is not the same.
    """
    if script.ends == "aborted":  # when it happens depends on the time that a gate takes
        return
    for name in ("gate", "cost", "masks", "ended"):
        one, other = getattr(first, name), getattr(second, name)
        if name == "masks" and one != other:
            pairs = zip(one, other, strict=False)
            at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
            raise rule.violation(
                f"the mask of its step {at + 1} is another one {where} than {elsewhere}"
            )
        if one != other:
            raise rule.violation(f"its {name} is {one!r} {where}, {other!r} {elsewhere}")
    for step, (own, others) in enumerate(zip(first.rows, second.rows, strict=True), 1):
        for what in sorted(own.keys() | others.keys()):
            if not (what in own and what in others and _are_close(own[what], others[what])):
                raise rule.violation(
                    f"the worker half changes its {what} in step {step} to other values {where} "
                    f"than {elsewhere}"
                )


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether values are the same but for the order in which sums are computed."""
    return np.allclose(one, other, rtol=1e-3, atol=1e-3)
