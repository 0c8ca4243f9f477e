"""Halves under test, a plain half with one time unit per call, and comparisons of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hardpoint.host.boundary.parts.hooks import ENGINE_HOOKS, WORKER_HOOKS
from hardpoint.plugins import (
    EngineHalf,
    GrammarBitmask,
    Request,
    SchedulerOutput,
    StepPart,
    WorkerHalf,
)
from hardpoint.testing.reporting.calls import CLOSE, call
from hardpoint.testing.running.request_scripts import RequestScript
from hardpoint.testing.suite import Rule

from .session import CallTrace

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
    """Compare the results of a request in two sessions.

    Raises:
        Violation: it is not the same.
    """
    if script.ends == "aborted":  # when it happens depends on the time that a gate takes
        return
    for name in ("gate", "cost", "masks", "ended"):
        first_value, other = getattr(first, name), getattr(second, name)
        if name == "masks" and first_value != other:
            pairs = zip(first_value, other, strict=False)
            at = next(
                (n for n, (a, b) in enumerate(pairs) if a != b), min(len(first_value), len(other))
            )
            raise rule.violation(
                f"the mask of its step {at + 1} is another one {where} than {elsewhere}"
            )
        if first_value != other:
            raise rule.violation(f"its {name} is {first_value!r} {where}, {other!r} {elsewhere}")
    for step, (rows, others) in enumerate(zip(first.rows, second.rows, strict=True), 1):
        for hook in sorted(rows.keys() | others.keys()):
            if not (hook in rows and hook in others and _are_close(rows[hook], others[hook])):
                raise rule.violation(
                    f"the worker half changes its {hook} in step {step} to other values {where} "
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
        first_value, other = getattr(first, name), getattr(second, name)
        if first_value != other:
            raise rule.violation(f"its {name} is {first_value!r} {where}, {other!r} {elsewhere}")
    masks, others = first.masks_by_index, second.masks_by_index
    for index in sorted(masks.keys() & others.keys()):
        if masks[index] != others[index]:
            raise rule.violation(
                f"the mask of output token {index} is another one {elsewhere} than {where}, "
                f"expected the same"
            )
    rows, changed = first.rows_by_position, second.rows_by_position
    for hook, position in sorted(rows.keys() | changed.keys()):
        row, other_row = rows.get((hook, position)), changed.get((hook, position))
        if row is None or other_row is None:
            changing, leaving = (elsewhere, where) if row is None else (where, elsewhere)
            raise rule.violation(
                f"the worker half changes the {hook} of position {position} {changing}, and "
                f"leaves them as they are {leaving}, expected the same"
            )
        if not _are_close(row, other_row):
            raise rule.violation(
                f"the worker half changes the {hook} of position {position} to other values "
                f"{elsewhere} than {where}, expected the same"
            )


def _are_close(first: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(first, other, rtol=1e-3, atol=1e-3)


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
        """Close all halves, the worker's first.

        Raises:
            Violation: one of them raised.
        """
        for closed in (self.worker, self.worker_part, self.engine, self.part):
            if closed is not None:
                call(CLOSE, closed.close)


def block_hashes(request: Request, num_blocks: int) -> list[bytes]:
    """Return hashes of the blocks of a request."""
    tokens = [*request.source.prompt_token_ids, *request.output_token_ids]
    return [repr(tokens[: 16 * (block + 1)]).encode() for block in range(num_blocks)]
