"""What is done when a plan was lost, or what it should have loaded."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import RequestStatus, SchedulerOutput

from .books import Books
from .encoder import encoder_of
from .step import PlannedStep

__all__ = ["forget_doubtful", "lose_plan"]


def lose_plan(
    books: Books, lost: PlannedStep, later: Sequence[PlannedStep], next_step: int, now: float
) -> None:
    """Tell again what a plan told, and compute anew its requests and those of later plans.

    Args:
        next_step: number of the next plan.
    """
    plan = lost.plan
    books.untold |= plan.finished_request_ids
    books.preempted |= plan.preempted_request_ids
    books.unfreed += plan.freed_encoder_inputs
    forget_doubtful(books, [lost, *later])
    for request in lost.requests:
        for index in plan.encoder_inputs.get(request.request_id, ()):
            encoder_of(books).cancel(request, index)
    for planned in (lost, *later):
        computed = _computed_before(planned.plan)
        for request in planned.still_running():
            books.discard_from(request, computed[request.request_id])
            books.preempt(request, now)
    _ask_again(books, plan.step, next_step)


def forget_doubtful(books: Books, plans: Sequence[PlannedStep]) -> None:
    """Forget all cached content if nobody knows any more which of it these plans should have made.

    They offered it to others when they were planned. Where a request ended or was preempted
    since, it is not known which blocks it had.
    """
    if not all(planned.is_intact() for planned in plans):
        books.cache.reset()


def _computed_before(plan: SchedulerOutput) -> dict[str, int]:
    """Return per request of a plan how many tokens were computed before it."""
    cached = plan.cached_requests
    computed = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
    return computed | {n.source.request_id: n.num_computed_tokens for n in plan.new_requests}


def _ask_again(books: Books, step: int, next_step: int) -> None:
    """Have the connector tell its workers again what to load, where a lost step told them."""
    connector = books.context.connector
    for request in books.blocked.values():
        loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KV
        if connector is not None and loading and request.load_step == step:
            held = books.cache.block_ids(request)
            connector.update_state_after_alloc(request, held, request.loading)
            request.load_step = next_step
