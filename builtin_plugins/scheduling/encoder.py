"""Images and the like: which features a step encodes, within budget and cache."""

from __future__ import annotations

from hardpoint.plugins import EncoderCache, RequestError

from . import reasons
from .live import LiveRequest
from .step import Step
from .tracker import Books


def check_features(books: Books, request: LiveRequest) -> None:
    """Refuse features that no step could ever encode.

    Raises:
        RequestError: naming the feature.
    """
    most = books.limits.max_encoder_tokens if books.context.encoder_cache is not None else 0
    for index, feature in enumerate(request.features):
        if feature.length > most:
            raise RequestError(
                f"features[{index}]: expected at most {most} encoder tokens, the budget of a "
                f"step, got {feature.length}"
            )
    lengths = {feature.identifier: feature.length for feature in request.features}
    if not books.limits.chunked_prefill and (total := sum(lengths.values())) > most:
        raise RequestError(
            f"features: expected at most {most} encoder tokens together, the budget of a step, "
            f"without scheduler.chunked_prefill, got {total}"
        )


def choose_features(
    books: Books, request: LiveRequest, start: int, tokens: int, step: Step
) -> tuple[int, list[int]]:
    """Choose what must be encoded for the `tokens` tokens of a request from position `start` on.

    Returns:
        So many of the tokens as can be computed, and the indices of the features to encode.
    """
    cache = encoder_of(books)
    chosen: list[int] = []
    reserved = 0
    identifiers: set[str] = set()
    for index, feature in enumerate(request.features):
        if feature.offset >= start + tokens:
            break
        if feature.offset + feature.length <= start:
            continue
        if feature.identifier in identifiers or cache.holds(request, index):
            if feature.identifier in identifiers or feature.identifier in step.encoding:
                chosen.append(index)  # it is encoded in this very step
            continue
        available = step.encoder_budget - reserved
        if feature.length > available or not cache.can_allocate(request, index, reserved):
            tokens = max(feature.offset - start, 0) if books.limits.chunked_prefill else 0
            if tokens == 0:
                reason = reasons.no_encoder(feature.length, available)
                step.waiting[request.request_id] = reason
                return 0, []
            break
        reserved += feature.length
        identifiers.add(feature.identifier)
        chosen.append(index)
    return tokens, chosen


def take_features(books: Books, request: LiveRequest, chosen: list[int], step: Step) -> None:
    """Put features into the step, and hold room for what they become."""
    cache = encoder_of(books)
    for index in chosen:
        feature = request.features[index]
        if feature.identifier not in step.encoding:
            cache.allocate(request, index)
            step.encoder_budget -= feature.length
        else:
            cache.holds(request, index)
        step.encoding.setdefault(feature.identifier, set()).add(request.request_id)
    step.encoder_inputs[request.request_id] = chosen


def free_features(books: Books, request: LiveRequest) -> None:
    """Let go of features whose positions are all computed."""
    cache = encoder_of(books)
    computed = request.num_computed_tokens
    for index, feature in enumerate(request.features):
        if feature.offset + feature.length <= computed:
            cache.free_input(request, index)


def encoder_of(books: Books) -> EncoderCache:
    """Return the encoder cache, where a request has features."""
    cache = books.context.encoder_cache
    assert cache is not None, "requests with features are refused without an encoder cache"
    return cache
