"""Groups of requests: the tokens of a request and of its members, in the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from hardpoint.plugins import CachedPrefix, NewRequest, RequestError, WaitReason

from . import wait_reasons
from .live_request import SchedulerRequest
from .prompt_time import is_prompt
from .step import StepState
from .tracker import RequestTracker

if TYPE_CHECKING:
    from hardpoint.plugins.scheduling.scheduler import Gates


def check_group(tracker: RequestTracker, leader: SchedulerRequest) -> None:
    """Check that a request may run with its members.

    Raises:
        RequestError: it can never run, or uses what groups do not compose with.
    """
    size, limits = len(leader.group), tracker.limits
    for name, limit in (
        ("max_num_seqs", limits.max_num_seqs),
        ("max_num_batched_tokens", limits.max_num_batched_tokens),
    ):
        if size > limit:
            raise RequestError(
                f"members: expected at most {limit - 1}, because the request and its members run "
                f"in the same step (scheduler.{name}), got {size - 1}"
            )
    if (error := exceeds_steps(tracker, leader, [0] * size)) is not None:
        raise RequestError(error)
    needed = sum(tracker.blocks_needed(request.num_tokens + 1) for request in leader.group)
    if needed > (usable := tracker.cache.num_usable_blocks):
        raise RequestError(
            f"members: the request and its {size - 1} members need {needed} KV blocks, the cache "
            f"has {usable}"
        )
    if tracker.context.transfers is not None:
        raise RequestError(
            "members: expected none with a KV connector (kv_connector.use), which loads the blocks "
            f"of one request, got {size - 1}"
        )


def exceeds_steps(
    tracker: RequestTracker, leader: SchedulerRequest, starts: Sequence[int]
) -> str | None:
    """Return the error of a group that fits in no step without chunked prefill, or None."""
    limits = tracker.limits
    if limits.chunked_prefill:
        return None
    needed = sum(request.num_tokens - at for request, at in zip(leader.group, starts, strict=True))
    if needed <= limits.max_num_batched_tokens:
        return None
    return (
        f"members: the request and its {len(leader.members)} members need {needed} tokens in a "
        f"step, because scheduler.chunked_prefill is false; expected at most "
        f"{limits.max_num_batched_tokens} (scheduler.max_num_batched_tokens)"
    )


def num_tokens_of_group(
    tracker: RequestTracker, leader: SchedulerRequest, starts: Sequence[int], step: StepState
) -> list[int] | None:
    """Return how many tokens of each request of a group a step computes, from its start on.

    All known tokens of all of them, or a part that leaves at least one token of each for a later
    step. None if the step has none for them; its `waiting` then has the reason, or its `later` the
    group.
    """
    group, limits = leader.group, tracker.limits
    if step.later is not None and any(map(is_prompt, group)):
        step.later.append(leader)
        return None
    placeholders = leader.num_output_placeholders
    needs = [r.num_tokens + placeholders - at for r, at in zip(group, starts, strict=True)]
    needed = limit = sum(needs)
    ends_in_flight = leader.num_tokens + placeholders >= leader.max_total_tokens
    if needed <= 0 or (placeholders and ends_in_flight):
        step.waiting[leader.request_id] = wait_reasons.results(placeholders)
        return None
    if limits.long_prefill_token_threshold:
        limit = min(limit, max(limits.long_prefill_token_threshold, len(group)))
    limit = min(limit, step.budget)
    if step.prompt_time is not None:
        limit = step.prompt_time.num_tokens(leader, starts[0], limit)
        if not limit:
            step.waiting[leader.request_id] = wait_reasons.no_time()
            return None
    if limit >= needed:
        return needs
    tokens = []
    for need in needs if limits.chunked_prefill else ():
        tokens.append(min(need - 1, limit))
        limit -= tokens[-1]
    if not any(tokens):
        step.waiting[leader.request_id] = wait_reasons.no_budget(needed, step.budget)
        return None
    return tokens


def num_drafts_of_group(
    tracker: RequestTracker, leader: SchedulerRequest, tokens: Sequence[int], step: StepState
) -> int:
    """Return how many drafts of a request it and its members verify; none needs preemption."""
    group, limits = leader.group, tracker.limits
    if any(r.num_computed_tokens + n < r.num_tokens for r, n in zip(group, tokens, strict=True)):
        return 0
    room = min(max(limits.max_model_len - 1 - request.num_tokens, 0) for request in group)
    left = (step.budget - sum(tokens)) // len(group)
    num_drafts = max(min(len(leader.draft_token_ids), room, left), 0)
    new_blocks = 1 + (num_drafts + limits.num_lookahead_tokens) // tracker.cache.block_size
    needed = len(group) * len(tracker.cache.groups) * (1 + new_blocks)
    return num_drafts if needed <= tracker.cache.num_free_blocks else 0


def place(tracker: RequestTracker, request: SchedulerRequest, tokens: int, step: StepState) -> None:
    """Add tokens of a request of a group to the step; workers get it with its first ones."""
    tables = tracker.cache.block_ids(request)
    num_sent, request.num_sent_blocks = request.num_sent_blocks, len(tables[0])
    if num_sent:
        step.running[request.request_id] = request
        if num_sent < len(tables[0]):
            step.new_blocks[request.request_id] = [table[num_sent:] for table in tables]
    else:
        step.admitted[request.request_id] = request
        step.new_requests.append(
            NewRequest(
                source=request.source,
                output_token_ids=tuple(request.output_token_ids),
                block_ids=tables,
                num_computed_tokens=request.num_computed_tokens,
                resumed=request.num_preemptions > 0,
            )
        )
    step.assign(request, tokens)


def withdraw_group(tracker: RequestTracker, leader: SchedulerRequest, step: StepState) -> None:
    """Take the tokens of a group out of a step; its requests keep their blocks."""
    for request in leader.group:
        if request.request_id in step.tokens:
            tracker.uncache_from(request, request.num_computed_tokens)
            step.withdraw(request)


def admit_blocks(
    tracker: RequestTracker,
    leader: SchedulerRequest,
    prefixes: Sequence[CachedPrefix],
    tokens: Sequence[int],
    num_reserved: int,
) -> bool:
    """Allocate the first blocks of all requests of a group; return whether there were enough.

    Their `num_computed_tokens` are then those of their cached prefixes.
    """
    group, cache = leader.group, tracker.cache
    for request, prefix in zip(group, prefixes, strict=True):
        request.num_computed_tokens = prefix.num_tokens
    num_new = sum(map(partial(_num_new_blocks, tracker), group, tokens))
    before = cache.stats()
    # Every request holds its prefix before any of them gets a new block, which may evict others.
    if (
        num_new <= cache.num_free_blocks - num_reserved
        and all(
            cache.admit(request, prefix, 0, num_reserved_blocks=num_reserved)
            for request, prefix in zip(group, prefixes, strict=True)
        )
        and num_new <= cache.num_free_blocks - num_reserved
        and all(map(partial(_extend, tracker), group, tokens))
    ):
        return True
    for request in group:
        tracker.uncache_from(request, request.num_computed_tokens)
        cache.free(request)
        request.num_computed_tokens = 0
    tracker.discount(before)
    return False


def _extend(tracker: RequestTracker, request: SchedulerRequest, count: int) -> bool:
    lookahead = _num_lookahead(tracker, request, count)
    return not count or tracker.cache.extend(request, count, lookahead) is not None


def _num_lookahead(tracker: RequestTracker, request: SchedulerRequest, count: int) -> int:
    start = request.num_computed_tokens
    return tracker.num_lookahead(start + count) if start and count else 0


def _num_new_blocks(tracker: RequestTracker, request: SchedulerRequest, count: int) -> int:
    """Return how many blocks `_extend` allocates after a request's cached prefix."""
    cache, lookahead = tracker.cache, _num_lookahead(tracker, request, count)
    columns = -(-(count + lookahead) // cache.block_size)
    return sum(min(columns, 2) if group.has_states else columns for group in cache.groups)


def append_to_members(leader: SchedulerRequest, tokens: Sequence[int]) -> None:
    """Append new tokens of a request to its members."""
    num_computed = leader.num_computed_tokens - leader.num_prompt_tokens
    for member in leader.members:
        for token in tokens:
            member.append(token)
        member.num_computed_tokens = member.num_prompt_tokens + num_computed
        member.num_output_placeholders = leader.num_output_placeholders


def group_lacks(gates: Gates, leader: SchedulerRequest) -> WaitReason | None:
    """Return which resource of a step part has no room for all of a group; None if all have."""
    acquired: list[SchedulerRequest] = []
    try:
        for request in leader.group:
            if (lack := gates.lacks(request)) is not None:
                return lack
            gates.acquire(request)
            acquired.append(request)
    finally:
        for request in acquired:
            gates.release(request)
    return None
