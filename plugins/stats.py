"""Statistics of an engine and of its requests, and the stat sinks that receive them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from .component import Component, Context

__all__ = [
    "FinishedRequest",
    "IterationStats",
    "PluginMeter",
    "PrefixCacheStats",
    "RequestMetrics",
    "SchedulerStats",
    "StatSink",
    "StatSinkContext",
    "StepFault",
]


class PrefixCacheStats(msgspec.Struct, array_like=True, gc=False):
    """What the prefix cache did since the start.

    Attributes:
        requests: lookups.
        queried_tokens: tokens of the requests that were looked up.
        hit_tokens: those of them that were there.
    """

    requests: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0


class SchedulerStats(msgspec.Struct, array_like=True, kw_only=True, gc=False):
    """How a scheduler stands now, with totals since the start.

    Attributes:
        num_waiting: requests that do not run, for whatever reason.
        kv_cache_usage: share of the blocks that requests hold, from 0 to 1.
        num_preemptions: so far.
        num_drafts, num_accepted_drafts: draft tokens verified and accepted so far.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache: PrefixCacheStats
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0


class RequestMetrics(msgspec.Struct, kw_only=True, frozen=True):
    """How one completion of a prompt went; durations are in seconds.

    Those in the engine are taken on its clock, the others on the frontend's. None is what it did
    not come to, as far as the frontend was told.

    Attributes:
        num_cached_tokens: prompt tokens that needed no computing.
        num_generation_tokens: output tokens, as the user has them.
        num_preemptions: how often it lost its blocks to others.
        queue_seconds: in the engine, from its coming to its first step.
        prefill_seconds: in the engine, from its first step to its first token.
        decode_seconds: in the engine, from its first token to its last.
        time_to_first_token: in the frontend, from the request's arrival.
        e2e_seconds: in the frontend, from the request's arrival to its end.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    time_to_first_token: float | None = None
    e2e_seconds: float | None = None


class FinishedRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A completion that ended.

    Attributes:
        request_id: the user's.
        finish_reason: "stop", "length", "abort", "error", "repetition" or "timeout".
        tags: the request's own.
    """

    request_id: str
    finish_reason: str
    tags: dict[str, str]
    metrics: RequestMetrics


class IterationStats(msgspec.Struct, kw_only=True):
    """What one batch of an engine's outputs brought. Each completion counts as a request.

    Attributes:
        engine_index: which engine it comes from.
        num_prompt_tokens: of prompts whose first token came.
        num_cached_tokens: those of them that needed no computing.
        num_generation_tokens: new output tokens, as users have them.
        num_preemptions: how often requests lost their blocks.
        time_to_first_token: seconds from arrival, of each request whose first token came; on the
            frontend's clock.
        inter_token_latency: seconds between two outputs of a request that brought tokens, usually
            one; on the engine's clock.
        finished: requests that ended, in this batch or without one since the last.
        scheduler: how the scheduler stood afterwards; None where the engine did not say.
    """

    engine_index: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    time_to_first_token: list[float] = []
    inter_token_latency: list[float] = []
    finished: list[FinishedRequest] = []
    scheduler: SchedulerStats | None = None


class PluginMeter(msgspec.Struct, array_like=True):
    """What a plugin cost so far, in one worker.

    Attributes:
        steps: steps in which it ran.
        rows: rows that it was given, all steps together.
        seconds: host time in its methods.
        faults: requests that ended because of it.
    """

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    faults: int = 0


class StepFault(msgspec.Struct, array_like=True, frozen=True):
    """Decisions that a plugin did not take, so that the built-in default did.

    Attributes:
        count: so far.
        message: the first one in words, beginning with who is to blame.
    """

    count: int
    message: str


@dataclass(frozen=True, kw_only=True)
class StatSinkContext(Context["StatSink"]):
    """What a stat sink is built with.

    Attributes:
        clock: seconds; the frontend's.
        model: as the configuration names it.
        engine_index: of the engine whose figures come, the first one of several.
    """

    clock: Callable[[], float]
    model: str
    engine_index: int = 0


class StatSink(Component):
    """Is told how the engine does: for a log, a dashboard, a bill. May not block.

    One call comes at a time, though not always in the same thread. A call that raises is counted
    in `LLM.health()`; requests and other sinks do not notice. `close` comes last.
    """

    context: StatSinkContext

    @abstractmethod
    def record(self, stats: IterationStats) -> None:
        """Take what a batch of outputs brought; for reading, since all sinks get the same."""

    def report(self) -> None:
        """Show what was gathered; called about every `stats.interval_seconds`, and at the end.

        `AsyncLLM` calls it also while nothing happens, `LLM` and `LLMEngine` only where they step.
        """
