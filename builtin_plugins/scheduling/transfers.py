"""Blocks that a step part loads and saves: requests that wait for them, and failed loads."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import CachedPrefix, ModelRunnerOutput, RequestStatus

from . import wait_reasons
from .live_request import SchedulerRequest
from .results import reset_uncertain_cache
from .step import PlannedStep, StepState
from .tracker import LOAD, SAVE, RequestTracker


def match_external(
    tracker: RequestTracker, request: SchedulerRequest, prefix: CachedPrefix
) -> tuple[int | None, bool]:
    """Return how many tokens beyond the prefix can be loaded, and whether between steps.

    None means that this is not known yet. At least one token is left to compute.
    """
    transfers = tracker.context.transfers
    # Log-probabilities of the prompt need all of it computed.
    params = request.params
    needs_all = params.prompt_logprobs is not None or params.routed_experts
    if transfers is None or request.skip_transfer or needs_all or params.skip_reading_prefix_cache:
        return 0, False
    num_matched, asynchronous = transfers.get_num_new_matched_tokens(request, prefix.num_tokens)
    if num_matched is None:
        return None, False
    end = min(prefix.num_tokens + num_matched, request.num_tokens - 1)
    while (whole := request.source.whole_prefix(end)) < end:
        end = whole // tracker.cache.block_size * tracker.cache.block_size
    external = end - prefix.num_tokens
    return (external, asynchronous) if external > 0 else (0, False)


def start_loading(
    tracker: RequestTracker,
    request: SchedulerRequest,
    prefix: CachedPrefix,
    external: int,
    step: StepState,
) -> bool:
    """Allocate the blocks that are filled between steps, and let the request wait for them.

    It uses no budget and no running slot. The blocks are cached when they are filled.

    Returns:
        Whether there were enough blocks.
    """
    if not tracker.cache.admit(
        request, prefix, 0, num_external_tokens=external, delay_caching=True
    ):
        return False
    transfers = tracker.context.transfers
    assert transfers is not None
    transfers.update_state_after_alloc(request, tracker.cache.block_ids(request), external)
    request.num_computed_tokens = prefix.num_tokens + external
    request.num_loading_tokens = external
    request.status = RequestStatus.WAITING
    tracker.loading[request.request_id] = request
    step.waiting[request.request_id] = wait_reasons.remote_kv(external)
    return True


def process_transfers(
    tracker: RequestTracker, result: ModelRunnerOutput, plans: Sequence[PlannedStep], now: float
) -> None:
    """Process the transfers in a result: failed and finished loads, finished saves.

    Args:
        plans: the result's plan, and later plans.
    """
    if result.invalid_block_ids:
        reset_uncertain_cache(tracker, plans)
        _skip_transfer(tracker, result.invalid_block_ids, plans[0])
        _recompute_invalid(tracker, result.invalid_block_ids, now)
    for request_id in sorted(result.kv_loaded):
        if (request := tracker.loading.get(request_id)) is not None:
            _finish_loading(tracker, request)
        else:
            _finish_transfer(tracker, request_id, LOAD)
    for request_id in sorted(result.kv_saved):
        _finish_transfer(tracker, request_id, SAVE)


def _finish_loading(tracker: RequestTracker, request: SchedulerRequest) -> None:
    tracker.cache.cache_arrived(request, request.num_computed_tokens)
    if request.skip_transfer:
        tracker.reset_progress(request)  # valid blocks are found again at its admission
    else:
        tracker.loaded[request.request_id] = request
    tracker.enqueue(request)


def _finish_transfer(tracker: RequestTracker, request_id: str, transfer: str) -> None:
    """Remove a transfer of a finished request; free the blocks after the last one."""
    if request_id in tracker.pending_free:
        request, unfinished = tracker.pending_free[request_id]
        unfinished.discard(transfer)
        if not unfinished:
            del tracker.pending_free[request_id]
            tracker.cache.free(request)


def _skip_transfer(tracker: RequestTracker, invalid: frozenset[int], step: PlannedStep) -> None:
    """Mark the requests of a step with a failed load, also if preempted since.

    Another request may have their blocks by now; loading again would fail again.
    """
    for new in step.plan.new_requests:
        request = tracker.requests.get(new.source.request_id)
        if request is not None and any(invalid.intersection(table) for table in new.block_ids):
            request.skip_transfer = True


def _recompute_invalid(tracker: RequestTracker, invalid: frozenset[int], now: float) -> None:
    """Reset all requests with a block of a failed load; valid blocks stay cached.

    They compute the missing blocks locally, without another lookup.
    """
    tracker.cache.discard(invalid)
    for request in list(tracker.requests.values()):
        tables = tracker.cache.block_ids(request)
        indices = [i for table in tables for i, block in enumerate(table) if block in invalid]
        if not indices:
            continue
        request.skip_transfer = True
        num_valid = min(indices) * tracker.cache.block_size
        tracker.uncache_from(request, num_valid)
        request.limit_cached_tokens(num_valid)
        if request.status is RequestStatus.RUNNING:
            tracker.preempt(request, now)
        elif request.request_id in tracker.loading:
            # Its blocks may still be written: they are freed when the load has ended.
            request.num_computed_tokens = num_valid
        else:
            tracker.reset_progress(request)
