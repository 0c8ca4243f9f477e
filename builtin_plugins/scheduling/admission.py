"""The second half of a step: waiting requests join the running ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from hardpoint.plugins import (
    CachedPrefix,
    FinishReason,
    NewRequest,
    RequestError,
    RequestStatus,
    WaitingFor,
    WaitReason,
)

from . import reasons
from .encoder import choose_features, take_features
from .live import LiveRequest
from .step import Step
from .tracker import Books
from .transfer import ask_connector, begin_loading
from .waiting_queue import Walk


@dataclass(frozen=True)
class AdmissionOptions:
    """How far a request may be passed by others.

    Attributes:
        max_overtaken: steps in which others may go before a request that was set aside; then
            nobody behind it is admitted before it is.
        max_set_aside: most requests that one step sets aside.
    """

    max_overtaken: int
    max_set_aside: int


class _Outcome(Enum):
    ADMITTED = "admitted"
    """It runs, or loads."""
    ENDED = "ended"
    """It can never run."""
    SET_ASIDE = "set aside"
    """Those behind it may go first."""
    STOP = "stop"
    """It stays at the head, and nobody is admitted any more."""


def unblock(books: Books, step: Step) -> None:
    """Let requests into the queue whose grammar is ready; end those whose grammar is wrong."""
    grammars = books.context.grammars
    for request in list(books.blocked.values()):
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            step.waiting[request.request_id] = reasons.waits_for_remote_kv(request.loading)
            continue
        assert grammars is not None, "nobody waits for a grammar where there are none"
        try:
            if grammars.ready(request):
                books.wait(request)
            else:
                step.waiting[request.request_id] = reasons.waits_for_grammar()
        except RequestError as error:
            books.end(request, FinishReason.ERROR, str(error))


def admit_waiting(books: Books, step: Step, options: AdmissionOptions) -> None:
    """Admit waiting requests in the queue's order while budget, slots and blocks last."""
    if not len(books.waiting) or is_full(books, step):
        return
    walk = books.waiting.walk(step.now)
    try:
        _admit_in_order(books, step, options, walk)
    finally:
        walk.close()
    if not books.running:
        _overrule_policy(books, step)


def admit_one(books: Books, request: LiveRequest, step: Step) -> bool:
    """Admit a waiting request if every limit allows it, without asking the policy.

    Returns:
        Whether others may be admitted after it.
    """
    outcome = _admit(books, request, step, ask_policy=False)
    if outcome is _Outcome.ADMITTED:
        books.waiting.remove(request)
    elif outcome is _Outcome.STOP:
        step.stopped = step.waiting[request.request_id]
    return outcome is not _Outcome.STOP


def _admit_in_order(books: Books, step: Step, options: AdmissionOptions, walk: Walk) -> None:
    aside: list[LiveRequest] = []
    overtaken = 0
    while (request := walk.head()) is not None:
        if is_full(books, step):
            break
        outcome = _admit(books, request, step)
        if outcome is _Outcome.ADMITTED:
            walk.take()
            overtaken = len(aside)
            continue
        if outcome is _Outcome.ENDED:
            continue
        if outcome is _Outcome.STOP or _stops_others(request, step, options):
            step.stopped = step.waiting[request.request_id]
            break
        walk.skip()
        aside.append(request)
        if len(aside) >= options.max_set_aside:
            step.stopped = reasons.behind(len(aside))
            break
    for passed in aside[:overtaken]:
        passed.num_overtaken += 1


def is_full(books: Books, step: Step) -> bool:
    """Whether nobody can be admitted, whoever it is; notes the reason if so."""
    if step.budget <= 0:
        step.stopped = reasons.no_budget(1, 0)
    elif len(books.running) >= books.limits.max_num_seqs:
        step.stopped = reasons.no_slot(len(books.running))
    return step.stopped is not None


def _stops_others(request: LiveRequest, step: Step, options: AdmissionOptions) -> bool:
    """Whether a request that is set aside was passed so often that nobody passes it now.

    Whom the policy holds back, it lets others pass; how often is the policy's affair.
    """
    why = step.waiting[request.request_id].waiting_for
    return why is not WaitingFor.POLICY and request.num_overtaken >= options.max_overtaken


def _overrule_policy(books: Books, step: Step) -> None:
    """Admit the first request that the policy holds back, since nothing runs at all."""
    for request_id, reason in list(step.waiting.items()):
        if reason.waiting_for is not WaitingFor.POLICY:
            continue
        request = books.requests[request_id]
        if _admit(books, request, step, ask_policy=False) is _Outcome.ADMITTED:
            books.waiting.remove(request)
            books.context.policy_fault(
                f"admit() held back every waiting request while nothing ran, the first of them "
                f"{request_id!r} ({reason.message})"
            )
        return


def _admit(books: Books, request: LiveRequest, step: Step, *, ask_policy: bool = True) -> _Outcome:
    """Admit one request if every limit allows it; notes the reason if not."""
    if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
        raise RuntimeError(
            f"request {request.request_id!r} is in the queue with status {request.status.name}"
        )
    refusal = _refusal(books, request, step, ask_policy=ask_policy)
    if refusal is not None:
        step.waiting[request.request_id] = refusal
        return _Outcome.SET_ASIDE
    if request.request_id in books.loaded:
        return _place(books, request, CachedPrefix(), 0, step)
    prefix = books.cache.lookup(request)
    external, beside = ask_connector(books, request, prefix)
    if external is None:
        step.waiting[request.request_id] = reasons.waits_for_remote_kv(None)
        return _Outcome.SET_ASIDE
    if beside:
        if begin_loading(books, request, prefix, external, step):
            return _Outcome.ADMITTED
        return _no_blocks(books, request, step)
    return _place(books, request, prefix, external, step)


def _refusal(
    books: Books, request: LiveRequest, step: Step, *, ask_policy: bool
) -> WaitReason | None:
    """Return why a request must wait before its blocks are looked at."""
    most, lora = books.limits.max_loras, request.lora
    if most and lora is not None and lora.id not in books.loras and len(books.loras) >= most:
        return reasons.no_lora_slot(lora.name, most)
    if ask_policy and books.holds_back:
        words = books.policy.admit(request, books.load(step))
        if words is not None:
            return reasons.held_back(words)
    return None


def _place(
    books: Books, request: LiveRequest, prefix: CachedPrefix, external: int, step: Step
) -> _Outcome:
    """Find tokens, encoder room and blocks for a request, then let it run."""
    limits = books.limits
    brought = request.loading if request.request_id in books.loaded else external
    computed = request.num_computed_tokens or prefix.num_tokens + external
    tokens = _wanted(request, computed)
    if 0 < limits.long_prefill_token_threshold < tokens:
        tokens = limits.long_prefill_token_threshold
    if tokens > step.budget:
        if not limits.chunked_prefill:
            step.waiting[request.request_id] = reasons.no_budget(tokens, step.budget)
            return _Outcome.SET_ASIDE
        tokens = step.budget
    features: list[int] = []
    if request.features:
        tokens, features = choose_features(books, request, computed, tokens, step)
        if tokens <= 0:
            return _give_up_features(books, request)
    if not _take_blocks(books, request, prefix, external, tokens):
        if request.features:
            _give_up_features(books, request)
        return _no_blocks(books, request, step)
    _start(books, request, computed, tokens, step)
    if features:
        take_features(books, request, features, step)
    if request.num_cached_tokens < 0:
        request.num_cached_tokens, request.num_external_tokens = computed, brought
    return _Outcome.ADMITTED


def _wanted(request: LiveRequest, computed: int) -> int:
    return request.num_tokens - max(computed, request.num_computed_tokens)


def _give_up_features(books: Books, request: LiveRequest) -> _Outcome:
    """Let go of embeddings that a request was going to use."""
    assert books.context.encoder_cache is not None
    books.context.encoder_cache.free(request)
    return _Outcome.STOP


def _take_blocks(
    books: Books, request: LiveRequest, prefix: CachedPrefix, external: int, tokens: int
) -> bool:
    # A request with nothing computed gets no lookahead: it has no drafts to verify, and where its
    # blocks are filled elsewhere both sides must count alike.
    known = prefix.num_tokens + external
    ahead = books.lookahead(max(known, request.num_computed_tokens) + tokens)
    loaded = request.request_id in books.loaded
    if loaded:
        if books.cache.num_free_blocks < _reserved(books):
            return False
        blocks = books.cache.extend(request, tokens, ahead)
    elif books.cache.admit(
        request,
        prefix,
        tokens,
        num_external_tokens=external,
        num_lookahead_tokens=ahead if known else 0,
        num_reserved_blocks=_reserved(books),
    ):
        blocks = ()
    else:
        blocks = None
    if blocks is None:
        return False
    connector = books.context.connector
    if connector is not None:
        held = books.cache.block_ids(request)
        connector.update_state_after_alloc(request, held, 0 if loaded else external)
    return True


def _reserved(books: Books) -> int:
    """Return how many blocks must stay free so that running requests can grow."""
    if not books.running:
        return 0
    return math.ceil(books.context.watermark * books.cache.num_usable_blocks)


def _no_blocks(books: Books, request: LiveRequest, step: Step) -> _Outcome:
    """Note that blocks are lacking; where nothing runs, loaded requests behind give theirs up."""
    needed = books.blocks_needed(request.num_tokens)
    reason = reasons.no_blocks(needed, books.cache.num_free_blocks, _reserved(books))
    step.waiting[request.request_id] = reason
    if not books.running:
        if books.end_if_too_long(request):
            del step.waiting[request.request_id]
            return _Outcome.ENDED
        books.give_up_loaded(but=request)
    return _Outcome.STOP


def _start(books: Books, request: LiveRequest, computed: int, tokens: int, step: Step) -> None:
    """Put a request among the running ones, with its first tokens of this step."""
    request_id = request.request_id
    resumed = request.num_preemptions > 0  # its status says so no more if it loaded since
    request.num_computed_tokens = computed
    books.policy.scheduled(request, tokens)
    books.run(request, step)
    step.admitted[request_id] = request
    step.tokens[request_id] = tokens
    step.budget -= tokens
    step.waiting.pop(request_id, None)
    step.entries.append(
        NewRequest(
            source=request.source,
            output_token_ids=tuple(request.output_token_ids),
            block_ids=books.cache.block_ids(request),
            num_computed_tokens=computed,
            resumed=resumed,
        )
    )
