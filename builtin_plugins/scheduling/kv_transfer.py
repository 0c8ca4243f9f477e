"""Keys and values that come from elsewhere: the scheduler's side of a KV connector."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import CachedPrefix, ModelRunnerOutput, RequestStatus

from . import reasons
from .live import LiveRequest
from .recovery import forget_doubtful
from .step import PlannedStep, Step
from .tracker import LOAD, SAVE, Books


def ask_connector(
    books: Books, request: LiveRequest, prefix: CachedPrefix
) -> tuple[int | None, bool]:
    """Return how many tokens beyond the local hit can be loaded, and whether beside the steps.

    None means that the connector does not know yet. At least one token is left to compute. Whoever
    wants log-probabilities of the prompt has to compute all of it.
    """
    connector = books.context.connector
    if connector is None or request.no_loading or request.params.prompt_logprobs is not None:
        return 0, False
    found, beside = connector.get_num_new_matched_tokens(request, prefix.num_tokens)
    if found is None:
        return None, False
    external = min(found, request.num_tokens - 1 - prefix.num_tokens)
    return (external, beside) if external > 0 else (0, False)


def begin_loading(
    books: Books, request: LiveRequest, prefix: CachedPrefix, external: int, step: Step
) -> bool:
    """Give a request the blocks that a connector will fill beside the steps.

    It takes no budget and no running slot. Nobody finds the blocks before they are filled.

    Returns:
        Whether there were enough blocks.
    """
    if not books.cache.admit(request, prefix, 0, num_external_tokens=external, delay_caching=True):
        return False
    connector = books.context.connector
    assert connector is not None
    connector.update_state_after_alloc(request, books.cache.block_ids(request), external)
    request.num_computed_tokens = prefix.num_tokens + external
    request.loading = external
    request.status = RequestStatus.WAITING_FOR_REMOTE_KV
    books.blocked[request.request_id] = request
    step.waiting[request.request_id] = reasons.waits_for_remote_kv(external)
    return True


def take_transfers(
    books: Books, result: ModelRunnerOutput, plans: Sequence[PlannedStep], now: float
) -> None:
    """Take what the connector's workers report: loads that failed or ended, saves that ended.

    Args:
        plans: the one of this result, and those made since.
    """
    if result.invalid_block_ids:
        forget_doubtful(books, plans)
        _recompute_invalid(books, result.invalid_block_ids, now)
    for request_id in sorted(result.kv_loaded):
        request = books.blocked.get(request_id)
        if request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            _take_loaded(books, request)
        else:
            _transfer_ended(books, request_id, LOAD)
    for request_id in sorted(result.kv_saved):
        _transfer_ended(books, request_id, SAVE)


def _take_loaded(books: Books, request: LiveRequest) -> None:
    """Let a request into the queue whose blocks are filled, as far as they could be."""
    books.cache.cache_arrived(request, request.num_computed_tokens)
    if request.no_loading:
        books.rewind(request)  # what is valid is found again when it is admitted
    else:
        books.loaded[request.request_id] = request
    books.wait(request)


def _transfer_ended(books: Books, request_id: str, what: str) -> None:
    """Free the blocks of an ended request when nothing is read from or written to them."""
    if request_id in books.lingering:
        request, going_on = books.lingering[request_id]
        going_on.discard(what)
        if not going_on:
            del books.lingering[request_id]
            books.cache.free(request)


def _recompute_invalid(books: Books, invalid: frozenset[int], now: float) -> None:
    """Take blocks from whoever holds one that could not be loaded; what is valid stays cached.

    Those requests compute themselves what they lack, without asking the connector again.
    """
    books.cache.discard(invalid)
    for request in list(books.requests.values()):
        tables = books.cache.block_ids(request)
        places = [i for table in tables for i, block in enumerate(table) if block in invalid]
        if not places:
            continue
        request.no_loading = True
        valid = min(places) * books.cache.block_size
        books.discard_from(request, valid)
        request.count_as_computed(valid)
        if request.status is RequestStatus.RUNNING:
            books.preempt(request, now)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            # The connector may still write to its blocks: they are freed when it says it is done.
            request.num_computed_tokens = valid
        else:
            books.rewind(request)
