"""Statistics of the requests of a frontend, and the sinks that get them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.faults import Fanout, StepFaults, create_all
from hardpoint.host.live.sinks import KIND, SinkChanges
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    IterationStats,
    PluginReport,
    PrefixCacheStats,
    SchedulerStats,
    StatSink,
    StatSinkContext,
)
from hardpoint.plugins.requests.stats import FinishedRequest, RequestMetrics, StepFault
from hardpoint.typed import read_only

_log = logging.getLogger("hardpoint")

_Clock = Callable[[], float]


def open_statistics(config: EngineConfig, plugins: PluginSet, clock: _Clock) -> Statistics | None:
    """Build the sinks and the statistics that feed them; None if they are off.

    Args:
        clock: seconds; gives requests their arrival times.

    Raises:
        PluginError: a sink could not be built.
    """
    if not config.stats.on:
        return None
    faults = StepFaults.under(config.plugins)
    fields = {
        "clock": clock,
        "model": config.model,
        "model_name": config.metrics.model_name,
        "aliases": tuple(config.metrics.aliases),
        "block_size": config.kv_cache.block_size,
        "prefix_caching": config.kv_cache.prefix_caching,
    }
    sinks: Fanout[StatSink] = Fanout(create_all(plugins, KIND, faults, StatSinkContext, **fields))
    statistics = Statistics(
        sinks,
        faults,
        clock,
        request_metrics=config.stats.request_metrics,
        interval_seconds=config.stats.interval_seconds,
    )
    statistics.changes = SinkChanges(plugins, sinks, faults, fields)
    return statistics


class RequestFigures:
    """The figures of one live request so far.

    Attributes:
        arrived: seconds on the frontend's clock; all other times are on the engine's.
        metrics: carried by its last output.
    """

    __slots__ = (
        "arrived",
        "ended",
        "first_token_at",
        "index",
        "last_token_at",
        "metrics",
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
        self.metrics: RequestMetrics | None = None

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


class Statistics:
    """Gathers figures while a batch of outputs is processed, and passes them to the sinks.

    For one thread at a time, except `close`. Requests that end between two batches are recorded
    with the next one, or with the next report. Collecting this object closes its sinks.

    Attributes:
        sinks: what it reports to.
        changes: replaces the sinks; None where another process has them.
    """

    changes: SinkChanges | None = None

    def __init__(
        self,
        sinks: Fanout[StatSink],
        faults: StepFaults,
        clock: _Clock,
        *,
        request_metrics: bool = False,
        interval_seconds: float = 10.0,
    ) -> None:
        """Begin the first interval.

        Args:
            sinks: `faults` counts their faults.
            clock: seconds; gives requests their arrival times.
            request_metrics: whether outputs carry metrics when they finish.
            interval_seconds: from one report to the next.
        """
        self.interval_seconds = interval_seconds
        self.sinks, self._faults, self._clock = sinks, faults, clock
        self._request_metrics = request_metrics
        self._stats = IterationStats()
        self._last_report = PluginReport()
        self._now = self._engine_now = 0.0
        self._reported_at = clock()
        self._lock = threading.RLock()
        self._closed = False
        self._release = weakref.finalize(self, sinks.close)

    @property
    def has_sinks(self) -> bool:
        """Whether there are any."""
        return bool(self.sinks)

    def faults(self) -> dict[str, StepFault]:
        """Return the failed calls of sinks, by name."""
        return self._faults.report()

    def slow(self) -> dict[str, StepFault]:
        """Return the calls of sinks that took too long, by name."""
        return self._faults.slow()

    def begin(self, outputs: EngineCoreOutputs) -> None:
        """Start a batch of outputs."""
        self._now, self._engine_now = self._clock(), outputs.timestamp
        self._stats.engine_index = outputs.engine_index
        if outputs.scheduler_stats is not None:
            self._stats.scheduler = outputs.scheduler_stats

    def record_output(
        self, request: RequestFigures, output: EngineCoreOutput, num_tokens: int
    ) -> None:
        """Record an output of the batch; `num_tokens` is the request's number of tokens now."""
        request.num_resumes = output.num_resumes
        if output.events:
            self._take_events(request, output)
        if output.num_cached_tokens is not None:
            request.num_cached_tokens = output.num_cached_tokens
        if output.prefill_stats is not None:
            request.num_external_tokens = output.prefill_stats.num_external_tokens
        new = num_tokens - request.num_generation_tokens
        if new <= 0:
            return
        stats, now = self._stats, self._engine_now
        if request.last_token_at is None:
            request.first_token_at = now
            request.time_to_first_token = self._now - request.arrived
            stats.time_to_first_token.append(request.time_to_first_token)
            stats.num_prompt_tokens += request.num_prompt_tokens
            stats.num_cached_tokens += request.num_cached_tokens
            stats.num_external_tokens += request.num_external_tokens
        else:
            stats.inter_token_latency.append(now - request.last_token_at)
        request.last_token_at = now
        request.num_generation_tokens = num_tokens
        stats.num_generation_tokens += new

    def ended(self, request: RequestFigures, reason: FinishReason) -> None:
        """Record the end of a request, within a batch or between two."""
        if request.ended:
            return
        request.ended = True
        metrics = request.at_the_end(self._clock())
        if self._request_metrics:
            request.metrics = metrics
        if self.has_sinks:
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

    def engine_ended(self) -> None:
        """Record that the engine has ended: no request runs or waits there."""
        self._stats.scheduler = SchedulerStats(
            num_running=0, num_waiting=0, kv_cache_usage=0.0, prefix_cache=PrefixCacheStats()
        )

    def record(self, stats: IterationStats | None = None) -> None:
        """Pass the gathered figures to the sinks, or those that another frontend has gathered.

        Raises:
            PluginFaultError: a sink whose faults end the engine failed; all were called.
        """
        if stats is None:
            stats, self._stats = self._stats, IterationStats()
        if self.has_sinks:
            self._call_sinks("record", read_only(stats))

    def report(self) -> None:
        """Call `report` of every sink.

        Raises:
            PluginFaultError: a sink whose faults end the engine failed; all were called.
        """
        if self.has_sinks:
            self._reported_at = self._clock()
            if self._stats.finished or self._stats.scheduler is not None:
                self.record()
            self._call_sinks("report")

    def report_if_due(self) -> None:
        """Report if the interval has passed.

        Raises:
            PluginFaultError: as `report`.
        """
        if self.has_sinks and self._clock() - self._reported_at >= self.interval_seconds:
            self.report()

    def last_report(self, answer: PluginReport | None) -> PluginReport:
        """Return the engine's answer; None is the last one, without the state of the scheduler."""
        if answer is not None:
            self._last_report = msgspec.structs.replace(answer, scheduler=None)
        return self._last_report if answer is None else answer

    def exposition(self, report: PluginReport) -> str:
        """Return the exports of the sinks, joined; nothing once they are closed.

        Raises:
            PluginFaultError: a sink whose faults end the engine failed; all were called.
        """
        texts = self._call_sinks("exposition", read_only(report))
        return "".join(f"{text}\n" if text and text[-1] != "\n" else text for text in texts)

    def close(self, live: Iterable[RequestFigures] = ()) -> None:
        """Report a last time and close the sinks. In any thread, and twice does nothing.

        Args:
            live: requests that end with the engine.

        Raises:
            PluginFaultError: a sink whose faults end the engine could not close; all were closed.
        """
        with self._lock:
            if self._closed:
                return
            for request in live:
                self.ended(request, FinishReason.ABORT)
            try:
                self.report()
            except PluginFaultError as fault:
                _log.warning("%s, while the engine is closed", fault)
            finally:
                self._closed = True
                self._release()

    def _call_sinks(self, method: str, *arguments: Any) -> list[Any]:
        with self._lock:
            if self._closed:
                return []
            results = self.sinks.call(method, *arguments)
            self._faults.check_slow()
            return results

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
