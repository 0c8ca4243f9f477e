"""What a step decided, and why a request waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

__all__ = ["StepRecord", "WaitReason", "WaitingFor"]


class WaitingFor(Enum):
    """What a request lacks."""

    BEHIND = "behind"
    """Others stand before it in the queue."""
    BUDGET = "budget"
    """The step has no tokens left for it."""
    SLOT = "slot"
    """As many requests run as may."""
    BLOCKS = "blocks"
    """There are not enough free KV blocks."""
    POLICY = "policy"
    """The scheduling policy holds it back."""
    REMOTE_KV = "remote_kv"
    """Its keys and values are on their way."""
    GRAMMAR = "grammar"
    """Its grammar is being compiled."""
    LORA_SLOT = "lora_slot"
    """As many adapters are active as may."""
    ENCODER = "encoder"
    """The step's encoder budget or the encoder cache is full."""
    RESULTS = "results"
    """It runs, and everything it can compute is in steps whose results are not in."""
    NEXT_STEP = "next_step"
    """It came, or lost its blocks, after the last step was planned."""
    PAUSED = "paused"
    """The engine is paused."""


class WaitReason(msgspec.Struct, frozen=True):
    """Why a request got no tokens in a step.

    Attributes:
        message: the same in words, with the numbers.
        needed: how much of it the request needs: tokens, blocks, slots.
        available: how much there is.
        ahead: how many requests stand before it in the queue; None where that is not the reason.
    """

    waiting_for: WaitingFor
    message: str
    needed: int | None = None
    available: int | None = None
    ahead: int | None = None


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one step decided.

    Attributes:
        step: serial number of the plan.
        timestamp: seconds on the engine's clock, at the step's beginning.
        scheduled: tokens by request id.
        new: ids of requests that were admitted for the first time.
        resumed: ids of requests that came back after a preemption.
        preempted: ids of requests that lost their blocks, with the reason in words.
        finished: ids that the plan tells workers to forget.
        timed_out: ids whose deadline passed.
        waiting: requests that the step looked at and left, with their reasons. Whoever is not
            in it and waits is behind one of them.
        num_running, num_waiting: after the step was planned.
        num_free_blocks: KV blocks that nobody holds, after the step was planned.
        token_budget: tokens that the step could have given away.
    """

    step: int
    timestamp: float
    scheduled: Mapping[str, int]
    new: Sequence[str]
    resumed: Sequence[str]
    preempted: Mapping[str, str]
    finished: Sequence[str]
    timed_out: Sequence[str]
    waiting: Mapping[str, WaitReason]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    token_budget: int
    admission_stopped: WaitReason | None = None
