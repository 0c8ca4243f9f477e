"""Figures of requests and batches, gathered from the outputs of the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hardpoint.errors import PluginFaultError
from hardpoint.plugins import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    FinishReason,
    IterationStats,
    PrefixCacheStats,
    SchedulerStats,
)
from hardpoint.plugins.requests import RequestMetrics
from hardpoint.plugins.step_part import OutputObserver
from hardpoint.typed import read_only

from .sinks import Sinks

if TYPE_CHECKING:
    from hardpoint.plugins.requests.stats import PluginReport

_log = logging.getLogger("hardpoint")


class RequestFigures:
    """The figures of one live request so far.

    Attributes:
        arrived: seconds on the frontend's clock; all other times are on the engine's.
    """

    __slots__ = (
        "arrived",
        "ended",
        "first_token_at",
        "index",
        "is_pooled",
        "last_token_at",
        "num_cached_tokens",
        "num_external_tokens",
        "num_generation_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_resumes",
        "params",
        "queued_at",
        "request_id",
        "scheduled_at",
        "tags",
        "time_to_first_token",
        "trace_headers",
    )

    def __init__(self, request: EngineCoreRequest, arrived: float) -> None:
        self.request_id = request.external_req_id or request.request_id
        self.tags, self.params, self.index = request.tags, request.params, request.child_index
        self.trace_headers = request.trace_headers
        self.is_pooled = request.pooling_params is not None
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens = self.num_external_tokens = 0
        resumed = request.resumed
        self.num_generation_tokens = 0 if resumed is None else len(resumed.output_token_ids)
        self.num_preemptions = self.num_resumes = 0
        self.arrived = arrived
        self.queued_at: float | None = None
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.time_to_first_token: float | None = None
        self.ended = False

    def at_the_end(self, now: float) -> RequestMetrics:
        """Return the metrics of a request that ends; `now` is on the frontend's clock."""
        return RequestMetrics(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_external_tokens=self.num_external_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_preemptions=self.num_preemptions,
            num_resumes=self.num_resumes,
            queue_seconds=_between(self.queued_at, self.scheduled_at),
            prefill_seconds=_between(self.scheduled_at, self.first_token_at),
            decode_seconds=_between(self.first_token_at, self.last_token_at),
            time_to_first_token=self.time_to_first_token,
            e2e_seconds=now - self.arrived,
        )


class Statistics(OutputObserver):
    """Gathers figures while a batch of outputs is processed, and passes them to the sinks.

    For one thread at a time, except `close`. Requests that end between two batches are recorded
    with the next one, or with the next report.
    """

    def __init__(
        self,
        sinks: Sinks,
        clock: Callable[[], float],
        *,
        request_metrics: bool = False,
        interval_seconds: float = 10.0,
    ) -> None:
        """Gather nothing yet.

        Args:
            clock: seconds; gives requests their arrival times.
            request_metrics: whether outputs carry metrics when they finish.
            interval_seconds: from one report to the next.
        """
        self.interval_seconds = interval_seconds
        self._sinks, self._clock = sinks, clock
        self._request_metrics = request_metrics
        self._stats = IterationStats()
        self._now = self._engine_now = 0.0
        self._lock = threading.RLock()
        self._closed = False

    @property
    def has_exports(self) -> bool:
        """Whether there are sinks."""
        return bool(self._sinks)

    def add(self, request: EngineCoreRequest, arrived: float) -> RequestFigures:
        """Return the figures of a new request."""
        return RequestFigures(request, arrived)

    def begin(self, outputs: EngineCoreOutputs) -> None:
        """Start a batch of outputs."""
        self._now, self._engine_now = self._clock(), outputs.timestamp
        self._stats.engine_index = outputs.engine_index
        if outputs.scheduler_stats is not None:
            self._stats.scheduler = outputs.scheduler_stats

    def update(self, state: RequestFigures, output: EngineCoreOutput, num_tokens: int) -> None:
        """Record an output of the batch."""
        request = state
        request.num_resumes = output.num_resumes
        if output.events:
            self._take_events(request, output)
        if output.num_cached_tokens is not None:
            request.num_cached_tokens = output.num_cached_tokens
        if output.prefill_stats is not None:
            request.num_external_tokens = output.prefill_stats.num_external_tokens
        new = num_tokens - request.num_generation_tokens
        if new <= 0:
            if request.is_pooled and output.finish_reason is FinishReason.STOP:
                self._add_prompt(request)
            return
        stats, now = self._stats, self._engine_now
        if request.last_token_at is None:
            request.first_token_at = now
            request.time_to_first_token = self._now - request.arrived
            stats.time_to_first_token.append(request.time_to_first_token)
            self._add_prompt(request)
        else:
            stats.inter_token_latency.append(now - request.last_token_at)
        request.last_token_at = now
        request.num_generation_tokens = num_tokens
        stats.num_generation_tokens += new

    def _add_prompt(self, request: RequestFigures) -> None:
        stats = self._stats
        stats.num_prompt_tokens += request.num_prompt_tokens
        stats.num_cached_tokens += request.num_cached_tokens
        stats.num_external_tokens += request.num_external_tokens

    def end(self, state: RequestFigures, reason: FinishReason) -> RequestMetrics | None:
        """Record the end of a request, once; return its metrics if outputs carry them."""
        request = state
        if request.ended:
            return None
        request.ended = True
        metrics = request.at_the_end(self._clock())
        if self._sinks:
            self._stats.finished.append(
                FinishedRequest(
                    request_id=request.request_id,
                    finish_reason=str(reason),
                    tags=request.tags,
                    metrics=metrics,
                    index=request.index,
                    n=request.params.n,
                    max_tokens=request.params.max_tokens,
                    trace_headers=request.trace_headers,
                )
            )
        return metrics if self._request_metrics else None

    def engine_ended(self) -> None:
        """Record that the engine has ended: no request runs or waits there."""
        self._stats.scheduler = SchedulerStats(
            num_running=0, num_waiting=0, kv_cache_usage=0.0, prefix_cache=PrefixCacheStats()
        )

    def flush(self) -> None:
        """Pass the gathered figures to the sinks.

        Raises:
            PluginFaultError: a sink with fatal faults failed; all were called.
        """
        stats, self._stats = self._stats, IterationStats()
        self.record(stats)

    def record(self, stats: IterationStats) -> None:
        """Pass figures to the sinks.

        Raises:
            PluginFaultError: as `flush`.
        """
        with self._open() as is_open:
            if is_open and self._sinks:
                self._sinks.record(read_only(stats))

    def report(self) -> None:
        """Call `report` of every sink.

        Raises:
            PluginFaultError: as `flush`.
        """
        with self._open() as is_open:
            if not is_open or not self._sinks:
                return
            if self._stats.finished or self._stats.scheduler is not None:
                self.flush()
            self._sinks.report()

    def exposition(self, report: PluginReport) -> str:
        """Return the exports of the sinks, joined; nothing once they are closed.

        Raises:
            PluginFaultError: as `flush`.
        """
        with self._open() as is_open:
            texts = self._sinks.exposition(read_only(report)) if is_open else []
        return "".join(f"{text}\n" if text and text[-1] != "\n" else text for text in texts)

    def close(self) -> None:
        """Report a last time and close the sinks. In any thread, and twice does nothing.

        Raises:
            PluginFaultError: a sink with fatal faults could not close; all were closed.
        """
        with self._open() as is_open:
            if not is_open:
                return
            try:
                self.report()
            except PluginFaultError as fault:
                _log.warning("%s, while the engine is closed", fault)
            finally:
                self._closed = True
                self._sinks.close()

    @contextmanager
    def _open(self) -> Iterator[bool]:
        """Keep other threads from the sinks; yield whether they are open."""
        with self._lock:
            yield not self._closed

    def _take_events(self, request: RequestFigures, output: EngineCoreOutput) -> None:
        for event in output.events:
            if event.type is EngineCoreEventType.PREEMPTED:
                request.num_preemptions += 1
                self._stats.num_preemptions += 1
            elif event.type is EngineCoreEventType.SCHEDULED:
                if request.scheduled_at is None:
                    request.scheduled_at = event.timestamp
            elif request.queued_at is None:
                request.queued_at = event.timestamp


def _between(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else second - first
