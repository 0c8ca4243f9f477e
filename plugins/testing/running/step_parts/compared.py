"""Halves under test, a plain one whose time counts as one, and comparisons of what they gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hardpoint.host.boundary.parts.hooks import ENGINE_HOOKS, WORKER_HOOKS
from hardpoint.plugins import EngineHalf, GrammarBitmask, SchedulerOutput, StepPart, WorkerHalf
from hardpoint.testing.reporting.calls import CLOSE, call
from hardpoint.testing.suite import Rule

from .session import CallTrace, RequestScript

__all__ = ["Halves", "PlainHalf", "block_hashes", "compare", "compare_by_place"]


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
    script: RequestScript,
    first: CallTrace,
    second: CallTrace,
    rule: Rule,
    where: str,
    elsewhere: str,
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


def compare_by_place(
    first: CallTrace, second: CallTrace, rule: Rule, where: str, elsewhere: str
) -> None:
    """Compare the masks of each output and the changed rows of each position in two sessions.

    Raises:
        Violation: they are not the same.
    """
    for name in ("gate", "cost", "ended"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            raise rule.violation(f"its {name} is {one!r} {where}, {other!r} {elsewhere}")
    own, others = first.masks_by_index, second.masks_by_index
    for index in sorted(own.keys() & others.keys()):
        if own[index] != others[index]:
            raise rule.violation(
                f"the mask of output token {index} is another one {elsewhere} than {where}, "
                f"expected the same"
            )
    rows, changed = first.rows_by_position, second.rows_by_position
    for what, position in sorted(rows.keys() | changed.keys()):
        row, other_row = rows.get((what, position)), changed.get((what, position))
        if row is None or other_row is None:
            changing, leaving = (elsewhere, where) if row is None else (where, elsewhere)
            raise rule.violation(
                f"the worker half changes the {what} of position {position} {changing}, and "
                f"leaves them as they are {leaving}, expected the same"
            )
        if not _are_close(row, other_row):
            raise rule.violation(
                f"the worker half changes the {what} of position {position} to other values "
                f"{elsewhere} than {where}, expected the same"
            )


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(one, other, rtol=1e-3, atol=1e-3)


@dataclass
class Halves:
    """The halves of a part, each of an instance of its own, as the engine and a worker have them.

    Attributes:
        worker: None if the part has none.
        loaded: the model that it has; None if the suite gives none.
    """

    part: StepPart
    engine: EngineHalf | None
    worker_part: StepPart
    worker: WorkerHalf | None
    loaded: Any = None

    def overrides(self, method: str) -> bool:
        """Return whether one of the halves has a hook, and not its default."""
        halves = ((ENGINE_HOOKS, self.engine), (WORKER_HOOKS, self.worker))
        return any(method in hooks.implemented(half) for hooks, half in halves if half is not None)

    def close(self) -> None:
        """Close all, those of the worker first.

        Raises:
            Violation: one of them raised.
        """
        for closed in (self.worker, self.worker_part, self.engine, self.part):
            if closed is not None:
                call(CLOSE, closed.close)


def block_hashes(request: Any, num_blocks: int) -> list[bytes]:
    """Return hashes of the blocks of a request."""
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    return [repr(tokens[: 16 * (block + 1)]).encode() for block in range(num_blocks)]
