"""Checks of a plan and its step record, before the plan is executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hardpoint.plugins import Request, SchedulerOutput, StepRecord
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits
from hardpoint.testing.scheduling.fakes.requests import ExpectedRequest
from hardpoint.testing.scheduling.rules import (
    BATCH,
    ENCODER,
    LIMITS,
    PLAN,
    POSITIONS,
    RELEASES,
    STEP_RECORD,
)


def check_plan(
    plan: SchedulerOutput,
    limits: SchedulerLimits,
    requests: Mapping[str, ExpectedRequest],
    proposed: Mapping[str, Sequence[int]],
) -> None:
    """Check a plan's totals, limits and fields.

    Args:
        plan: the newest plan.
        limits: the scheduler's limits.
        requests: unfinished requests by id.
        proposed: by id, the newest proposed drafts.
    """
    _check_parts(plan)
    _check_batch(plan, requests)
    _check_totals(plan, limits)
    starts = _starts(plan)
    for request_id, count in plan.num_scheduled_tokens.items():
        _check_request(requests[request_id], starts[request_id], count, limits)
    _check_encoder(plan, limits, requests)
    _check_drafts(plan, limits, proposed)


def check_releases(plan: SchedulerOutput, holders: Mapping[str, Request]) -> None:
    """Check the tokens and the columns of requests with released blocks.

    Args:
        plan: the newest plan.
        holders: requests that hold blocks.
    """
    columns = dict(plan.cached_requests.released_columns)
    columns |= {new.source.request_id: new.released_columns for new in plan.new_requests}
    for request_id, start in plan.num_computed_tokens().items():
        if (releases := holders[request_id].releases) is None:
            continue
        count, limit = plan.num_scheduled_tokens[request_id], releases.num_before_next(start)
        if count > limit:
            raise RELEASES.violation(
                f"{count} tokens of {request_id!r} are scheduled from {start} on, but blocks are "
                f"released before position {start + limit}"
            )
        expected = [*releases.starting_at(start)]
        if (actual := [*columns.get(request_id, ())]) != expected:
            raise RELEASES.violation(
                f"step {plan.step} releases the columns {actual} of {request_id!r} before position "
                f"{start}, expected {expected}"
            )


def check_record(record: StepRecord, plan: SchedulerOutput, token_budget: int) -> None:
    """Check that a step record matches its plan."""
    pairs = {
        "step": (record.step, plan.step),
        "scheduled": (dict(record.scheduled), plan.num_scheduled_tokens),
        "new": (sorted(record.new), _new(plan, resumed=False)),
        "resumed": (sorted(record.resumed), _new(plan, resumed=True)),
        "finished": (sorted(record.finished), sorted(plan.finished_request_ids)),
        "token_budget": (record.token_budget, token_budget),
    }
    for name, (recorded, actual) in pairs.items():
        if recorded != actual:
            raise STEP_RECORD.violation(
                f"the record of step {plan.step} has {name} = {recorded}, expected {actual}"
            )
    if strange := set(record.preempted) - plan.preempted_request_ids:
        raise STEP_RECORD.violation(
            f"the record has {sorted(strange)} as preempted, the plan does not"
        )
    if strange := set(record.waiting) & set(plan.num_scheduled_tokens):
        raise STEP_RECORD.violation(
            f"the record has wait reasons of {sorted(strange)}, which got tokens"
        )


def _check_parts(plan: SchedulerOutput) -> None:
    scheduled = plan.num_scheduled_tokens
    new = [n.source.request_id for n in plan.new_requests]
    cached = list(plan.cached_requests.request_ids)
    if sorted(new + cached) != sorted(scheduled):
        raise PLAN.violation(
            f"tokens are scheduled for {sorted(scheduled)}, but new and cached requests are "
            f"{sorted(new + cached)}"
        )
    if len(plan.cached_requests.num_computed_tokens) != len(cached):
        raise PLAN.violation(
            f"{len(cached)} cached requests have {len(plan.cached_requests.num_computed_tokens)} "
            "entries in num_computed_tokens"
        )
    for name in ("draft_token_ids", "encoder_inputs", "structured_request_ids"):
        if strange := set(getattr(plan, name)) - set(scheduled):
            raise PLAN.violation(f"{name} has {sorted(strange)}, which get no tokens")
    if strange := set(plan.cached_requests.new_block_ids) - set(cached):
        raise PLAN.violation(f"new_block_ids has {sorted(strange)}, which are not cached requests")
    if both := plan.preempted_request_ids & set(cached):
        raise PLAN.violation(
            f"{sorted(both)} are preempted, and scheduled as cached requests",
            "remove a victim from the plan; a victim that is resumed in the same step is a "
            "NewRequest",
        )


def _check_batch(plan: SchedulerOutput, requests: Mapping[str, ExpectedRequest]) -> None:
    for request_id in plan.num_scheduled_tokens:
        if request_id not in requests:
            raise BATCH.violation(f"{request_id!r} is scheduled, but is no unfinished request")
    for request_id in plan.preempted_request_ids:
        if request_id not in requests and request_id not in plan.finished_request_ids:
            raise BATCH.violation(f"{request_id!r} is preempted, but is no unfinished request")
    for new in plan.new_requests:
        request = requests[new.source.request_id]
        if new.source != request.source:
            raise BATCH.violation(
                f"{request.request_id!r} is scheduled with another source than it was added with"
            )
        if list(new.output_token_ids) != request.tokens:
            raise BATCH.violation(
                f"{request.request_id!r} is resumed with the outputs {list(new.output_token_ids)}, "
                f"but got {request.tokens}"
            )
        if new.resumed and not request.was_scheduled:
            raise BATCH.violation(
                f"{request.request_id!r} is resumed, but was never scheduled before"
            )


def _check_totals(plan: SchedulerOutput, limits: SchedulerLimits) -> None:
    counts = plan.num_scheduled_tokens
    for request_id, count in counts.items():
        if count < 1:
            raise PLAN.violation(
                f"{request_id!r} is scheduled with {count} tokens",
                "leave requests without tokens out of the plan",
            )
    total = sum(counts.values())
    if plan.total_num_scheduled_tokens != total:
        raise PLAN.violation(
            f"total_num_scheduled_tokens is {plan.total_num_scheduled_tokens}, the sum is {total}"
        )
    if total > limits.max_num_batched_tokens:
        raise LIMITS.violation(
            f"{total} tokens are scheduled, max_num_batched_tokens is "
            f"{limits.max_num_batched_tokens}"
        )


def _check_request(
    request: ExpectedRequest, start: int, count: int, limits: SchedulerLimits
) -> None:
    name, threshold = repr(request.request_id), limits.long_prefill_token_threshold
    if start < 0:
        raise POSITIONS.violation(f"{name} is scheduled from position {start}")
    if threshold and count > threshold:
        raise LIMITS.violation(
            f"{name} gets {count} tokens in one step, long_prefill_token_threshold is {threshold}"
        )
    if start + count > limits.max_model_len:
        raise LIMITS.violation(
            f"{name} computes up to position {start + count}, max_model_len is "
            f"{limits.max_model_len}"
        )
    prompt = len(request.source.prompt_token_ids)
    if not limits.chunked_prefill and start + count < prompt:
        raise LIMITS.violation(
            f"{name} computes {count} tokens from position {start} of a prompt of {prompt}, but "
            "chunked_prefill is off"
        )


def _check_encoder(
    plan: SchedulerOutput, limits: SchedulerLimits, requests: Mapping[str, ExpectedRequest]
) -> None:
    lengths: dict[str, int] = {}
    for request_id, indices in plan.encoder_inputs.items():
        features = requests[request_id].source.features
        for index in indices:
            if not 0 <= index < len(features):
                raise ENCODER.violation(
                    f"{request_id!r} is to encode feature {index}, but has {len(features)}"
                )
            lengths[features[index].identifier] = features[index].length
    if (total := sum(lengths.values())) > limits.max_encoder_tokens:
        raise LIMITS.violation(
            f"{total} encoder tokens are scheduled in one step, max_encoder_tokens is "
            f"{limits.max_encoder_tokens}"
        )


def _check_drafts(
    plan: SchedulerOutput, limits: SchedulerLimits, proposed: Mapping[str, Sequence[int]]
) -> None:
    for request_id, drafts in plan.draft_token_ids.items():
        proposals = list(proposed.get(request_id, ()))
        if not drafts or list(drafts) != proposals[: len(drafts)]:
            raise PLAN.violation(
                f"{request_id!r} is to verify the drafts {list(drafts)}, but the ones "
                f"proposed for its next step are {proposals}",
                "drafts are valid for the next step only; leave out requests without drafts",
            )
        if len(drafts) > limits.num_draft_tokens:
            raise LIMITS.violation(
                f"{request_id!r} has {len(drafts)} drafts, num_draft_tokens is "
                f"{limits.num_draft_tokens}"
            )


def _starts(plan: SchedulerOutput) -> dict[str, int]:
    cached = plan.cached_requests
    starts = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
    return starts | {n.source.request_id: n.num_computed_tokens for n in plan.new_requests}


def _new(plan: SchedulerOutput, *, resumed: bool) -> list[str]:
    return sorted(n.source.request_id for n in plan.new_requests if n.resumed == resumed)
