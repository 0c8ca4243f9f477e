"""The first half of a step: tokens for running requests, and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hardpoint.plugins import RequestStatus

from . import wait_reasons
from .encoder import choose_features, schedule_features
from .group import num_drafts_of_group, num_tokens_of_group, place, withdraw_group
from .live_request import SchedulerRequest
from .prompt_time import PromptTime, is_prompt
from .step import StepState
from .tracker import RequestTracker

if TYPE_CHECKING:
    from hardpoint.plugins.requests.plan import BlockIds

_RUNNING = RequestStatus.RUNNING  # looking up a member of an enumeration takes longer than a call


def schedule_running(tracker: RequestTracker, step: StepState, max_slowdown: float) -> None:
    """Schedule tokens of running requests, in order of admission, while the budget lasts.

    A request that can get none is passed over; one that would have to be preempted itself ends the
    pass. If the time of steps is limited, prompts come last, in the rest of it: see
    `PromptTime`.
    """
    requests = _in_turn(tracker, step)
    if not tracker.limits.step_milliseconds:
        _schedule_each(tracker, requests, step)
        return
    later: list[SchedulerRequest] = []
    step.later = later
    goes_on = _schedule_each(tracker, requests, step)
    step.later = None
    if later or len(tracker.waiting):
        _limit_prompts(tracker, step, max_slowdown)
    if later and goes_on:
        _schedule_each(tracker, later, step)


def _limit_prompts(tracker: RequestTracker, step: StepState, max_slowdown: float) -> None:
    """Limit the time of prompts in a step with all requests that generate; without any, do not."""
    if not all(is_prompt(request) for request in tracker.running.values()):
        drafts = sum(map(len, step.drafts.values()))
        streams = step.running.values()
        step.prompt_time = PromptTime(tracker.context, streams, drafts, step.now, max_slowdown)


def _schedule_each(
    tracker: RequestTracker, requests: Sequence[SchedulerRequest], step: StepState
) -> bool:
    running, scheduled, size = step.running, step.tokens, tracker.cache.block_size
    in_order = not (tracker.limits.asynchronous or tracker.limits.num_lookahead_tokens)
    for request in requests:
        if step.budget <= 0:
            return False
        if request.status is not _RUNNING:  # preempted by one before it
            continue
        # The common case is a plain decode: it needs one token and no limit applies, since a
        # request that has not finished has room for one. Where tokens come one by one, the cache
        # has work for the first one of a block and for the last one.
        tokens = request.num_tokens - request.num_computed_tokens
        if tokens != 1 or request.draft_token_ids or not request.is_plain or request.releases:
            schedule = _schedule_group if request.members else _schedule_limited
            if not schedule(tracker, request, step):
                return False
            continue
        is_within_block = in_order and request.num_tokens % size > 1
        if not (is_within_block or _extend(tracker, request, 1, step)):
            return False
        scheduled[request.request_id] = 1
        step.budget -= 1
        running[request.request_id] = request
    return True


def _schedule_limited(tracker: RequestTracker, request: SchedulerRequest, step: StepState) -> bool:
    """Schedule tokens of a request within all limits; return whether later requests may follow."""
    tokens, features = _limit_tokens(tracker, request, step)
    if tokens <= 0:
        return True
    tokens = _extend(tracker, request, tokens, step)
    if not tokens:
        return False
    step.release_blocks(request, request.num_computed_tokens)
    if request.draft_token_ids or features:
        _schedule_inputs(tracker, request, tokens, features, step)
    step.assign(request, tokens)
    step.running[request.request_id] = request
    return True


def _schedule_group(tracker: RequestTracker, leader: SchedulerRequest, step: StepState) -> bool:
    """Schedule tokens of a request and of its members; return whether later requests may follow."""
    starts = [request.num_computed_tokens for request in leader.group]
    tokens = num_tokens_of_group(tracker, leader, starts, step)
    if tokens is None:
        return True
    num_drafts = num_drafts_of_group(tracker, leader, tokens, step)
    drafts, leader.draft_token_ids = leader.draft_token_ids[:num_drafts], []
    for request, count in zip(leader.group, tokens, strict=True):
        if not count:
            continue
        lookahead = tracker.num_lookahead(request.num_computed_tokens + count + num_drafts)
        blocks = tracker.cache.extend(request, count + num_drafts, lookahead)
        if blocks is None:
            blocks = _preempt_for(tracker, request, (count + num_drafts, lookahead), step)
            if blocks is None:
                return False
        if drafts:
            step.drafts[request.request_id] = drafts
        place(tracker, request, count + num_drafts, step)
    return True


def _extend(
    tracker: RequestTracker, request: SchedulerRequest, tokens: int, step: StepState
) -> int:
    """Get the blocks of a running request for tokens; return how many it gets blocks for.

    No request is preempted for drafts: without free blocks, there are none in this step.
    """
    lookahead = 0
    if tracker.limits.num_lookahead_tokens:
        lookahead = tracker.num_lookahead(request.num_computed_tokens + tokens)
    blocks = tracker.cache.extend(request, tokens, lookahead)
    if blocks is None and request.draft_token_ids:
        tokens = min(tokens, request.num_tokens - request.num_computed_tokens)
        request.draft_token_ids = []
        blocks = tracker.cache.extend(request, tokens, lookahead)
    if blocks is None:
        blocks = _preempt_for(tracker, request, (tokens, lookahead), step)
        if blocks is None:
            return 0
    if blocks:
        step.new_blocks[request.request_id] = blocks
    return tokens


def _in_turn(tracker: RequestTracker, step: StepState) -> Sequence[SchedulerRequest]:
    """Return the running requests, in a pipeline without requests that leave their turn to others.

    In a pipeline, a request is in one of the batches under way at most. If the first batch had all
    of them, the other stages would have nothing to do.
    """
    running = tuple(tracker.running.values())
    if tracker.limits.num_batches == 1:
        return running
    ready = [r for r in running if r.num_tokens + len(r.draft_token_ids) > r.num_computed_tokens]
    share = -(-len(running) // tracker.limits.num_batches)
    # Stable: of equals, the first admitted ones.
    ready.sort(key=lambda request: request.last_step)
    passed_over = {request.request_id for request in ready[share:]}
    for request_id in passed_over:
        step.waiting[request_id] = wait_reasons.next_batch(share)
    return [request for request in running if request.request_id not in passed_over]


def _limit_tokens(
    tracker: RequestTracker, request: SchedulerRequest, step: StepState
) -> tuple[int, Sequence[int]]:
    """Return how many tokens a request can get, blocks aside, and which features they need.

    Where it can get none, the step's `waiting` has the reason, or `later` the request.
    """
    if step.later is not None and is_prompt(request):
        step.later.append(request)
        return 0, ()
    limits = tracker.limits
    computed = request.num_computed_tokens
    placeholders = request.num_output_placeholders
    tokens = request.num_tokens + placeholders + len(request.draft_token_ids) - computed
    if placeholders and request.num_tokens + placeholders >= request.max_total_tokens:
        tokens = 0  # it ends with the outputs in flight, at the latest
    if 0 < limits.long_prefill_token_threshold < tokens:
        tokens = limits.long_prefill_token_threshold
    # Drafts must not reach beyond the last position that can be computed; a prompt that is pooled
    # may, since no token follows it.
    last = max(limits.max_model_len - 1, request.num_tokens)
    tokens = min(tokens, step.budget, last - computed)
    if tokens <= 0:
        step.waiting[request.request_id] = wait_reasons.results(placeholders)
        return 0, ()
    if request.releases is not None:
        tokens = min(tokens, request.releases.num_before_next(computed))
    if step.prompt_time is not None and not (
        tokens := step.prompt_time.num_tokens(request, computed, tokens)
    ):
        step.waiting[request.request_id] = wait_reasons.no_time()
        return 0, ()
    if request.features:
        return choose_features(tracker, request, computed, tokens, step)
    return tokens, ()


def _preempt_for(
    tracker: RequestTracker, request: SchedulerRequest, tokens: tuple[int, int], step: StepState
) -> BlockIds | None:
    """Preempt victims until a request gets blocks for tokens and lookahead; None if it gets none.

    No request is admitted in a step that preempts.
    """
    cache = tracker.cache
    free = f"{cache.num_free_blocks} were free{wait_reasons.of_states(cache.num_free_states)}"
    cause = f"{request.request_id!r} needed KV blocks, {free}"
    step.admission_stopped = wait_reasons.running_lack_blocks(cause)
    while (blocks := tracker.cache.extend(request, *tokens)) is None:
        if len(tracker.running) == 1 and tracker.reset_last_loaded():
            continue
        load = tracker.load(step.now, step.budget)
        victim = tracker.policy.victim(tuple(tracker.running.values()), load)
        assert isinstance(victim, SchedulerRequest), "the policy's guard returns a running request"
        owner = request.leader or request
        if victim is not owner:
            _preempt(tracker, victim, cause, step)
            continue
        if owner.num_output_placeholders:
            # Its outputs in flight would be lost; if that happened in every step, it would never
            # make progress. So it keeps its blocks until they have arrived.
            withdraw_group(tracker, owner, step)
            reason = wait_reasons.results(owner.num_output_placeholders)
            step.waiting[owner.request_id] = reason
            return None
        _preempt(tracker, owner, cause, step)
        if tracker.finish_if_too_long(owner):
            del step.waiting[owner.request_id]
        return None
    return blocks


def _preempt(
    tracker: RequestTracker, victim: SchedulerRequest, cause: str, step: StepState
) -> None:
    for request in victim.group:
        if request.request_id in step.tokens:  # blocks that the step was to fill are cached already
            tracker.uncache_from(request, request.num_computed_tokens)
        unused = step.withdraw(request)
        if unused and tracker.context.encoder_cache is not None:
            for index in unused:
                tracker.context.encoder_cache.cancel(request, index)
    tracker.preempt(victim, step.now)
    step.preempted[victim.request_id] = cause
    step.waiting[victim.request_id] = wait_reasons.preempted(cause)


def _schedule_inputs(
    tracker: RequestTracker,
    request: SchedulerRequest,
    tokens: int,
    features: Sequence[int],
    step: StepState,
) -> None:
    """Add features and as many drafts to the step as `tokens` covers; drop the other drafts."""
    num_drafts = tokens - (request.num_tokens - request.num_computed_tokens)
    if request.draft_token_ids and num_drafts > 0:
        step.drafts[request.request_id] = request.draft_token_ids[:num_drafts]
    request.draft_token_ids = []
    if features:
        schedule_features(tracker, request, features, step)
