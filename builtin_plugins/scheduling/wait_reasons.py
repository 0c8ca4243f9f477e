"""Why a request waits, in words and numbers."""

from __future__ import annotations

from hardpoint.plugins import WaitingFor, WaitReason


def no_budget(needed: int, available: int) -> WaitReason:
    """The step's tokens are given away."""
    return WaitReason(
        WaitingFor.BUDGET,
        f"it needs {needed} tokens, the step has {available} left",
        needed,
        available,
    )


def no_slot(running: int) -> WaitReason:
    """As many run as may."""
    return WaitReason(WaitingFor.SLOT, f"{running} requests run, no more may", 1, 0)


def no_blocks(needed: int, available: int, reserved: int) -> WaitReason:
    """There are too few free blocks."""
    kept = f", of which {reserved} are kept for running requests" if reserved else ""
    return WaitReason(
        WaitingFor.BLOCKS,
        f"it needs up to {needed} KV blocks, {available} are free{kept}",
        needed,
        max(available - reserved, 0),
    )


def preempted(why: str) -> WaitReason:
    """It lost its blocks in this step."""
    return WaitReason(WaitingFor.BLOCKS, f"it was preempted: {why}")


def room_is_short(why: str) -> WaitReason:
    """Blocks are lacking for what runs, so nobody is admitted."""
    return WaitReason(
        WaitingFor.BLOCKS, f"nobody is admitted while what runs lacks KV blocks: {why}"
    )


def held_back(words: str) -> WaitReason:
    """The policy does not let it run."""
    return WaitReason(WaitingFor.POLICY, f"the scheduling policy holds it back: {words}")


def no_lora_slot(name: str, most: int) -> WaitReason:
    """Its adapter would be one too many."""
    return WaitReason(
        WaitingFor.LORA_SLOT,
        f"its adapter {name!r} is not active, and {most} are, no more may",
        1,
        0,
    )


def no_encoder(needed: int, available: int) -> WaitReason:
    """Its image or sound cannot be encoded in this step."""
    return WaitReason(
        WaitingFor.ENCODER,
        f"its next feature takes {needed} encoder tokens; the step has {available} left, or the "
        "encoder cache is full",
        needed,
        available,
    )


def waits_for_remote_kv(tokens: int | None) -> WaitReason:
    """A connector loads its blocks, or does not know yet whether it can."""
    if tokens is None:
        return WaitReason(
            WaitingFor.REMOTE_KV, "the KV connector does not know yet what it can load"
        )
    return WaitReason(WaitingFor.REMOTE_KV, f"the KV of {tokens} tokens is being loaded", tokens, 0)


def waits_for_grammar() -> WaitReason:
    """Its grammar is not ready."""
    return WaitReason(WaitingFor.GRAMMAR, "its grammar is being compiled")


def waits_for_results(planned: int) -> WaitReason:
    """It can compute nothing before the results of planned steps are in."""
    return WaitReason(
        WaitingFor.RESULTS, f"{planned} of its tokens are in steps whose results are not in"
    )


def behind(ahead: int) -> WaitReason:
    """Others stand before it."""
    return WaitReason(WaitingFor.BEHIND, f"{ahead} requests stand before it", ahead=ahead)


def paused() -> WaitReason:
    """The engine is paused."""
    return WaitReason(WaitingFor.PAUSED, "the engine is paused")


def not_seen() -> WaitReason:
    """No step was planned since it began to wait."""
    return WaitReason(WaitingFor.NEXT_STEP, "no step was planned since it began to wait")
