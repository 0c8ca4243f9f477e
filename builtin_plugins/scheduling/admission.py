"""The second half of a step: waiting requests are admitted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from hardpoint.plugins import (
    CachedPrefix,
    Finish,
    FinishReason,
    NewRequest,
    PauseState,
    RequestError,
    RequestStatus,
    WaitingFor,
    WaitReason,
)

from . import wait_reasons
from .encoder import choose_features, encoder_cache, schedule_features
from .group import admit_blocks, exceeds_steps, group_lacks, num_tokens_of_group, place
from .live_request import SchedulerRequest
from .step import StepState
from .tracker import RequestTracker
from .transfers import match_external, start_loading
from .waiting_queue import QueueCursor


@dataclass(frozen=True)
class AdmissionOptions:
    """How far a waiting request may be overtaken.

    Attributes:
        max_overtaken: steps in which later requests may be admitted before a deferred one;
            after that, none behind it in the queue is admitted before it.
        max_set_aside: limit of requests that one step sets aside.
    """

    max_overtaken: int
    max_set_aside: int


class _Outcome(Enum):
    """Outcome of an attempt to admit a request."""

    ADMITTED = "admitted"
    """It runs, or its KV is being loaded."""
    FINISHED = "finished"
    """It can never run and was finished."""
    SET_ASIDE = "set aside"
    """It keeps waiting; requests after it may be admitted."""
    STOP = "stop"
    """It keeps waiting; no further request is admitted in this step."""


def poll_blocked(tracker: RequestTracker, step: StepState, pause: PauseState) -> None:
    """Enqueue requests that no step part blocks any more; finish requests that can never run.

    While all are paused no part is asked, since workers that sleep could not answer it.
    """
    gates = tracker.context.gates
    for request in tracker.loading.values():
        step.waiting[request.request_id] = wait_reasons.remote_kv(request.num_loading_tokens)
    for request in list(tracker.blocked.values()):
        if pause is PauseState.PAUSED_ALL:
            step.waiting[request.request_id] = wait_reasons.paused()
            continue
        assert gates is not None, "without gates no request waits at one"
        try:
            held = next(filter(None, map(gates.wait_reason, request.group)), None)
        except RequestError as error:
            tracker.finish_in_planning(request, FinishReason.ERROR, str(error))
        else:
            if held is None:
                tracker.enqueue(request)
            else:
                step.waiting[request.request_id] = held


def admit_waiting(
    tracker: RequestTracker, step: StepState, pause: PauseState, options: AdmissionOptions
) -> None:
    """Admit waiting requests in the queue's order while budget, slots and blocks last."""
    if pause is not PauseState.UNPAUSED:
        if pause is PauseState.PAUSED_NEW:
            _admit_started(tracker, step)
        else:
            step.admission_stopped = wait_reasons.paused()
        return
    if step.admission_stopped is not None or not len(tracker.waiting) or _is_full(tracker, step):
        return
    _admit_in_order(tracker, step, options, tracker.waiting.cursor(step.now))
    if not tracker.running:
        _overrule_policy(tracker, step)


def has_started(tracker: RequestTracker, request: SchedulerRequest) -> bool:
    """Return whether a waiting request has run before, or holds loaded blocks."""
    return request.num_preemptions > 0 or request.request_id in tracker.loaded


def _admit_started(tracker: RequestTracker, step: StepState) -> None:
    """Admit the waiting requests that have started, oldest first; the policy is not asked."""
    started = [request for request in tracker.waiting if has_started(tracker, request)]
    for request in sorted(started, key=lambda request: request.order):
        if _is_full(tracker, step):
            break
        outcome = _admit(tracker, request, step, ask_policy=False)
        if outcome is _Outcome.ADMITTED:
            tracker.waiting.remove(request)
        elif outcome is _Outcome.STOP:
            step.admission_stopped = step.waiting[request.request_id]
            break
    step.admission_stopped = step.admission_stopped or wait_reasons.paused()


def _admit_in_order(
    tracker: RequestTracker, step: StepState, options: AdmissionOptions, cursor: QueueCursor
) -> None:
    set_aside: list[SchedulerRequest] = []
    num_overtaken = 0
    while (request := cursor.head()) is not None:
        if _is_full(tracker, step):
            break
        outcome = _admit(tracker, request, step)
        if outcome is _Outcome.ADMITTED:
            cursor.pop()
            num_overtaken = len(set_aside)
            continue
        if outcome is _Outcome.FINISHED:
            continue
        if outcome is _Outcome.STOP or _blocks_queue(request, step, options):
            step.admission_stopped = step.waiting[request.request_id]
            break
        cursor.skip()
        set_aside.append(request)
        if len(set_aside) >= options.max_set_aside:
            step.admission_stopped = wait_reasons.requests_ahead(len(set_aside))
            break
    for request in set_aside[:num_overtaken]:
        request.num_overtaken += 1


def _is_full(tracker: RequestTracker, step: StepState) -> bool:
    """Return whether no request at all can be admitted; record the reason if so."""
    if step.budget <= 0:
        step.admission_stopped = wait_reasons.no_budget(1, 0)
    elif tracker.num_rows >= tracker.limits.max_num_seqs:
        step.admission_stopped = wait_reasons.no_slot(tracker.num_rows)
    elif step.prompt_time is not None and step.prompt_time.is_used_up:
        step.admission_stopped = wait_reasons.no_time()
    elif step.max_requests is not None and len(step.tokens) >= step.max_requests:
        step.admission_stopped = wait_reasons.next_batch(step.max_requests)
    return step.admission_stopped is not None


def _blocks_queue(request: SchedulerRequest, step: StepState, options: AdmissionOptions) -> bool:
    """Return whether a request that was set aside has been overtaken too often to be again."""
    # How often a request that the policy holds back is overtaken is up to the policy.
    reason = step.waiting[request.request_id].waiting_for
    return reason is not WaitingFor.POLICY and request.num_overtaken >= options.max_overtaken


def _overrule_policy(tracker: RequestTracker, step: StepState) -> None:
    """Admit the first request that the policy holds back, since none is running."""
    for request_id, reason in list(step.waiting.items()):
        if reason.waiting_for is not WaitingFor.POLICY:
            continue
        request = tracker.requests[request_id]
        if _admit(tracker, request, step, ask_policy=False) is _Outcome.ADMITTED:
            tracker.waiting.remove(request)
            tracker.context.policy_fault(
                f"admit() held back every waiting request while nothing ran, the first of them "
                f"{request_id!r} ({reason.message})"
            )
        return


def _admit(
    tracker: RequestTracker, request: SchedulerRequest, step: StepState, *, ask_policy: bool = True
) -> _Outcome:
    """Admit a request if every limit allows it; record the reason in the step if not."""
    if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
        raise RuntimeError(
            f"request {request.request_id!r} is in the queue with status {request.status.name}"
        )
    reason = _reason_to_wait(tracker, request, step, ask_policy=ask_policy)
    if isinstance(reason, Finish):
        finish = reason.of(tracker.policy.name)
        tracker.finish_in_planning(request, FinishReason.STOP, stop_reason=finish.shown)
        return _Outcome.FINISHED
    if reason is not None:
        if request.members and reason.waiting_for is WaitingFor.PART and not tracker.running:
            # Every resource is free, and has no room for all.
            error = f"members: expected a group that fits at once, got {len(request.members)}: "
            tracker.finish_in_planning(request, FinishReason.ERROR, error + reason.message)
            return _Outcome.FINISHED
        step.waiting[request.request_id] = reason
        return _Outcome.SET_ASIDE
    if request.members:
        return _schedule_group(tracker, request, step)
    return _admit_with_prefix(tracker, request, step)


def _admit_with_prefix(
    tracker: RequestTracker, request: SchedulerRequest, step: StepState
) -> _Outcome:
    if request.request_id in tracker.loaded:
        return _schedule(tracker, request, CachedPrefix(), 0, step)
    prefix = tracker.cache.lookup(request)
    if tracker.context.transfers is None:
        return _schedule(tracker, request, prefix, 0, step)
    external, asynchronous = match_external(tracker, request, prefix)
    if external is None:
        step.waiting[request.request_id] = wait_reasons.remote_kv(None)
        return _Outcome.SET_ASIDE
    if asynchronous:
        if start_loading(tracker, request, prefix, external, step):
            return _Outcome.ADMITTED
        return _lack_blocks(tracker, request, step)
    return _schedule(tracker, request, prefix, external, step)


def _reason_to_wait(
    tracker: RequestTracker, request: SchedulerRequest, step: StepState, *, ask_policy: bool
) -> WaitReason | Finish | None:
    """Return why a request must wait or ends, budget and blocks aside."""
    gates = tracker.context.gates
    if request.members:
        if gates is not None and (lack := group_lacks(gates, request)) is not None:
            return lack
        needed, free = len(request.group), tracker.limits.max_num_seqs - tracker.num_rows
        if needed > free:
            return wait_reasons.no_slot(tracker.num_rows, needed, free)
    elif gates is not None and (lack := gates.lacks(request)) is not None:
        return lack
    if ask_policy and "admit" in tracker.policy_hooks:
        message = tracker.policy.admit(request, tracker.load(step.now, step.budget))
        if message is not None:
            return message if isinstance(message, Finish) else wait_reasons.held_back(message)
    return None


def _schedule_group(tracker: RequestTracker, leader: SchedulerRequest, step: StepState) -> _Outcome:
    prefixes = [tracker.cache.lookup(request) for request in leader.group]
    starts = [prefix.num_tokens for prefix in prefixes]
    if (error := exceeds_steps(tracker, leader, starts)) is not None:  # with its outputs
        tracker.finish_in_planning(leader, FinishReason.ERROR, error)
        return _Outcome.FINISHED
    tokens = num_tokens_of_group(tracker, leader, starts, step)
    if tokens is None:
        return _Outcome.STOP if tracker.limits.chunked_prefill else _Outcome.SET_ASIDE
    if not admit_blocks(tracker, leader, prefixes, tokens, _num_reserved(tracker)):
        return _lack_blocks(tracker, leader, step)
    if "scheduled" in tracker.policy_hooks:
        step.notify(tracker.policy, leader, tokens[0])
    tracker.start_running(leader, step.now)
    step.waiting.pop(leader.request_id, None)
    for request, count in zip(leader.group, tokens, strict=True):
        if count:
            place(tracker, request, count, step)
    if leader.num_cached_tokens < 0:
        leader.num_cached_tokens = starts[0]
    return _Outcome.ADMITTED


def _schedule(
    tracker: RequestTracker,
    request: SchedulerRequest,
    prefix: CachedPrefix,
    external: int,
    step: StepState,
) -> _Outcome:
    loaded = request.num_loading_tokens if request.request_id in tracker.loaded else external
    computed = request.num_computed_tokens or prefix.num_tokens + external
    tokens = _limit_tokens(tracker, request, max(computed, request.num_computed_tokens), step)
    if tokens <= 0:
        return _Outcome.STOP if tracker.limits.chunked_prefill else _Outcome.SET_ASIDE
    features: list[int] = []
    if request.features:
        tokens, features = choose_features(tracker, request, computed, tokens, step)
        if tokens <= 0:
            encoder_cache(tracker).free(request)
            return _Outcome.STOP
    if not _allocate_blocks(tracker, request, prefix, external, tokens):
        if request.features:
            encoder_cache(tracker).free(request)
        return _lack_blocks(tracker, request, step)
    _start(tracker, request, computed, tokens, step)
    if features:
        schedule_features(tracker, request, features, step)
    if request.num_cached_tokens < 0:
        request.num_cached_tokens, request.num_external_tokens = computed, loaded
    return _Outcome.ADMITTED


def _limit_tokens(
    tracker: RequestTracker, request: SchedulerRequest, start: int, step: StepState
) -> int:
    """Return how many tokens from `start` on a request can get, blocks and features aside.

    Where it can get none, the step's `waiting` has the reason.
    """
    limits = tracker.limits
    tokens = request.num_tokens - start
    if request.releases is not None:
        tokens = min(tokens, request.releases.num_before_next(start))
    if 0 < limits.long_prefill_token_threshold < tokens:
        tokens = limits.long_prefill_token_threshold
    if tokens > step.budget:
        if not limits.chunked_prefill:
            step.waiting[request.request_id] = wait_reasons.no_budget(tokens, step.budget)
            return 0
        tokens = step.budget
    if step.prompt_time is not None:
        tokens = step.prompt_time.num_tokens(request, start, tokens)
        if not tokens:
            step.waiting[request.request_id] = wait_reasons.no_time()
    return tokens


def _allocate_blocks(
    tracker: RequestTracker,
    request: SchedulerRequest,
    prefix: CachedPrefix,
    external: int,
    tokens: int,
) -> bool:
    # A request with nothing computed gets no lookahead: it has no drafts to verify, and where its
    # blocks are filled by another engine both must have the same number.
    known = prefix.num_tokens + external
    lookahead = tracker.num_lookahead(max(known, request.num_computed_tokens) + tokens)
    loaded = request.request_id in tracker.loaded
    if loaded:
        if tracker.cache.num_free_blocks < _num_reserved(tracker):
            return False
        if tracker.cache.extend(request, tokens, lookahead) is None:
            return False
    elif not tracker.cache.admit(
        request,
        prefix,
        tokens,
        num_external_tokens=external,
        num_lookahead_tokens=lookahead if known else 0,
        num_reserved_blocks=_num_reserved(tracker),
    ):
        return False
    transfers = tracker.context.transfers
    if transfers is not None:
        block_ids = tracker.cache.block_ids(request)
        transfers.update_state_after_alloc(request, block_ids, 0 if loaded else external)
    return True


def _num_reserved(tracker: RequestTracker) -> int:
    """Return how many blocks must stay free so that running requests can grow."""
    if not tracker.running:
        return 0
    return math.ceil(tracker.context.watermark * tracker.cache.num_usable_blocks)


def _lack_blocks(tracker: RequestTracker, request: SchedulerRequest, step: StepState) -> _Outcome:
    """Record a lack of blocks; if no request runs, free the blocks of another loaded request."""
    cache, needed = tracker.cache, tracker.blocks_of(request)
    step.waiting[request.request_id] = wait_reasons.no_blocks(
        needed, cache.num_free_blocks, _num_reserved(tracker), cache.num_free_states
    )
    if not tracker.running:
        if tracker.finish_if_too_long(request):
            del step.waiting[request.request_id]
            return _Outcome.FINISHED
        tracker.reset_last_loaded(keep=request)
    return _Outcome.STOP


def _start(
    tracker: RequestTracker, request: SchedulerRequest, computed: int, tokens: int, step: StepState
) -> None:
    request_id, releases = request.request_id, request.releases
    resumed = request.num_preemptions > 0  # the status does not show it if KV was loaded since
    request.num_computed_tokens = computed
    if "scheduled" in tracker.policy_hooks:
        step.notify(tracker.policy, request, tokens)
    tracker.start_running(request, step.now)
    step.admitted[request_id] = request
    step.assign(request, tokens)
    step.waiting.pop(request_id, None)
    step.new_requests.append(
        NewRequest(
            source=request.source,
            output_token_ids=tuple(request.output_token_ids),
            block_ids=tracker.cache.block_ids(request),
            num_computed_tokens=computed,
            resumed=resumed,
            released_columns=() if releases is None else releases.starting_at(computed),
        )
    )
