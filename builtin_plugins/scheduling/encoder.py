"""Multimodal features: which ones a step encodes, within its budget and the encoder cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hardpoint.plugins import RequestError

from . import wait_reasons
from .live_request import SchedulerRequest
from .step import StepState
from .tracker import RequestTracker

if TYPE_CHECKING:
    from hardpoint.plugins.scheduling.scheduler import EncoderCache


def check_features(tracker: RequestTracker, request: SchedulerRequest) -> None:
    """Reject features that no step could encode.

    Raises:
        RequestError: naming the feature.
    """
    has_cache = tracker.context.encoder_cache is not None
    limit = tracker.limits.max_encoder_tokens if has_cache else 0
    for index, feature in enumerate(request.features):
        if feature.length > limit:
            raise RequestError(
                f"features[{index}]: expected at most {limit} encoder tokens, the budget of a "
                f"step, got {feature.length}"
            )
        if feature.sees_itself and feature.length > tracker.limits.max_num_batched_tokens:
            raise RequestError(
                f"features[{index}]: expected at most {tracker.limits.max_num_batched_tokens} "
                f"tokens, of one step (scheduler.max_num_batched_tokens), as they see each other, "
                f"got {feature.length}"
            )
    lengths = {feature.identifier: feature.length for feature in request.features}
    if not tracker.limits.chunked_prefill and (total := sum(lengths.values())) > limit:
        raise RequestError(
            f"features: expected at most {limit} encoder tokens together, the budget of a step, "
            f"without scheduler.chunked_prefill, got {total}"
        )


def choose_features(
    tracker: RequestTracker, request: SchedulerRequest, start: int, tokens: int, step: StepState
) -> tuple[int, list[int]]:
    """Choose the features to encode for the `tokens` tokens of a request from position `start` on.

    Returns:
        The number of tokens that can be computed, and the indices of the features. They are more
        than `tokens` where a feature that is not cut begins, if the budget has room.
    """
    if (tokens := _uncut(request, start, tokens, step)) == 0:
        return 0, []
    cache = encoder_cache(tracker)
    chosen: list[int] = []
    reserved = 0
    identifiers: set[str] = set()
    for index, feature in enumerate(request.features):
        if feature.offset >= start + tokens:
            break
        if feature.end <= start:
            continue
        if feature.identifier in identifiers or cache.holds(request, index):
            if feature.identifier in identifiers or feature.identifier in step.encoding:
                chosen.append(index)  # encoded in this very step
            continue
        available = step.encoder_budget - reserved
        if feature.length > available or not cache.can_allocate(request, index, reserved):
            tokens = max(feature.offset - start, 0) if tracker.limits.chunked_prefill else 0
            if tokens == 0:
                reason = wait_reasons.no_encoder_budget(feature.length, available)
                step.waiting[request.request_id] = reason
                return 0, []
            break
        reserved += feature.length
        identifiers.add(feature.identifier)
        chosen.append(index)
    return tokens, chosen


def _uncut(request: SchedulerRequest, start: int, tokens: int, step: StepState) -> int:
    whole = request.source.whole_prefix(start + tokens) - start
    if whole > 0:
        return whole
    # Limits of a prompt's tokens besides the budget would keep it from going on.
    whole = next(f.end for f in request.features if f.sees_itself and f.end > start) - start
    if whole <= step.budget:
        return whole
    step.waiting[request.request_id] = wait_reasons.no_budget(whole, step.budget)
    return 0


def schedule_features(
    tracker: RequestTracker, request: SchedulerRequest, chosen: Sequence[int], step: StepState
) -> None:
    """Add features to the step, and allocate their entries in the encoder cache."""
    cache = encoder_cache(tracker)
    for index in chosen:
        feature = request.features[index]
        if feature.identifier not in step.encoding:
            cache.allocate(request, index)
            step.encoder_budget -= feature.length
        else:
            cache.holds(request, index)
        step.encoding.setdefault(feature.identifier, set()).add(request.request_id)
    step.encoder_inputs[request.request_id] = chosen


def free_computed_features(tracker: RequestTracker, request: SchedulerRequest) -> None:
    """Free the cache entries of features after all their positions are computed."""
    cache = encoder_cache(tracker)
    computed = request.num_computed_tokens
    for index, feature in enumerate(request.features):
        if feature.end <= computed:
            cache.free_input(request, index)


def encoder_cache(tracker: RequestTracker) -> EncoderCache:
    """Return the encoder cache; it exists wherever a request has features."""
    cache = tracker.context.encoder_cache
    assert cache is not None, "requests with features are rejected without an encoder cache"
    return cache
