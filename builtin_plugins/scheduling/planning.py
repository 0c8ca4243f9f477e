"""The plan of a step for the workers, and its record for those who watch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hardpoint.plugins import SchedulerOutput, StepRecord

from .step import Step
from .tracker import Books


def make_plan(books: Books, step: Step) -> SchedulerOutput:
    """Return what the workers have to do; what it tells once is told with that."""
    finished, books.untold = frozenset(books.untold), set()
    preempted, books.preempted = frozenset(books.preempted), set()
    plan = SchedulerOutput(
        step=step.number,
        new_requests=step.entries,
        cached_requests=step.cached_requests(),
        num_scheduled_tokens=step.tokens,
        total_num_scheduled_tokens=books.limits.max_num_batched_tokens - step.budget,
        draft_token_ids=step.drafts,
        encoder_inputs=step.encoder_inputs,
        freed_encoder_inputs=_freed_encoder_inputs(books),
        structured_request_ids=_structured(books, step),
        preempted_request_ids=preempted,
        finished_request_ids=finished,
    )
    connector = books.context.connector
    if connector is not None:
        metadata = connector.build_connector_meta(plan)
        plan = msgspec.structs.replace(plan, kv_connector_metadata=metadata)
    return plan


def make_record(books: Books, step: Step, plan: SchedulerOutput) -> StepRecord:
    """Return what the step decided."""
    return StepRecord(
        step=step.number,
        timestamp=step.now,
        scheduled=plan.num_scheduled_tokens,
        new=[new.source.request_id for new in plan.new_requests if not new.resumed],
        resumed=[new.source.request_id for new in plan.new_requests if new.resumed],
        preempted=step.preempted,
        finished=sorted(plan.finished_request_ids),
        timed_out=step.timed_out,
        waiting=step.waiting,
        admission_stopped=step.stopped,
        num_running=len(books.running),
        num_waiting=len(books.waiting) + len(books.blocked),
        num_free_blocks=books.cache.num_free_blocks,
        token_budget=books.limits.max_num_batched_tokens,
    )


def _structured(books: Books, step: Step) -> dict[str, int]:
    grammars = books.context.grammars
    if grammars is None:
        return {}
    requests = [*step.running.values(), *step.admitted.values()]
    return {r.request_id: i for i, r in enumerate(requests) if grammars.uses(r)}


def _freed_encoder_inputs(books: Books) -> Sequence[str]:
    freed, books.unfreed = books.unfreed, []
    cache = books.context.encoder_cache
    return [*freed, *cache.take_freed()] if cache is not None else freed
