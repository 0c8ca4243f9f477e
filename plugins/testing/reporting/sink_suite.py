"""The conformance suite for stat sinks; the built-in one passes it too."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from hardpoint.plugins import (
    IterationStats,
    PluginReport,
    PrefixCacheStats,
    SchedulerStats,
    StatSink,
    StatSinkContext,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.requests.stats import (
    FinishedRequest,
    Health,
    KVTierStats,
    PluginMeter,
    RequestMetrics,
    StepFault,
)
from hardpoint.testing.component_suite import GeneralComponentSuite, LiveComponentSuite
from hardpoint.testing.declared import declared_result
from hardpoint.testing.scripted import ScriptedClock
from hardpoint.testing.suite import Rule, checks
from hardpoint.testing.threads import in_thread
from hardpoint.typed import read_only

from .calls import (
    CLOSE,
    MEMORY,
    READS_ONLY,
    call,
    check_growth,
    longest_call,
    releasing_all,
    too_slow,
)

STATISTICS = Rule(
    "statistics: every batch is taken, empty ones too, and a report at any time",
    "handle a batch without tokens, without scheduler and without finished requests, a report "
    "without a batch, and two reports at the same time",
)
THREADS = Rule(
    "threads: calls may come from different threads, one after the other",
    "use nothing that belongs to one thread, or open it with that check off (for sqlite3: "
    "check_same_thread=False)",
)

EXPOSITION = Rule(
    "exposition: Prometheus reads it at any time, and finds no counter that has fallen",
    "return complete lines of the text format, each series once, with backslash, quotation mark "
    "and line break in label values escaped; read only `record` and the report; and let "
    "a total go on where the engine's starts again, after a restart",
)

_COUNTS = st.integers(0, 3) | st.integers(0, 10**9)
_SECONDS = st.just(0.0) | st.floats(0, 1e4)
_MAYBE = st.none() | _SECONDS
_TIERS = st.dictionaries(
    st.sampled_from(["memory", 'a "store"\n']),
    st.builds(
        KVTierStats,
        hits=_COUNTS,
        misses=_COUNTS,
        loaded_blocks=_COUNTS,
        loaded_bytes=_COUNTS,
        load_seconds=_SECONDS,
        stored_blocks=_COUNTS,
        stored_bytes=_COUNTS,
        store_seconds=_SECONDS,
        dropped_blocks=_COUNTS,
        failures=_COUNTS,
        used_bytes=st.none() | _COUNTS,
    ),
    max_size=2,
)
_SCHEDULERS = st.builds(
    SchedulerStats,
    num_running=_COUNTS,
    num_waiting=_COUNTS,
    kv_cache_usage=st.floats(0, 1),
    prefix_cache=st.builds(PrefixCacheStats, _COUNTS, _COUNTS, _COUNTS),
    num_preemptions=_COUNTS,
    num_drafts=_COUNTS,
    num_accepted_drafts=_COUNTS,
    num_deferred=_COUNTS,
    num_verified_drafts=_COUNTS,
    num_accepted_by_position=st.lists(_COUNTS, max_size=2),
    num_waits_for_results=st.dictionaries(st.text(max_size=3), _COUNTS, max_size=2),
    num_without_overlap=st.dictionaries(st.text(max_size=3), _COUNTS, max_size=2),
    num_requests_by_adapter=st.dictionaries(st.text(max_size=3), _COUNTS, max_size=2),
    num_waiting_by_adapter=st.dictionaries(st.text(max_size=3), _COUNTS, max_size=2),
    num_adapter_slots=_COUNTS,
    weight_version=st.none() | st.text(max_size=3),
    num_retained_blocks=_COUNTS,
    num_retained_hits=_COUNTS,
    num_retained_evictions=_COUNTS,
    external_prefix_cache=st.none() | st.builds(PrefixCacheStats, _COUNTS, _COUNTS, _COUNTS),
    kv_tiers=_TIERS,
)
_ALL_SCHEDULERS = _SCHEDULERS | st.builds(
    msgspec.structs.replace,
    _SCHEDULERS,
    engines=st.dictionaries(st.integers(0, 2), _SCHEDULERS, min_size=1, max_size=2),
)
_METRICS = st.builds(
    RequestMetrics,
    num_prompt_tokens=_COUNTS,
    num_generation_tokens=_COUNTS,
    queue_seconds=_MAYBE,
    prefill_seconds=_MAYBE,
    decode_seconds=_MAYBE,
    time_to_first_token=_MAYBE,
    e2e_seconds=_MAYBE,
)
_FINISHED = st.builds(
    FinishedRequest,
    request_id=st.sampled_from(["0", "a request", "é", ""]),
    finish_reason=st.sampled_from(["stop", "length", "abort", "error", "repetition", "timeout"]),
    tags=st.dictionaries(st.sampled_from(["tenant", "é"]), st.text(max_size=4), max_size=2),
    metrics=_METRICS,
    index=st.integers(0, 2),
    n=st.integers(1, 3),
    max_tokens=st.none() | _COUNTS,
)


def _stats(
    num_computed_tokens: int, num_local_tokens: int, num_external_tokens: int, **more: Any
) -> IterationStats:
    cached = num_local_tokens + num_external_tokens
    return IterationStats(
        num_prompt_tokens=num_computed_tokens + cached,
        num_cached_tokens=cached,
        num_external_tokens=num_external_tokens,
        **more,
    )


_STATS = st.just(IterationStats()) | st.builds(
    _stats,
    engine_index=st.integers(0, 2),
    num_computed_tokens=_COUNTS,
    num_local_tokens=_COUNTS,
    num_external_tokens=_COUNTS,
    num_generation_tokens=_COUNTS,
    num_preemptions=_COUNTS,
    time_to_first_token=st.lists(_SECONDS, max_size=2),
    inter_token_latency=st.lists(_SECONDS, max_size=3),
    finished=st.lists(_FINISHED, max_size=2),
    scheduler=st.none() | _ALL_SCHEDULERS,
)

_PLUGINS = st.sampled_from(["top_k", 'a "plugin"\n'])
_STEP_FAULTS = st.dictionaries(_PLUGINS, st.builds(StepFault, _COUNTS, st.text(max_size=4)))
_METERS = st.builds(
    PluginMeter, steps=_COUNTS, rows=_COUNTS, seconds=_SECONDS, faults=_COUNTS, slow_steps=_COUNTS
)
_REPORTS = st.builds(
    PluginReport,
    meters=st.dictionaries(_PLUGINS, _METERS),
    health=st.builds(
        Health,
        faults=st.dictionaries(_PLUGINS, _COUNTS),
        quarantined=st.dictionaries(_PLUGINS, st.text(max_size=4)),
        fallbacks=_STEP_FAULTS,
        slow=_STEP_FAULTS,
    ),
    scheduler=st.none() | _ALL_SCHEDULERS,
    sleep_level=st.integers(0, 2),
    num_blocks=st.none() | st.integers(1, 10**6),
)


def _engine(total: int) -> list[Any]:
    scheduler = SchedulerStats(
        num_running=1,
        num_waiting=0,
        kv_cache_usage=0.5,
        prefix_cache=PrefixCacheStats(total, total, total),
        num_preemptions=total,
        num_drafts=total,
        num_accepted_drafts=total,
        external_prefix_cache=PrefixCacheStats(total, total, total),
        kv_tiers={
            "memory": KVTierStats(
                hits=total, loaded_bytes=total, load_seconds=float(total), used_bytes=total
            )
        },
    )
    meter = PluginMeter(total, total, float(total), total, total)
    report = PluginReport(
        meters={"top_k": meter}, health=Health({"top_k": total}, {}), scheduler=scheduler
    )
    return [IterationStats(scheduler=scheduler), report]


_EXPORTS = st.lists(_STATS | _REPORTS, min_size=1, max_size=8).map(
    # And in the end the engine is restarted, and counts from nothing again.
    lambda events: [*events, *_engine(10**6), *_engine(0)]
)
_EVENTS = st.lists(_STATS | st.just("report") | _SECONDS, min_size=1, max_size=8)

_CALLS = 1000
_REPORT_EVERY = 50
_MODEL = 'a "model" \\ of\ntwo lines'


class _TrackedStats(IterationStats, weakref=True):
    """Statistics with a weak reference that detects retention."""


class StatSinkSuite(GeneralComponentSuite, LiveComponentSuite):
    """Base class of a test class, which sets `sink`, and `options` if it has some.

    Attributes:
        sink: the class under test.
        budget_us_per_call: maximum microseconds that `record` or `report` takes, waiting
            included; None does not measure.
    """

    kind = "stat_sinks"
    sink: ClassVar[type[StatSink]]
    budget_us_per_call: ClassVar[float | None] = 5000.0

    def _component(self) -> type[Component]:
        return self.sink

    def test_statistics(self) -> None:
        """Every batch is taken: without tokens, without the scheduler's state, with stages that a
        request did not reach; and a report at any time, also before the first batch and twice at
        once.
        """

        def check(events: Sequence[Any]) -> None:
            clock = ScriptedClock()
            sink = self._make(clock)
            for event in events:
                if event == "report":
                    call(STATISTICS, sink.report)
                elif isinstance(event, IterationStats):
                    call(STATISTICS, sink.record, read_only(event))
                else:
                    clock.advance(event)
            call(STATISTICS, sink.report)
            call(CLOSE, sink.close)

        self._search(STATISTICS.text, 100, check, events=_EVENTS)

    def test_exposition(self) -> None:
        """The exposition has Prometheus's format, also before the first batch; the same report
        gives the same text at once; no series is there twice, and no counter falls or vanishes,
        also if the engine's totals start again.
        """

        def check(events: Sequence[Any]) -> None:
            sink = self._make()
            before = _counters(_exported(sink, PluginReport()))
            for event in events:
                if isinstance(event, IterationStats):
                    call(EXPOSITION, sink.record, read_only(event))
                    event = PluginReport()
                text = _exported(sink, event)
                if _exported(sink, event) != text:
                    raise EXPOSITION.violation("the same report gave another text at once")
                before = _compared(before, _counters(text))
            call(CLOSE, sink.close)

        self._search(EXPOSITION.text, 100, check, events=_EXPORTS)

    def test_reads_only(self) -> None:
        """The sink changes nothing that it is given, for all sinks share it."""
        self._run_checks(READS_ONLY.text, lambda: self._use(self._make()))

    @checks(THREADS)
    def test_threads(self) -> None:
        """Calls may come from different threads, one after the other."""
        sink = self._make()
        for method, arguments in (
            (sink.record, [read_only(_batch(0))]),
            (sink.report, []),
            (sink.exposition, [read_only(_report(0))]),
            (sink.record, [read_only(_batch(1))]),
            (sink.close, []),
        ):
            in_thread(partial(call, THREADS, method, *arguments)).result()

    @checks(MEMORY)
    def test_memory(self) -> None:
        """Nothing grows with the number of batches, and no batch is kept."""
        known = set(threading.enumerate())
        sink = self._make()

        def use(number: int) -> list[weakref.ref[Any]]:
            stats = read_only(_batch(number))
            sink.record(stats)
            if number % _REPORT_EVERY == _REPORT_EVERY - 1:
                sink.report()
                sink.exposition(read_only(_report(number)))
            return [weakref.ref(stats)]

        check_growth(sink, use, _CALLS, known)
        sink.close()

    def test_close(self) -> None:
        """`close` releases threads and files; a second one, and a call after it, do no harm."""
        self._run_checks(CLOSE.text, lambda: self._use(self._make()), self._check_close)

    def test_speed(self) -> None:
        """No call takes longer than the budget."""
        if self.budget_us_per_call is None:
            pytest.skip("budget_us_per_call is None")
        self._run_checks("speed: a call takes no longer than its budget", self._check_speed)

    def _make(self, clock: Callable[[], float] | None = None) -> StatSink:
        sink: StatSink = self._build(
            StatSinkContext, clock=clock or ScriptedClock(tick=0.01), model=_MODEL
        )
        return sink

    def _use_once(self, component: Any, number: int) -> object:
        component.record(read_only(_batch(number)))
        if number % _REPORT_EVERY == _REPORT_EVERY - 1:
            component.report()
        return None

    def _use(self, sink: StatSink) -> None:
        call(STATISTICS, sink.record, read_only(_batch(0)))
        call(STATISTICS, sink.report)
        call(EXPOSITION, sink.exposition, read_only(_report(0)))
        call(CLOSE, sink.close)

    def _check_close(self) -> None:
        call(CLOSE, self._make().close)  # of one that got nothing
        with releasing_all():
            sink = self._make()
            sink.record(read_only(_batch(0)))
            sink.close()
        call(CLOSE, sink.close)
        call(CLOSE, sink.record, read_only(_batch(1)))
        call(CLOSE, sink.report)
        call(CLOSE, sink.exposition, read_only(_report(1)))

    def _check_speed(self) -> None:
        sink, budget = self._make(), self.budget_us_per_call or 0.0
        stats = read_only(_batch(0))
        for name, method in (("record", lambda: sink.record(stats)), ("report", sink.report)):
            if (seconds := longest_call(method, budget / 1e6)) > budget / 1e6:
                raise too_slow(name, seconds, budget)
        sink.close()


def _exported(sink: StatSink, report: PluginReport) -> str:
    """Return the exported text of a sink.

    Raises:
        Violation: it raises, or returns no text.
    """
    text = call(EXPOSITION, sink.exposition, read_only(report))
    checked: str = declared_result(EXPOSITION, StatSink, "exposition", text, ())
    return checked


def _counters(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values of all counters and of all buckets, counts and sums, by name and labels.

    Raises:
        Violation: the text cannot be read, or a series is in it twice.
    """
    try:
        families = list(text_string_to_metric_families(text))
    except Exception as cause:
        raise EXPOSITION.violation(
            f"the text cannot be read: {type(cause).__name__}: {cause}"
        ) from cause
    counters, seen = {}, set()
    for family in families:
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            if series in seen:
                raise EXPOSITION.violation(f"{_series_text(series)} is there twice")
            seen.add(series)
            if family.type in ("counter", "histogram", "summary") and "quantile" not in (
                sample.labels
            ):
                counters[series] = sample.value
    return counters


def _compared(before: dict[Any, float], after: dict[Any, float]) -> dict[Any, float]:
    """Return the later counters.

    Raises:
        Violation: one of them has fallen, or is missing.
    """
    for series, value in before.items():
        if series not in after:
            raise EXPOSITION.violation(f"{_series_text(series)} is no longer there")
        if after[series] < value:
            raise EXPOSITION.violation(
                f"{_series_text(series)} fell from {value:g} to {after[series]:g}"
            )
    return after


def _series_text(series: tuple[str, tuple[tuple[str, str], ...]]) -> str:
    labels = ", ".join(f"{name}={value!r}" for name, value in series[1])
    return f"{series[0]}{{{labels}}}"


def _report(number: int) -> PluginReport:
    return PluginReport(
        meters={"top_k": PluginMeter(steps=number, rows=2 * number, seconds=0.1 * number)},
        health=Health({"top_k": number}, {}),
        num_blocks=100,
    )


def _batch(number: int) -> IterationStats:
    return _TrackedStats(
        num_prompt_tokens=7,
        num_generation_tokens=3,
        time_to_first_token=[0.1 + number],
        inter_token_latency=[0.01, 0.02],
        finished=[
            FinishedRequest(
                request_id=f"request {number}",
                finish_reason="stop",
                tags={"tenant": "acme"},
                metrics=RequestMetrics(num_prompt_tokens=7, num_generation_tokens=3),
            )
        ],
        scheduler=SchedulerStats(
            num_running=2,
            num_waiting=1,
            kv_cache_usage=0.5,
            prefix_cache=PrefixCacheStats(number, 7 * number, number),
        ),
    )
