"""What is done when a plan was lost, or what it should have loaded."""

from __future__ import annotations

from collections.abc import Sequence

from .encoder import encoder_of
from .step import PlannedStep
from .tracker import Books


def lose_plan(books: Books, lost: PlannedStep, later: Sequence[PlannedStep], now: float) -> None:
    """Tell again what a plan told, and compute anew its requests and those of later plans."""
    plan = lost.plan
    books.untold |= plan.finished_request_ids
    books.preempted |= plan.preempted_request_ids
    books.unfreed += plan.freed_encoder_inputs
    forget_doubtful(books, [lost, *later])
    for request in lost.requests:
        for index in plan.encoder_inputs.get(request.request_id, ()):
            encoder_of(books).cancel(request, index)
    for planned in (lost, *later):
        computed = planned.computed_before()
        for request in planned.still_running():
            books.discard_from(request, computed[request.request_id])
            books.preempt(request, now)


def forget_doubtful(books: Books, plans: Sequence[PlannedStep]) -> None:
    """Forget all cached content if nobody knows any more which of it these plans should have made.

    They offered it to others when they were planned. Where a request ended or was preempted
    since, it is not known which blocks it had.
    """
    if not all(planned.is_intact() for planned in plans):
        books.cache.reset()
