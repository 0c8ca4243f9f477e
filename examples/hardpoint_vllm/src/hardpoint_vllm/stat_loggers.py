"""vLLM's stat loggers as stat sinks."""

from __future__ import annotations

import inspect
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, ClassVar

from hardpoint.errors import PluginContractError
from hardpoint.plugins import StatSink, StatSinkContext
from hardpoint.plugins.component import AdaptedComponent, Source
from hardpoint.plugins.requests.stats import (
    FinishedRequest,
    IterationStats,
    PrefixCacheStats,
    SchedulerStats,
)

from .objects import NamedFields
from .origin import vllm_base

BASES = ("StatLoggerBase", "AggregateStatLoggerBase")


class FinishReason(IntEnum):
    """vLLM's reasons for the end of a request."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


_REASONS = {reason.name.lower(): reason for reason in FinishReason} | {
    "timeout": FinishReason.ABORT,
    "tool_calls": FinishReason.STOP,
}


class StatLoggerBase(ABC):
    """vLLM's base class of stat loggers."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """Build the logger of an engine."""

    @abstractmethod
    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Record the statistics of a step."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """Log that the engine has started."""

    def log(self) -> None:  # noqa: B027 - as vLLM's
        """Log the statistics since the last call."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:  # noqa: B027 - as vLLM's
        """Record that the engine sleeps, or is awake again."""


class AggregateStatLoggerBase(StatLoggerBase):
    """vLLM's base class of stat loggers of several engines."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        """Build the logger of all engines."""


def is_logger(target: Any) -> bool:
    """Return whether a class derives from vLLM's base class of stat loggers."""
    return bool(vllm_base(target, BASES))


def adapt_logger(target: type, source: Source) -> type[AdaptedStatLogger]:
    """Return the component of a class for which `is_logger` is true.

    Raises:
        PluginContractError: the class lacks a method.
    """
    if unfinished := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginContractError(f"{source}: it lacks {', '.join(unfinished)}")
    attributes = {"contract": 1, "target": target, "__doc__": inspect.getdoc(target)}
    return type(target.__name__, (AdaptedStatLogger,), {**attributes, "__module__": __name__})


class AdaptedStatLogger(AdaptedComponent, StatSink):
    """Runs a stat logger of vLLM, one for each engine; an aggregating logger runs once."""

    contract = 1
    adapter = "vLLM stat logger"
    target: ClassVar[Any]

    def __init__(self, context: StatSinkContext) -> None:
        """Build the logger of the first engine, so that a class that fails stops the start."""
        super().__init__(context)
        self._loggers: dict[int, Any] = {}
        self._before: dict[int, _Totals] = {}
        record = inspect.signature(self.target.record).parameters
        self._options = [name for name in ("mm_cache_stats", "engine_idx") if name in record]
        self._is_aggregate = "engine_indexes" in inspect.signature(self.target).parameters
        self._logger(context.engine_index)

    def record(self, stats: IterationStats) -> None:
        """Pass the statistics of a batch to the logger of its engine."""
        index = stats.engine_index
        totals = self._before.setdefault(index, _Totals())
        state = stats.scheduler
        scheduler = None if state is None else totals.scheduler(state.engines.get(index, state))
        options = {"mm_cache_stats": None, "engine_idx": index}
        self._logger(index).record(
            scheduler, _iteration(stats), **{name: options[name] for name in self._options}
        )

    def report(self) -> None:
        """Let the loggers log."""
        for logger in self._loggers.values():
            logger.log()

    def _logger(self, index: int) -> Any:
        if self._is_aggregate and self._loggers:
            return next(iter(self._loggers.values()))
        if index not in self._loggers:
            engines: Any = [index] if self._is_aggregate else index
            logger = self.target(_config(self.context), engines)
            logger.log_engine_initialized()
            self._loggers[index] = logger
        return self._loggers[index]


class _Totals:
    """Totals of an engine at the last batch, because vLLM's statistics count since then."""

    def __init__(self) -> None:
        self._cache, self._external = PrefixCacheStats(), PrefixCacheStats()
        self._drafts, self._accepted, self._verified = 0, 0, 0
        self._positions: list[int] = []

    def scheduler(self, stats: SchedulerStats) -> NamedFields:
        """Return vLLM's SchedulerStats."""
        cache, self._cache = _since(self._cache, stats.prefix_cache), stats.prefix_cache
        external = None
        if stats.external_prefix_cache is not None:
            external = _since(self._external, stats.external_prefix_cache)
            self._external = stats.external_prefix_cache
        return NamedFields(
            "SchedulerStats",
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_skipped_waiting_reqs=stats.num_deferred,
            kv_cache_usage=stats.kv_cache_usage,
            prefix_cache_stats=cache,
            connector_prefix_cache_stats=external,
            spec_decoding_stats=self._speculation(stats),
            running_lora_adapters=dict(stats.num_requests_by_adapter),
            waiting_lora_adapters=dict(stats.num_waiting_by_adapter),
        )

    def _speculation(self, stats: SchedulerStats) -> NamedFields | None:
        drafts, accepted = stats.num_drafts, stats.num_accepted_drafts
        verified, positions = stats.num_verified_drafts, list(stats.num_accepted_by_position)
        if not verified:
            return None
        before = self._positions + [0] * (len(positions) - len(self._positions))
        result = NamedFields(
            "SpecDecodingStats",
            num_spec_tokens=len(positions),
            num_drafts=verified - self._verified,
            num_draft_tokens=drafts - self._drafts,
            num_accepted_tokens=accepted - self._accepted,
            num_accepted_tokens_per_pos=[
                now - past for now, past in zip(positions, before, strict=False)
            ],
        )
        self._drafts, self._accepted = drafts, accepted
        self._verified, self._positions = verified, positions
        return result


def _since(before: PrefixCacheStats, now: PrefixCacheStats) -> NamedFields:
    return NamedFields(
        "PrefixCacheStats",
        reset=False,
        requests=now.requests - before.requests,
        queries=now.queried_tokens - before.queried_tokens,
        hits=now.hit_tokens - before.hit_tokens,
    )


def _iteration(stats: IterationStats) -> NamedFields:
    """Return vLLM's IterationStats."""
    return NamedFields(
        "IterationStats",
        iteration_timestamp=time.time(),
        num_generation_tokens=stats.num_generation_tokens,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_preempted_reqs=stats.num_preemptions,
        finished_requests=[_finished(request) for request in stats.finished],
        max_num_generation_tokens_iter=[
            request.metrics.num_generation_tokens for request in stats.finished
        ],
        n_params_iter=[request.n for request in stats.finished],
        time_to_first_tokens_iter=list(stats.time_to_first_token),
        inter_token_latencies_iter=list(stats.inter_token_latency),
    )


def _finished(request: FinishedRequest) -> NamedFields:
    """Return vLLM's FinishedRequestStats; durations of stages that were not reached are 0."""
    metrics = request.metrics
    prefill, decode = metrics.prefill_seconds or 0.0, metrics.decode_seconds or 0.0
    between = metrics.num_generation_tokens - 1
    return NamedFields(
        "FinishedRequestStats",
        finish_reason=_finish_reason(request.finish_reason),
        request_id=request.request_id,
        e2e_latency=metrics.e2e_seconds or 0.0,
        num_prompt_tokens=metrics.num_prompt_tokens,
        num_generation_tokens=metrics.num_generation_tokens,
        max_tokens_param=request.max_tokens,
        queued_time=metrics.queue_seconds or 0.0,
        prefill_time=prefill,
        inference_time=prefill + decode,
        decode_time=decode,
        mean_time_per_output_token=decode / between if between > 0 else 0.0,
        num_cached_tokens=metrics.num_cached_tokens,
    )


def _finish_reason(name: str) -> Any:
    """Return a reason; of vLLM's own enumeration if vLLM is installed and imported."""
    reason = _REASONS.get(name, FinishReason.STOP)
    installed = sys.modules.get("vllm.v1.engine")
    return reason if installed is None else installed.FinishReason[reason.name]


def _config(context: StatSinkContext) -> NamedFields:
    model = NamedFields(
        "model_config",
        model=context.model,
        served_model_name=context.model_name or context.model,
    )
    cache = NamedFields(
        "cache_config",
        block_size=context.block_size,
        enable_prefix_caching=context.prefix_caching,
    )
    return NamedFields("vllm_config", model_config=model, cache_config=cache)


_LOGGERS = {
    "StatLoggerBase": StatLoggerBase,
    "AggregateStatLoggerBase": AggregateStatLoggerBase,
    "StatLoggerFactory": Callable[[Any, int], StatLoggerBase],
}
_STATS: dict[str, Any] = dict.fromkeys(
    (
        "SchedulerStats",
        "IterationStats",
        "FinishedRequestStats",
        "PrefixCacheStats",
        "MultiModalCacheStats",
    ),
    NamedFields,
)
MODULES: Mapping[str, Mapping[str, Any]] = {
    "vllm.v1.engine": {"FinishReason": FinishReason},
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.loggers": _LOGGERS,
    "vllm.v1.metrics.stats": _STATS,
}
"""Names by module, where vLLM is not installed."""
