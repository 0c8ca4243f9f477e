"""The first half of a step: tokens for the requests that run."""

from __future__ import annotations

from hardpoint.plugins import BlockIds, RequestStatus

from . import reasons
from .encoder import choose_features, take_features
from .live import LiveRequest
from .step import Step
from .tracker import Books


def schedule_running(books: Books, step: Step) -> None:
    """Give running requests their tokens, in order of admission, while the budget lasts.

    One that can get nothing is passed over; one that has to give way itself ends the pass.
    """
    extend, looks_ahead = books.cache.extend, books.limits.num_lookahead_tokens > 0
    for request in tuple(books.running.values()):
        if step.budget <= 0:
            break
        if request.status is not RequestStatus.RUNNING:  # preempted by one before it
            continue
        # A plain decode, which is what most of them are, needs no limits: it wants one token, and
        # whoever has not ended has room for one.
        tokens = request.num_tokens - request.num_computed_tokens
        if tokens != 1 or request.draft_token_ids:
            tokens = _tokens_wanted(books, request, step)
            if tokens <= 0:
                continue
        features: list[int] = []
        if request.features:
            tokens, features = choose_features(
                books, request, request.num_computed_tokens, tokens, step
            )
            if tokens <= 0:
                continue
        ahead = books.lookahead(request.num_computed_tokens + tokens) if looks_ahead else 0
        blocks = extend(request, tokens, ahead)
        if blocks is None:
            blocks = _make_room(books, request, (tokens, ahead), step)
            if blocks is None:
                break
        request_id = request.request_id
        step.running[request_id] = request
        step.tokens[request_id] = tokens
        step.budget -= tokens
        if blocks:
            step.new_blocks[request_id] = blocks
        if request.draft_token_ids:
            _take_drafts(request, tokens, step)
        if features:
            take_features(books, request, features, step)


def _tokens_wanted(books: Books, request: LiveRequest, step: Step) -> int:
    """Return how many tokens a request can get, blocks aside; notes the reason if none."""
    limits = books.limits
    computed = request.num_computed_tokens
    planned = request.num_output_placeholders
    tokens = request.num_tokens + planned + len(request.draft_token_ids) - computed
    if planned and request.num_tokens + planned >= request.longest:
        tokens = 0  # the tokens that are on their way end it, at the latest
    if 0 < limits.long_prefill_token_threshold < tokens:
        tokens = limits.long_prefill_token_threshold
    # Drafts must not reach beyond the last position that can be computed.
    tokens = min(tokens, step.budget, limits.max_model_len - 1 - computed)
    if tokens <= 0:
        step.waiting[request.request_id] = reasons.waits_for_results(planned)
    return tokens


def _make_room(
    books: Books, request: LiveRequest, tokens: tuple[int, int], step: Step
) -> BlockIds | None:
    """Preempt until a request gets blocks for tokens and lookahead; None if it gets none."""
    why = f"{request.request_id!r} needed KV blocks, {books.cache.num_free_blocks} were free"
    step.stopped = reasons.room_is_short(why)
    while (blocks := books.cache.extend(request, *tokens)) is None:
        if len(books.running) == 1 and books.give_up_loaded():
            continue
        victim = books.policy.victim(tuple(books.running.values()), books.load(step))
        assert isinstance(victim, LiveRequest), "the policy's guard returns one that runs"
        if victim is not request:
            _preempt(books, victim, why, step)
            continue
        if request.num_output_placeholders:
            # What is on its way would be lost, and if that happened in every step, it would never
            # get on. So it keeps its blocks until everything is in.
            reason = reasons.waits_for_results(request.num_output_placeholders)
            step.waiting[request.request_id] = reason
            return None
        _preempt(books, request, why, step)
        if books.end_if_too_long(request):
            del step.waiting[request.request_id]
        return None
    return blocks


def _preempt(books: Books, victim: LiveRequest, why: str, step: Step) -> None:
    """Undo what the step gave a request, and take its blocks."""
    if victim.request_id in step.running:  # what this step was to compute can be found already
        books.discard_from(victim, victim.num_computed_tokens)
    orphans = step.withdraw(victim)
    if orphans and books.context.encoder_cache is not None:
        for index in orphans:
            books.context.encoder_cache.cancel(victim, index)
    books.preempt(victim, step.now)
    step.preempted[victim.request_id] = why
    step.waiting[victim.request_id] = reasons.preempted(why)


def _take_drafts(request: LiveRequest, tokens: int, step: Step) -> None:
    """Put into the step as many drafts as got tokens; the others are lost."""
    count = tokens - (request.num_tokens - request.num_computed_tokens)
    if count > 0:
        step.drafts[request.request_id] = request.draft_token_ids[:count]
    request.draft_token_ids = []
