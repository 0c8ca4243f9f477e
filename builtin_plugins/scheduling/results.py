"""The end of a step: its results are applied to its requests, or its plan was lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hardpoint.plugins import (
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    PrefillStats,
    RequestFault,
    RequestStatus,
)

from .encoder import encoder_cache, free_computed_features
from .group import append_to_members
from .live_request import SchedulerRequest
from .step import PlannedStep
from .tracker import OutputsByClient, RequestTracker

_RUNNING = RequestStatus.RUNNING  # looking up a member of an enumeration takes longer than a call


class DraftCounts:
    """Totals of speculative decoding.

    Attributes:
        verified: draft tokens that steps verified.
        by_accepted: number of drafts, by how many of their tokens were accepted.
    """

    def __init__(self) -> None:
        self.verified = 0
        self.by_accepted: Counter[int] = Counter()

    def accepted_by_position(self) -> list[int]:
        """Return how many draft tokens were accepted, by position in their draft."""
        longest = max(self.by_accepted, default=0)
        return [
            sum(count for accepted, count in self.by_accepted.items() if accepted > position)
            for position in range(longest)
        ]


def process_results(
    tracker: RequestTracker,
    planned: PlannedStep,
    result: ModelRunnerOutput,
    drafts: DraftCounts,
    now: float,
) -> OutputsByClient:
    """Append sampled tokens and finish requests; return outputs by client index.

    A request for which the result lacks the token is preempted, so that it is computed again.
    """
    draft_token_ids = planned.plan.draft_token_ids
    sampled = result.sampled_token_ids
    has_more_counts = tracker.limits.asynchronous or draft_token_ids
    has_extras = _has_extras(result)
    has_positions = result.prompt_logprobs or result.routed_experts
    computed = planned.plan.num_computed_tokens() if has_positions else {}
    outputs: OutputsByClient = defaultdict(list)
    for request, preemptions in zip(planned.requests, planned.preemptions, strict=True):
        # Void results: the request finished or was preempted while the model ran; it may run again,
        # and its tokens are sampled again.
        if request.status is not _RUNNING or request.num_preemptions != preemptions:
            continue
        request_id = request.request_id
        if has_extras and (fault := result.faults.get(request_id)):
            request = request.leader or request
            outputs[request.client_index].append(_fail(tracker, request, fault))
            continue
        if request.features:
            free_computed_features(tracker, request)
        tokens = sampled.get(request_id) if request.leader is None else None  # else the leader's
        output: EngineCoreOutput | None = None
        if tokens:
            if has_more_counts:
                _count(tracker, request, draft_token_ids, tokens, drafts)
            output = _append_tokens(tracker, request, tokens)
        elif request_id not in result.pooler_output and _lacks_token(planned, request):
            _recompute(tracker, planned, request, now)
            continue
        if has_extras:
            output = _add_extras(tracker, request, computed.get(request_id, 0), result, output)
        if output is not None:
            outputs[request.client_index].append(output)
    return outputs


def add_finishes(planned: PlannedStep, result: ModelRunnerOutput) -> None:
    """Add the ends by the policy to a result, and drop tokens beyond their limits."""
    live = {request.request_id: request for request in planned.still_running()}
    ends = {name: finish for name, finish in planned.finishes.items() if name in live}
    part = ModelRunnerOutput(sampled_token_ids=result.sampled_token_ids, finishes=ends)
    part.drop_tokens({name: len(live[name].output_token_ids) for name in ends})
    result.end(part.finishes)


def _recompute(
    tracker: RequestTracker, planned: PlannedStep, request: SchedulerRequest, now: float
) -> None:
    before = planned.certain_before()
    for item in (request, *request.members):
        tracker.uncache_from(item, before[item.request_id])
    tracker.preempt(request, now)


def _lacks_token(planned: PlannedStep, request: SchedulerRequest) -> bool:
    if request.leader is not None:
        return False
    plan, request_id = planned.plan, request.request_id
    before: int = plan.num_computed_tokens()[request_id]
    return before + plan.num_scheduled_tokens[request_id] >= request.num_tokens


def lose_plan(
    tracker: RequestTracker, lost: PlannedStep, later: Sequence[PlannedStep], now: float
) -> None:
    """Report a lost plan's changes again; recompute its requests and requests of later plans."""
    plan = lost.plan
    tracker.unreported_finished |= plan.finished_request_ids
    tracker.unreported_preempted |= plan.preempted_request_ids
    tracker.unreported_freed_inputs += plan.freed_encoder_inputs
    reset_uncertain_cache(tracker, [lost, *later])
    for request in lost.requests:
        for index in plan.encoder_inputs.get(request.request_id, ()):
            encoder_cache(tracker).cancel(request, index)
    for planned in (lost, *later):
        computed, running = planned.certain_before(), planned.still_running()
        for request in running:
            tracker.uncache_from(request, computed[request.request_id])
        for request in running:
            if request.status is _RUNNING:  # else it was preempted with its group
                tracker.preempt(request.leader or request, now)


def reset_uncertain_cache(tracker: RequestTracker, plans: Sequence[PlannedStep]) -> None:
    """Reset the prefix cache if it is unknown which of its blocks these plans were to fill."""
    # Blocks are offered to other requests when a plan is made. Which ones a request had that has
    # finished or was preempted since is not known any more.
    if not all(planned.is_intact() for planned in plans):
        tracker.cache.reset()


def _has_extras(result: ModelRunnerOutput) -> bool:
    return bool(
        result.faults
        or result.logprobs
        or result.prompt_logprobs
        or result.num_nans_in_logits
        or result.pooler_output
        or result.routed_experts
    )


def _append_tokens(
    tracker: RequestTracker, request: SchedulerRequest, tokens: list[int]
) -> EngineCoreOutput:
    output = EngineCoreOutput(request_id=request.request_id, new_token_ids=tokens)
    if request.events or not request.prefill_reported:
        _add_events(request, output)
    before = request.num_tokens
    for token in tokens:
        if (reason := request.append_sampled(token)) is not None:
            output.finish_reason = reason
            if reason is FinishReason.STOP:
                output.stop_reason = request.stop_reason(token)
            output.new_token_ids = tokens[: request.num_tokens - before]
            tracker.finish(request, output)
            return output
    if request.members:
        append_to_members(request, tokens)
    return output


def _finish_pooled(
    tracker: RequestTracker, request: SchedulerRequest, pooled: Any
) -> EngineCoreOutput:
    """Finish a pooling request: its prompt is computed, and it generates no tokens."""
    output = EngineCoreOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.STOP,
        pooling_output=pooled,
    )
    _add_events(request, output)
    tracker.finish(request, output)
    return output


def _add_events(request: SchedulerRequest, output: EngineCoreOutput) -> None:
    if not request.prefill_reported:
        request.prefill_reported = True
        cached = max(request.num_cached_tokens, 0)
        output.num_cached_tokens = cached
        output.prefill_stats = PrefillStats(
            request.num_prompt_tokens, cached, request.num_external_tokens
        )
    if request.events:
        output.events, request.events = request.events, []


def _count(
    tracker: RequestTracker,
    request: SchedulerRequest,
    draft_token_ids: Mapping[str, Sequence[int]],
    tokens: list[int],
    drafts: DraftCounts,
) -> None:
    if tracker.limits.asynchronous:
        request.num_output_placeholders -= 1  # of the step, with known drafts
    verified = len(draft_token_ids.get(request.request_id, ()))
    if not verified:
        return
    accepted = len(tokens) - 1
    request.num_computed_tokens -= verified - accepted
    drafts.verified += verified
    drafts.by_accepted[accepted] += 1


def _add_extras(
    tracker: RequestTracker,
    request: SchedulerRequest,
    computed_before: int,
    result: ModelRunnerOutput,
    output: EngineCoreOutput | None,
) -> EngineCoreOutput | None:
    """Add pooled values, log-probabilities and debug data of a request to its output.

    Returns:
        The output; a new one if there was none and pooled values, experts or log-probabilities of
        the prompt have arrived.
    """
    request_id = request.request_id
    if output is None and request_id in result.pooler_output:
        output = _finish_pooled(tracker, request, result.pooler_output[request_id])
    if output is not None and (logprobs := result.logprobs.get(request_id)):
        output.logprobs = logprobs[: len(output.new_token_ids)]
    if prompt_logprobs := result.prompt_logprobs.get(request_id):
        first = computed_before + 1 if computed_before else 0
        new = prompt_logprobs[max(request.num_prompt_logprobs - first, 0) :]
        request.num_prompt_logprobs += len(new)
        if new:
            output = output or EngineCoreOutput(request_id=request_id)
            output.prompt_logprobs = new
    routed = result.routed_experts.get(request_id)
    if routed is not None and len(new_rows := _new_experts(request, computed_before, routed)):
        output = output or EngineCoreOutput(request_id=request_id)
        output.routed_experts = new_rows
    if output is not None:
        output.num_nans_in_logits = result.num_nans_in_logits.get(request_id, 0)
    return output


def _new_experts(request: SchedulerRequest, first: int, routed: Any) -> Any:
    """Return the experts of the positions that have not been sent yet.

    Args:
        first: position of the first row.
        routed: experts of the step's tokens, including rejected drafts, and tokens that a
                preempted request has computed again.
    """
    sent, end = request.num_routed_positions, request.num_tokens - 1
    new = routed[max(sent - first, 0) : end - first]
    if first > sent:  # tokens of the cache
        missing = np.full((first - sent, *routed.shape[1:]), -1, routed.dtype)
        new = np.concatenate((missing, new))
    request.num_routed_positions += len(new)
    return new


def _fail(
    tracker: RequestTracker, request: SchedulerRequest, fault: RequestFault
) -> EngineCoreOutput:
    output = tracker.finish_now(request, FinishReason.ERROR, fault.message)
    output.faulty_plugin = fault.plugin
    return output
