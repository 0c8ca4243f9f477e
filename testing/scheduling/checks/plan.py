"""What must hold of every plan, before anybody carries it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hardpoint.plugins import SchedulerOutput, StepRecord
from hardpoint.plugins.scheduler import SchedulerLimits
from hardpoint.testing.scheduling.fakes.requests import Life

from .names import BATCH, ENCODER, LIMITS, PLAN, POSITIONS, RECORD


def check_plan(
    plan: SchedulerOutput,
    limits: SchedulerLimits,
    lives: Mapping[str, Life],
    proposed: Mapping[str, Sequence[int]],
) -> None:
    """Check a plan's sums, limits and parts.

    Args:
        plan: the next one.
        limits: what it may not exceed.
        lives: live requests by id.
        proposed: by id, the drafts that were last handed in.
    """
    _check_parts(plan)
    _check_batch(plan, lives)
    _check_totals(plan, limits)
    starts = _starts(plan)
    for request_id, count in plan.num_scheduled_tokens.items():
        _check_share(lives[request_id], starts[request_id], count, limits)
    _check_adapters(plan, limits, lives)
    _check_encoder(plan, limits, lives)
    _check_drafts(plan, limits, proposed)


def check_record(record: StepRecord, plan: SchedulerOutput, token_budget: int) -> None:
    """Check that a step record says what its plan does."""
    pairs = {
        "step": (record.step, plan.step),
        "scheduled": (dict(record.scheduled), plan.num_scheduled_tokens),
        "new": (sorted(record.new), _new(plan, resumed=False)),
        "resumed": (sorted(record.resumed), _new(plan, resumed=True)),
        "finished": (sorted(record.finished), sorted(plan.finished_request_ids)),
        "token_budget": (record.token_budget, token_budget),
    }
    for name, (told, true) in pairs.items():
        if told != true:
            raise RECORD.broken(f"the record of step {plan.step} says {name} = {told}, not {true}")
    if strange := set(record.preempted) - plan.preempted_request_ids:
        raise RECORD.broken(f"it says that {sorted(strange)} were preempted, the plan does not")
    if strange := set(record.waiting) & set(plan.num_scheduled_tokens):
        raise RECORD.broken(f"it gives reasons why {sorted(strange)} wait, which have tokens")


def _check_parts(plan: SchedulerOutput) -> None:
    scheduled = plan.num_scheduled_tokens
    new = [n.source.request_id for n in plan.new_requests]
    cached = list(plan.cached_requests.request_ids)
    if sorted(new + cached) != sorted(scheduled):
        raise PLAN.broken(
            f"tokens are scheduled for {sorted(scheduled)}, but new and cached requests are "
            f"{sorted(new + cached)}"
        )
    if len(plan.cached_requests.num_computed_tokens) != len(cached):
        raise PLAN.broken(
            f"{len(cached)} cached requests have {len(plan.cached_requests.num_computed_tokens)} "
            "numbers of computed tokens"
        )
    for name in ("draft_token_ids", "encoder_inputs", "structured_request_ids"):
        if strange := set(getattr(plan, name)) - set(scheduled):
            raise PLAN.broken(f"{name} has {sorted(strange)}, which get no tokens")
    if strange := set(plan.cached_requests.new_block_ids) - set(cached):
        raise PLAN.broken(f"new_block_ids has {sorted(strange)}, which are not cached requests")
    if both := plan.preempted_request_ids & set(cached):
        raise PLAN.broken(
            f"{sorted(both)} are preempted, and scheduled as if they were not",
            "withdraw a victim from the plan; one that comes back in the same step is a NewRequest",
        )


def _check_batch(plan: SchedulerOutput, lives: Mapping[str, Life]) -> None:
    for request_id in plan.num_scheduled_tokens:
        if request_id not in lives:
            raise BATCH.broken(f"{request_id!r} is scheduled, but no such request is live")
    for request_id in plan.preempted_request_ids:
        if request_id not in lives and request_id not in plan.finished_request_ids:
            raise BATCH.broken(f"{request_id!r} is preempted, but no such request is live")
    for new in plan.new_requests:
        life = lives[new.source.request_id]
        if new.source != life.source:
            raise BATCH.broken(f"{life.request_id!r} comes with another source than it came with")
        if list(new.output_token_ids) != life.tokens:
            raise BATCH.broken(
                f"{life.request_id!r} comes back with the outputs {list(new.output_token_ids)}, "
                f"but has {life.tokens}"
            )
        if new.resumed and not life.ran:
            raise BATCH.broken(f"{life.request_id!r} is said to be resumed, but never ran")


def _check_totals(plan: SchedulerOutput, limits: SchedulerLimits) -> None:
    counts = plan.num_scheduled_tokens
    for request_id, count in counts.items():
        if count < 1:
            raise PLAN.broken(
                f"{request_id!r} is scheduled with {count} tokens",
                "leave a request out of the plan that gets none",
            )
    total = sum(counts.values())
    if plan.total_num_scheduled_tokens != total:
        raise PLAN.broken(
            f"total_num_scheduled_tokens is {plan.total_num_scheduled_tokens}, the sum is {total}"
        )
    if total > limits.max_num_batched_tokens:
        raise LIMITS.broken(
            f"{total} tokens are scheduled, max_num_batched_tokens is "
            f"{limits.max_num_batched_tokens}"
        )


def _check_share(life: Life, start: int, count: int, limits: SchedulerLimits) -> None:
    who, threshold = repr(life.request_id), limits.long_prefill_token_threshold
    if start < 0:
        raise POSITIONS.broken(f"{who} is scheduled from position {start} on")
    if threshold and count > threshold:
        raise LIMITS.broken(
            f"{who} gets {count} tokens in one step, long_prefill_token_threshold is {threshold}"
        )
    if start + count > limits.max_model_len:
        raise LIMITS.broken(
            f"{who} computes up to position {start + count}, max_model_len is "
            f"{limits.max_model_len}"
        )
    prompt = len(life.source.prompt_token_ids)
    if not limits.chunked_prefill and start + count < prompt:
        raise LIMITS.broken(
            f"{who} computes {count} tokens from {start} on of a prompt of {prompt}, but "
            "chunked_prefill is off"
        )


def _check_adapters(
    plan: SchedulerOutput, limits: SchedulerLimits, lives: Mapping[str, Life]
) -> None:
    loras = {lives[name].source.lora for name in plan.num_scheduled_tokens}
    active = sorted(lora.name for lora in loras if lora is not None)
    if limits.max_loras and len(active) > limits.max_loras:
        raise LIMITS.broken(
            f"the adapters {active} are in one step, max_loras is {limits.max_loras}"
        )


def _check_encoder(
    plan: SchedulerOutput, limits: SchedulerLimits, lives: Mapping[str, Life]
) -> None:
    lengths: dict[str, int] = {}
    for request_id, indices in plan.encoder_inputs.items():
        features = lives[request_id].source.features
        for index in indices:
            if not 0 <= index < len(features):
                raise ENCODER.broken(
                    f"{request_id!r} is to encode feature {index}, it has {len(features)}"
                )
            lengths[features[index].identifier] = features[index].length
    if (total := sum(lengths.values())) > limits.max_encoder_tokens:
        raise LIMITS.broken(
            f"{total} encoder tokens are in one step, max_encoder_tokens is "
            f"{limits.max_encoder_tokens}"
        )


def _check_drafts(
    plan: SchedulerOutput, limits: SchedulerLimits, proposed: Mapping[str, Sequence[int]]
) -> None:
    for request_id, drafts in plan.draft_token_ids.items():
        given = list(proposed.get(request_id, ()))
        if not drafts or list(drafts) != given[: len(drafts)]:
            raise PLAN.broken(
                f"{request_id!r} is to verify the drafts {list(drafts)}, those handed in for its "
                f"next step are {given}",
                "drafts are for the next step alone; leave out who has none",
            )
        if len(drafts) > limits.num_draft_tokens:
            raise LIMITS.broken(
                f"{request_id!r} has {len(drafts)} drafts, num_draft_tokens is "
                f"{limits.num_draft_tokens}"
            )


def _starts(plan: SchedulerOutput) -> dict[str, int]:
    cached = plan.cached_requests
    starts = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
    return starts | {n.source.request_id: n.num_computed_tokens for n in plan.new_requests}


def _new(plan: SchedulerOutput, *, resumed: bool) -> list[str]:
    return sorted(n.source.request_id for n in plan.new_requests if n.resumed == resumed)
