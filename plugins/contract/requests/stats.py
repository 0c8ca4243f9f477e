"""Statistics of an engine and of its requests."""

from __future__ import annotations

import time
from enum import IntEnum

import msgspec

__all__ = [
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineReport",
    "FinishedRequest",
    "IterationStats",
    "KVTierStats",
    "PrefillStats",
    "PrefixCacheStats",
    "RequestMetrics",
    "SchedulerStats",
]


class PrefixCacheStats(msgspec.Struct, gc=False):
    """Prefix cache totals since the start.

    Attributes:
        requests: number of lookups.
        queried_tokens: tokens of the requests looked up.
        hit_tokens: cached tokens among them.
    """

    requests: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0


class KVTierStats(msgspec.Struct, kw_only=True, gc=False):
    """Totals of one tier of a KV connector since the start, all ranks together.

    Attributes:
        hits, misses: blocks that were asked for, and were there or not.
        loaded_blocks, loaded_bytes, load_seconds: loads, and their time, summed
            over threads.
        stored_blocks, stored_bytes, store_seconds: the same for stores.
        dropped_blocks: blocks that were not stored, for lack of room or time.
        failures: calls that raised, took too long, or gave damaged or foreign bytes.
        used_bytes: bytes that it keeps; None if the tier does not report it.
    """

    hits: int = 0
    misses: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored_blocks: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    dropped_blocks: int = 0
    failures: int = 0
    used_bytes: int | None = None


class EngineCoreEventType(IntEnum):
    """Type of a request's event in the scheduler."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, frozen=True, gc=False):
    """An event of a request.

    Attributes:
        timestamp: seconds on the engine's clock, by default now; comparable within one engine
            only.
    """

    type: EngineCoreEventType
    timestamp: float = msgspec.field(default_factory=time.monotonic)


class PrefillStats(msgspec.Struct, omit_defaults=True, frozen=True, gc=False):
    """How a prompt was computed.

    Attributes:
        num_prompt_tokens: its length.
        num_cached_tokens: tokens that were not computed.
        num_external_tokens: cached tokens that a KV connector loaded.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_external_tokens: int = 0


class SchedulerStats(msgspec.Struct, kw_only=True, gc=False):
    """State of a scheduler, with totals since the start.

    Attributes:
        num_waiting: requests that do not run, for any reason.
        num_deferred: waiting requests that could not be admitted even if there were room: they wait
            for a grammar, or for KV blocks from another place.
        kv_cache_usage: share of the blocks that requests reference, from 0 to 1.
        num_preemptions: total.
        num_drafts, num_accepted_drafts: total of draft tokens verified and accepted.
        num_accepted_by_position: the same of accepted ones, by position in their draft.
        num_verified_drafts: total of drafts; each has the draft tokens of a request in one step.
        external_prefix_cache: tokens queried from the KV connector, after the cached ones
            of the KV cache, and the tokens that it could load; None without a connector.
        kv_tiers: totals of the KV connector by tier, nearest first.
        step_cost_error: moving mean of the relative error with which the time of a step is
            predicted, 0.1 is 10 %; None if it is not (`scheduler.step_milliseconds`).
        num_waits_for_results: steps that were not planned, or sampled, before the results of the
            step before were in, by name of the step part that needs these.
        num_without_overlap: number of engines whose steps do not overlap although
            `scheduler.asynchronous` is "auto", by the cause.
        num_requests_by_adapter: requests that run with each loaded adapter, by its name.
        num_waiting_by_adapter: requests that wait, by the name of their adapter.
        num_adapter_slots: adapters that can run at once (`adapters.max_loras`).
        weight_version: version of the weights, once they have one; see `update_weights`.
        num_retained_blocks: cached blocks that requests wish to be kept (`retain_seconds`).
        num_retained_hits: how often requests found such a block that no other used.
        num_retained_evictions: such blocks that were evicted before their time.
        engines: state and totals of each of several engines, by its index, including engines that
            ended; all else are sums, and means of shares.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache: PrefixCacheStats
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    num_deferred: int = 0
    num_verified_drafts: int = 0
    num_accepted_by_position: list[int] = []
    external_prefix_cache: PrefixCacheStats | None = None
    kv_tiers: dict[str, KVTierStats] = {}
    step_cost_error: float | None = None
    num_waits_for_results: dict[str, int] = {}
    num_without_overlap: dict[str, int] = {}
    num_requests_by_adapter: dict[str, int] = {}
    num_waiting_by_adapter: dict[str, int] = {}
    num_adapter_slots: int = 0
    weight_version: str | None = None
    num_retained_blocks: int = 0
    num_retained_hits: int = 0
    num_retained_evictions: int = 0
    engines: dict[int, SchedulerStats] = {}


class RequestMetrics(msgspec.Struct, kw_only=True, frozen=True):
    """Metrics of one completion of a prompt; durations are in seconds.

    Durations in the engine are measured on its clock, the others on the frontend's. None stands for
    a stage that the completion did not reach.

    Attributes:
        num_cached_tokens: prompt tokens that were not computed.
        num_external_tokens: cached tokens that a KV connector loaded.
        num_generation_tokens: output tokens that the user gets.
        num_preemptions: number of preemptions.
        num_resumes: how often it went on at another engine.
        queue_seconds: in the engine, from arrival to first step.
        prefill_seconds: in the engine, from first step to first token.
        decode_seconds: in the engine, from first token to last token.
        time_to_first_token: in the frontend, from arrival to first token.
        e2e_seconds: in the frontend, from arrival to end.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_resumes: int = 0
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
        index: which of the `n` completions of its prompt it is.
        n, max_tokens: parameters of the request.
        trace_headers: headers of the trace that it belongs to, as it came; None if it has none.
    """

    request_id: str
    finish_reason: str
    tags: dict[str, str]
    metrics: RequestMetrics
    index: int = 0
    n: int = 1
    max_tokens: int | None = None
    trace_headers: dict[str, str] | None = None


class IterationStats(msgspec.Struct, kw_only=True):
    """Statistics of one batch of engine outputs. Each completion counts as a request.

    Attributes:
        engine_index: index of the engine; of a merged batch of several engines, which a slow
            frontend gets, the index of the last one.
        num_prompt_tokens: number of tokens of prompts with a first output token in this step.
        num_cached_tokens: prompt tokens that were not computed.
        num_external_tokens: cached tokens that a KV connector loaded.
        num_generation_tokens: new output tokens that users get.
        num_preemptions: number of preemptions.
        time_to_first_token: seconds from arrival to first token, of each request that got its first
            token; on the frontend's clock.
        inter_token_latency: seconds between two outputs of a request with tokens, usually one
            token each; on the engine's clock.
        finished: requests that ended since the last batch.
        scheduler: state of the scheduler after the step; None if the engine did not send it.
    """

    engine_index: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    time_to_first_token: list[float] = []
    inter_token_latency: list[float] = []
    finished: list[FinishedRequest] = []
    scheduler: SchedulerStats | None = None


class PluginMeter(msgspec.Struct):
    """Costs of a plugin in one worker since the start.

    Attributes:
        steps: number of steps in which it ran.
        rows: number of rows that it processed, all steps together.
        seconds: host time in its methods.
        faults: number of requests that ended because of it.
        slow_steps: number of steps in which its methods took longer than `plugins.slow_seconds`.
        slowest_step: the longest such time, in seconds.
    """

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    faults: int = 0
    slow_steps: int = 0
    slowest_step: float = 0.0


class StepFault(msgspec.Struct, frozen=True):
    """Faults of a plugin's decisions, which the built-in default made instead.

    Attributes:
        count: total since the start.
        message: message of the first fault, beginning with the responsible plugin.
    """

    count: int
    message: str


class Health(msgspec.Struct, frozen=True):
    """The health of an engine and its plugins.

    Attributes:
        faults: by plugin name, how many distinct requests it ended.
        quarantined: by plugin name, its first fault, or that it ran when the engine died; requests
            that use it are rejected, and a built-in default takes the place of a policy.
        fallbacks: by plugin name, the decisions that the built-in default took instead, and the
            failed calls that had no effect.
        slow: by plugin name, the steps for which it took longer than `plugins.slow_seconds`.
        restarts: how often a dead engine was restarted.
    """

    faults: dict[str, int]
    quarantined: dict[str, str]
    fallbacks: dict[str, StepFault] = {}
    slow: dict[str, StepFault] = {}
    restarts: int = 0

    @property
    def ok(self) -> bool:
        """True if no plugin is quarantined."""
        return not self.quarantined


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one of several engines, since the program's start.

    Attributes:
        restarts: how often it was restarted.
        num_resumes: requests that went on there, after they had left another engine.
        sleep_level: as in `PluginReport`; None while it does not answer.
    """

    restarts: int = 0
    num_resumes: int = 0
    sleep_level: int | None = None


class PluginReport(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's report of its plugins and itself, made when its metrics are asked for.

    If it cannot answer, this is its last answer.

    Attributes:
        meters: by plugin name, costs of the logits processors since the engine's start.
        health: health of the engine and all its plugins.
        scheduler: state of the scheduler now; None if the engine did not answer, and the last
            recorded state holds.
        sleep_level: 0 is awake, 1 and 2 as for `sleep`.
        num_blocks: size of the KV cache; None if it is unknown.
        engines: by index, each engine of several (`parallel.data`), including engines that ended;
            an engine that may be restarted is one of several.
    """

    meters: dict[str, PluginMeter] = {}
    health: Health = Health({}, {})
    scheduler: SchedulerStats | None = None
    sleep_level: int = 0
    num_blocks: int | None = None
    engines: dict[int, EngineReport] = {}
