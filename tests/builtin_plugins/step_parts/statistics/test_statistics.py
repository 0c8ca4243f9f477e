"""Figures of requests and batches, exactly, from scripted outputs on scripted clocks."""

from __future__ import annotations

import gc
import threading

import pytest

from hardpoint import SamplingParams
from hardpoint.builtin_plugins.step_parts.statistics.gathering import Statistics
from hardpoint.builtin_plugins.step_parts.statistics.sinks import Sinks
from hardpoint.core.frontend.outputs.output_processor import OutputProcessor
from hardpoint.core.frontend.outputs.request_state import ParentRequest
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.guard import guard
from hardpoint.host.boundary.parts.frontend_parts import FrontendParts
from hardpoint.host.boundary.parts.observers import Observers
from hardpoint.plugins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    IterationStats,
    PrefixCacheStats,
    SchedulerStats,
    StatSink,
    StatSinkContext,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.requests.stats import PrefillStats, RequestMetrics, StepFault
from hardpoint.testing import ScriptedClock

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType
STANDING = SchedulerStats(
    num_running=2, num_waiting=1, kv_cache_usage=0.5, prefix_cache=PrefixCacheStats(1, 8, 4)
)


class Recorder(StatSink):
    """Keeps the statistics that it gets, and raises `error` in the methods of `failing`."""

    contract = 1

    def __init__(self, name="recorder", error=None, failing=("record", "report", "close")):
        super().__init__(
            StatSinkContext(name=name, options=None, clock=lambda: 0.0, model="scripted")
        )
        self.seen, self.calls = [], []
        self.error, self.failing = error, failing

    def record(self, stats):
        self.seen.append(stats)
        self._called("record")

    def report(self):
        self._called("report")

    def close(self):
        self._called("close")

    def _called(self, method):
        self.calls.append(method)
        if self.error is not None and method in self.failing:
            raise self.error


def describe(method, cause):
    raise cause


class Desk:
    """An output processor with statistics; the frontend's clock stands at `clock.now`."""

    def __init__(self, *sinks, ends_engine=(), request_metrics=True):
        self.clock = ScriptedClock(100.0)
        self.faults = faults = StepFaults(ends_engine)
        self.sinks = sinks or (Recorder(),)
        guarded = {}
        for sink in self.sinks:
            source = Source(sink.name, "pkg:Sink", "dist", "1.0", "default")
            report, calls = faults.reporter(source), faults.calls("stat_sinks", source)
            guarded[sink.name] = guard(sink, "stat_sinks", report, calls)
        self.statistics = Statistics(
            Sinks(guarded), self.clock, request_metrics=request_metrics, interval_seconds=10
        )
        parts = FrontendParts()
        parts.observers = self.observers = Observers(
            [("statistics", self.statistics, describe)], faults, self.clock
        )
        self.processor = OutputProcessor(None, 1, parts)

    @property
    def seen(self):
        return self.sinks[0].seen

    @property
    def calls(self):
        return self.sinks[0].calls

    def add(self, name, prompt=3, n=1, **tags):
        params = SamplingParams(detokenize=False, n=n)
        request = EngineCoreRequest(
            request_id=name, prompt_token_ids=[1] * prompt, params=params, tags=tags
        )
        parent = ParentRequest(name, f"{name}-inside", n)
        for child in parent.children(request):
            self.processor.add_request(child, None, parent, self.clock.now)

    def batch(self, now, engine_now, *outputs, **fields):
        """Take a batch at two clocks; return the views of the user and of the sinks."""
        self.clock.now = now
        batch = EngineCoreOutputs(outputs=list(outputs), timestamp=engine_now, **fields)
        self.observers.begin(batch)
        processed = self.processor.process(batch.outputs)
        self.observers.flush()
        return [output for _, output in processed.request_outputs]


def output(name, *tokens, **fields):
    events = [EngineCoreEvent(kind, at) for kind, at in fields.pop("events", [])]
    inside, _, number = name.partition("#")
    request_id = f"{number}_{inside}-inside" if number else f"{inside}-inside"
    return EngineCoreOutput(
        request_id=request_id, new_token_ids=list(tokens), events=events, **fields
    )


def begun(name, token, engine_now, **fields):
    """A request's first output: queued two seconds ago, scheduled one second ago."""
    events = [(QUEUED, engine_now - 2), (SCHEDULED, engine_now - 1)]
    return output(name, token, events=events, num_cached_tokens=0, **fields)


def test_a_request_from_its_coming_to_its_end():
    desk = Desk()
    desk.add("a", prompt=5, tenant="acme")
    events = [(QUEUED, 5000.25), (SCHEDULED, 5001.0)]
    first = output("a", 7, num_cached_tokens=4, prefill_stats=PrefillStats(5, 4, 3), events=events)
    desk.batch(100.5, 5003.0, first, scheduler_stats=STANDING, engine_index=3)
    assert desk.seen[0] == IterationStats(
        engine_index=3,
        num_prompt_tokens=5,
        num_cached_tokens=4,
        num_external_tokens=3,
        num_generation_tokens=1,
        time_to_first_token=[0.5],
        scheduler=STANDING,
    )
    again = output("a", 8, events=[(PREEMPTED, 5003.25), (SCHEDULED, 5003.375)])
    desk.batch(101.0, 5003.5, again)
    assert desk.seen[1] == IterationStats(
        num_generation_tokens=1, num_preemptions=1, inter_token_latency=[0.5]
    )
    (shown,) = desk.batch(102.0, 5005.0, output("a", 9, 10, finish_reason=FinishReason.LENGTH))
    expected = RequestMetrics(
        num_prompt_tokens=5,
        num_cached_tokens=4,
        num_external_tokens=3,
        num_generation_tokens=4,
        num_preemptions=1,
        queue_seconds=0.75,
        prefill_seconds=2.0,
        decode_seconds=2.0,
        time_to_first_token=0.5,
        e2e_seconds=2.0,
    )
    assert shown.metrics == shown.outputs[0].metrics == expected
    assert (desk.seen[2].num_generation_tokens, desk.seen[2].inter_token_latency) == (2, [1.5])
    (ended,) = desk.seen[2].finished
    assert (ended.request_id, ended.finish_reason, ended.tags) == (
        "a",
        "length",
        {"tenant": "acme"},
    )
    assert ended.metrics == expected
    assert [stats.finished for stats in desk.seen[:2]] == [[], []]


def test_a_batch_adds_up_its_requests():
    desk = Desk()
    desk.add("a", prompt=3)
    desk.clock.now = 101.0
    desk.add("b", prompt=4)
    desk.batch(102.0, 50.0, begun("a", 1, 50.0))
    desk.batch(103.0, 50.5, output("a", 2), begun("b", 1, 50.5))
    stats = desk.seen[1]
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (4, 2)
    assert (stats.time_to_first_token, stats.inter_token_latency) == ([2.0], [0.5])


def test_an_output_without_tokens_is_no_first_token():
    desk = Desk()
    desk.add("a")
    desk.batch(101.0, 50.0, output("a", prompt_logprobs=[None]))
    assert desk.seen[0] == IterationStats()
    desk.batch(102.0, 51.0, begun("a", 1, 51.0))
    assert (desk.seen[1].num_prompt_tokens, desk.seen[1].time_to_first_token) == (3, [2.0])


def test_every_completion_counts_as_a_request_and_the_first_ones_metrics_are_the_outputs():
    desk = Desk()
    desk.add("a", n=2)
    assert not desk.batch(101.0, 50.0, begun("a#0", 1, 50.0), begun("a#1", 1, 50.0))[0].metrics
    assert desk.seen[0].num_prompt_tokens == 6
    length = FinishReason.LENGTH
    desk.batch(102.0, 51.0, output("a#1", 2, 3, finish_reason=length))
    (last,) = desk.batch(103.0, 52.0, output("a#0", 2, finish_reason=length))
    assert [ended.request_id for stats in desk.seen for ended in stats.finished] == ["a", "a"]
    assert last.metrics.num_generation_tokens == 2
    assert last.metrics.e2e_seconds == 3.0


def test_an_abort_without_a_batch_comes_with_the_next_and_lacks_what_it_did_not_come_to():
    desk = Desk()
    for name in "abc":
        desk.add(name)
    desk.batch(101.0, 50.0, begun("a", 1, 50.0))
    desk.clock.now = 104.0
    ((_, shown),) = desk.processor.abort(["a-inside"]).request_outputs
    assert shown.outputs[0].finish_reason == "abort"
    desk.processor.drop(["b-inside"])
    assert len(desk.seen) == 1
    desk.batch(105.0, 51.0, begun("c", 1, 51.0), output("a", 2))
    aborted, other = desk.seen[1].finished
    assert (aborted.request_id, aborted.finish_reason, aborted.metrics) == (
        "a",
        "abort",
        shown.metrics,
    )
    assert (aborted.metrics.decode_seconds, aborted.metrics.e2e_seconds) == (0.0, 4.0)
    assert (other.request_id, other.finish_reason) == ("b", "abort")
    assert other.metrics == RequestMetrics(num_prompt_tokens=3, e2e_seconds=4.0)


def test_all_completions_of_a_refused_prompt_end_with_error():
    desk = Desk()
    desk.add("a", n=2)
    refusal = output(
        "a#1", finish_reason=FinishReason.ERROR, error="full", error_kind="OverloadedError"
    )
    (shown,) = desk.batch(101.0, 50.0, refusal)
    assert shown.metrics.e2e_seconds == 1.0
    assert [ended.finish_reason for ended in desk.seen[0].finished] == ["error", "error"]


def test_outputs_carry_metrics_only_where_they_are_wanted():
    desk = Desk(request_metrics=False)
    desk.add("a")
    (shown,) = desk.batch(101.0, 50.0, begun("a", 1, 50.0, finish_reason=FinishReason.STOP))
    assert (shown.finished, shown.metrics) == (True, None)
    assert desk.seen[0].finished[0].metrics.queue_seconds == 1.0


def test_a_report_is_due_when_the_interval_has_passed():
    desk = Desk()
    for now in (109.0, 110.0, 119.0, 120.5):
        desk.clock.now = now
        desk.observers.report_if_due()
        assert desk.calls == ["report"] * {109.0: 0, 110.0: 1, 119.0: 1, 120.5: 2}[now]


def test_a_report_brings_what_ended_without_a_batch():
    desk = Desk()
    desk.add("a")
    desk.processor.drop(["a-inside"], FinishReason.ERROR)
    desk.observers.engine_ended()
    desk.observers.report()
    desk.observers.report()
    assert desk.calls == ["record", "report", "report"]
    assert [ended.finish_reason for ended in desk.seen[0].finished] == ["error"]
    assert desk.seen[0].scheduler.num_running == 0


def test_closing_aborts_what_is_live_and_reports_once_more():
    desk = Desk()
    desk.add("a")

    def close():
        desk.observers.close(desk.processor.observed())
        desk.statistics.close()

    closing = threading.Thread(target=close)
    closing.start()
    closing.join()
    desk.processor.drop(["a-inside"], FinishReason.ERROR)
    desk.observers.report()
    desk.statistics.close()
    assert desk.calls == ["record", "report", "close"]
    assert [ended.finish_reason for ended in desk.seen[0].finished] == ["abort"]


def test_a_request_ends_once():
    """Closing in one thread may find a request that another one is about to end."""
    desk = Desk()
    desk.add("a")
    figures = desk.processor.observed()
    desk.processor.drop(["a-inside"], FinishReason.ERROR)
    desk.observers.close(figures)
    desk.statistics.close()
    assert [ended.finish_reason for ended in desk.seen[0].finished] == ["error"]


def test_a_sink_that_was_forgotten_is_closed():
    desk = Desk()
    calls = desk.calls
    del desk
    gc.collect()
    assert calls == ["close"]


def test_a_sink_that_raises_is_named_and_counted_and_the_others_are_told():
    before, broken, after = Recorder("a"), Recorder("broken", OSError("full")), Recorder("b")
    desk = Desk(before, broken, after)
    desk.add("a")
    desk.batch(101.0, 50.0, begun("a", 1, 50.0))
    (shown,) = desk.batch(102.0, 51.0, output("a", 2, finish_reason=FinishReason.STOP))
    desk.observers.report()
    assert shown.metrics.num_generation_tokens == 2
    assert before.calls == after.calls == ["record", "record", "report"]
    assert before.seen == after.seen
    (name, fault), *others = desk.faults.report().items()
    assert (name, fault.count, others) == ("broken", 3, [])
    assert fault.message == "plugin 'broken' (dist 1.0, pkg:Sink): record() failed: OSError: full"
    desk.statistics.close()
    assert after.calls[-2:] == ["report", "close"]
    assert desk.faults.report() == {"broken": StepFault(5, fault.message)}  # both failed


@pytest.mark.parametrize(("method", "failing"), [("flush", "record"), ("report", "report")])
def test_a_sink_whose_faults_end_the_engine_raises_after_all_were_told(method, failing):
    broken, after = Recorder("broken", OSError("full"), [failing]), Recorder("after")
    desk = Desk(broken, after, ends_engine=["broken"])
    with pytest.raises(PluginFaultError, match=f"plugin 'broken' .*: {failing}.. failed: OSError"):
        getattr(desk.observers, method)()
    assert after.calls == [failing]


def test_a_fault_while_closing_is_logged_since_there_is_no_engine_to_end(caplog):
    broken, after = Recorder("broken", OSError("full"), ["report"]), Recorder("after")
    desk = Desk(broken, after, ends_engine=["broken"])
    desk.statistics.close()
    assert "report() failed: OSError: full, while the engine is closed" in caplog.text
    assert (broken.calls[-1], after.calls[-1]) == ("close", "close")
