"""Constructors of the reasons why a request waits."""

from __future__ import annotations

from hardpoint.plugins import WaitingFor, WaitReason


def no_budget(needed: int, available: int) -> WaitReason:
    """Return the reason: the step's token budget is used up."""
    return WaitReason(
        WaitingFor.BUDGET,
        f"it needs {needed} tokens, the step has {available} left",
        needed,
        available,
    )


def no_time() -> WaitReason:
    """Return the reason: the step has no time left for prompts."""
    return WaitReason(
        WaitingFor.BUDGET,
        "the requests that generate leave the step no time for further prompts "
        "(scheduler.step_milliseconds)",
    )


def no_slot(running: int, needed: int = 1, free: int = 0) -> WaitReason:
    """Return the reason: a request and its members are more than `max_num_seqs` leaves free."""
    limit = f"of {running + free} at most" if free else "the maximum"
    group = f"; it and its members are {needed}" if needed > 1 else ""
    message = f"{_requests(running)} running, {limit} (max_num_seqs){group}"
    return WaitReason(WaitingFor.SLOT, message, needed, free)


def next_batch(share: int) -> WaitReason:
    """Return the reason: the step has its share of the requests, where several are under way."""
    return WaitReason(
        WaitingFor.NEXT_STEP,
        f"the step has {_requests(share)}, its share where several steps are under way at once",
    )


def no_blocks(needed: int, available: int, reserved: int, states: int | None) -> WaitReason:
    """Return the reason: too few KV blocks are free.

    Args:
        needed: most that the request needs.
        available: free blocks.
        reserved: blocks that have to remain free.
        states: blocks free for states; None if the model has none.
    """
    suffix = f", {reserved} of them reserved for running requests" if reserved else ""
    return WaitReason(
        WaitingFor.BLOCKS,
        f"it needs up to {needed} KV blocks, {available} are free{of_states(states)}{suffix}",
        needed,
        max(available - reserved, 0),
    )


def of_states(states: int | None) -> str:
    """Return how many of the free blocks are for states, which may be lacking."""
    return "" if states is None else f" ({states} for states of layers)"


def preempted(cause: str) -> WaitReason:
    """Return the reason: the request was preempted in this step."""
    return WaitReason(WaitingFor.BLOCKS, f"it was preempted: {cause}")


def running_lack_blocks(cause: str) -> WaitReason:
    """Return the reason: running requests lack KV blocks, so no request is admitted."""
    return WaitReason(
        WaitingFor.BLOCKS,
        f"no request is admitted while running requests lack KV blocks: {cause}",
    )


def held_back(message: str) -> WaitReason:
    """Return the reason: the scheduling policy does not admit the request."""
    return WaitReason(WaitingFor.POLICY, f"the scheduling policy holds it back: {message}")


def no_encoder_budget(needed: int, available: int) -> WaitReason:
    """Return the reason: the request's next multimodal feature cannot be encoded in this step."""
    return WaitReason(
        WaitingFor.ENCODER,
        f"its next feature takes {needed} encoder tokens; the step has {available} left, or the "
        "encoder cache is full",
        needed,
        available,
    )


def remote_kv(num_tokens: int | None) -> WaitReason:
    """Return the reason: a connector loads the KV of some tokens, or must be asked again (None)."""
    if num_tokens is None:
        return WaitReason(WaitingFor.REMOTE_KV, "the KV connector has not answered the lookup yet")
    return WaitReason(
        WaitingFor.REMOTE_KV, f"the KV of {num_tokens} tokens is being loaded", num_tokens, 0
    )


def results(num_placeholders: int) -> WaitReason:
    """Return the reason: nothing can be computed before the results of earlier steps arrive."""
    are = "is" if num_placeholders == 1 else "are"
    return WaitReason(
        WaitingFor.RESULTS,
        f"{num_placeholders} of its tokens {are} in steps without results yet",
    )


def requests_ahead(count: int) -> WaitReason:
    """Return the reason: other waiting requests come first."""
    return WaitReason(WaitingFor.BEHIND, f"{_requests(count)} ahead of it", ahead=count)


def paused() -> WaitReason:
    """Return the reason: the engine is paused."""
    return WaitReason(WaitingFor.PAUSED, "the engine is paused")


def not_planned_yet() -> WaitReason:
    """Return the reason: no step was planned since the request began to wait."""
    return WaitReason(WaitingFor.NEXT_STEP, "no step was planned since it began to wait")


def _requests(count: int) -> str:
    return f"{count} {'request is' if count == 1 else 'requests are'}"
