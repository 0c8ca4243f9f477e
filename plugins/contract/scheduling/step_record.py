"""The record of a step's decisions, and the reasons why requests wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

__all__ = ["StepRecord", "WaitReason", "WaitingFor"]


class WaitingFor(Enum):
    """The things that a request may wait for."""

    BEHIND = "behind"
    """Requests before it in the queue."""
    BUDGET = "budget"
    """Token budget: the step has no tokens left."""
    SLOT = "slot"
    """A slot: the maximum number of requests runs."""
    BLOCKS = "blocks"
    """Free KV blocks."""
    POLICY = "policy"
    """The scheduling policy, which holds it back."""
    REMOTE_KV = "remote_kv"
    """Keys and values that a KV connector is loading."""
    GRAMMAR = "grammar"
    """The compilation of its grammar."""
    PART = "part"
    """A step part: its gate, or room in one of its resources."""
    ENCODER = "encoder"
    """Room in the step's encoder budget or in the encoder cache."""
    RESULTS = "results"
    """Results of earlier steps: it runs, and all its known tokens are scheduled."""
    NEXT_STEP = "next_step"
    """The next step: it arrived, or was preempted, after the last step was planned."""
    PAUSED = "paused"
    """The end of a pause."""


class WaitReason(msgspec.Struct, frozen=True):
    """Why a request got no tokens in a step.

    Attributes:
        message: the reason as text, with the numbers.
        needed: amount that the request needs: tokens, blocks, slots.
        available: amount that is available.
        ahead: number of requests before it in the queue; None if that is not the reason.
    """

    waiting_for: WaitingFor
    message: str
    needed: int | None = None
    available: int | None = None
    ahead: int | None = None


class LiveRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One completion that has not ended, as the engine sees it.

    Attributes:
        request_id: the internal id.
        external_id: the user's.
        index: among the `n` completions.
        status: status in the scheduler, such as "running" or "waiting".
        num_computed_tokens: computed tokens of prompt and output.
        num_cached_tokens: tokens of the prompt that needed no computing; 0 until it is known.
        age_seconds: since it arrived in the engine.
        waits_for: why it got no tokens in the last step; None if it got some.
    """

    request_id: str
    external_id: str
    index: int
    status: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    priority: int
    age_seconds: float
    tags: dict[str, str] = {}
    waits_for: WaitReason | None = None
    num_cached_tokens: int = 0


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of one step.

    Attributes:
        step: serial number of the plan.
        timestamp: seconds on the engine's clock, at the start of the step.
        scheduled: tokens by request id.
        new: ids of requests that were admitted for the first time.
        resumed: ids of requests that were admitted again after a preemption.
        preempted: ids of requests that were preempted, with the reason.
        finished: ids that the plan reports to workers as finished.
        timed_out: ids of requests past their deadline.
        waiting: requests that the step considered and gave no tokens, with their reasons. Other
            waiting requests are behind one of them.
        num_running, num_waiting: after planning.
        num_free_blocks: KV blocks that no request references, after planning.
        token_budget: tokens that the step could assign.
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
