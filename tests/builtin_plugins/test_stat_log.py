"""The log sink: one line of averages, exactly, and silence where there is nothing to report."""

from __future__ import annotations

import logging

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.stats.log import LogSink
from hardpoint.plugins import IterationStats, PrefixCacheStats, SchedulerStats, StatSinkContext
from hardpoint.plugins.requests.stats import KVTierStats
from hardpoint.testing import ScriptedClock, scripted_config


class LogFixture:
    """A log sink at a clock, and the lines that it wrote."""

    def __init__(self, caplog):
        caplog.set_level(logging.INFO, "hardpoint")
        self.clock = ScriptedClock(1000.0)
        self._caplog = caplog
        self.sink = LogSink(
            StatSinkContext(name="log", options=None, clock=self.clock, model="tiny")
        )

    def report(self):
        """Report; return the line without the model's name, None if there is none."""
        self._caplog.clear()
        self.sink.report()
        assert len(self._caplog.messages) <= 1
        return self._caplog.messages[0].removeprefix("tiny: ") if self._caplog.messages else None


@pytest.fixture
def log(caplog):
    return LogFixture(caplog)


def scheduler_stats(running=0, waiting=0, usage=0.0, queried=0, hit=0):
    return SchedulerStats(
        num_running=running,
        num_waiting=waiting,
        kv_cache_usage=usage,
        prefix_cache=PrefixCacheStats(1, queried, hit),
    )


def test_the_line_has_averages_since_the_last(log):
    first = IterationStats(
        num_prompt_tokens=30,
        num_generation_tokens=2,
        time_to_first_token=[1.0, 2.0],
        scheduler=scheduler_stats(2, 1, 0.25, 30, 12),
    )
    log.sink.record(first)
    log.sink.record(
        IterationStats(num_generation_tokens=13, scheduler=scheduler_stats(2, 1, 0.5, 30, 12))
    )
    log.clock.advance(8.0)  # ten since the first request came
    assert log.report() == (
        "prompt 3.0 tokens/s, generation 1.5 tokens/s, running 2, waiting 1, "
        "KV cache 50.0 %, prefix cache hits 40.0 %"
    )
    log.clock.advance(4.0)
    log.sink.record(
        IterationStats(num_generation_tokens=6, scheduler=scheduler_stats(1, 0, 0.5, 40, 12))
    )
    assert log.report() == (
        "prompt 0.0 tokens/s, generation 1.5 tokens/s, running 1, waiting 0, "
        "KV cache 50.0 %, prefix cache hits 0.0 %"
    )


def with_connector(queried, hit, **tiers):
    stats = scheduler_stats(1)
    stats.external_prefix_cache = PrefixCacheStats(1, queried, hit)
    stats.kv_tiers = {
        name: KVTierStats(loaded_bytes=loaded, stored_bytes=stored)
        for name, (loaded, stored) in tiers.items()
    }
    return IterationStats(scheduler=stats)


def test_the_line_has_the_work_of_a_kv_connector_since_the_last(log):
    log.sink.record(with_connector(0, 0))
    assert log.report().endswith(
        "prefix cache hits none looked up, KV connector hits none looked up"
    )
    log.sink.record(with_connector(200, 150, memory=(10**6, 3 * 10**6), ssd=(0, 3 * 10**6)))
    assert log.report().endswith(
        ", KV connector hits 75.0 % (memory: 1.0 MB loaded, 3.0 MB stored; "
        "ssd: 0.0 MB loaded, 3.0 MB stored)"
    )
    log.sink.record(with_connector(300, 150, memory=(2 * 10**6, 3 * 10**6), ssd=(0, 10**6)))
    assert log.report().endswith(
        ", KV connector hits 0.0 % (memory: 1.0 MB loaded, 0.0 MB stored; "
        "ssd: 0.0 MB loaded, 1.0 MB stored)"  # the engine of ssd was restarted
    )


def test_silent_when_nothing_happened_and_nothing_runs(log):
    assert log.report() is None
    log.sink.record(IterationStats(scheduler=scheduler_stats(running=1)))
    assert "running 1" in log.report()
    assert "running 1" in log.report()  # a long step; it runs still
    log.sink.record(IterationStats(num_generation_tokens=1, scheduler=scheduler_stats()))
    assert "running 0" in log.report()
    assert log.report() is None


def test_loading_and_idling_are_distinguished(log):
    """Time before the first request is no time without tokens; idling afterwards is."""
    log.clock.advance(500.0)
    log.sink.record(IterationStats(num_prompt_tokens=8, time_to_first_token=[2.0]))
    assert log.report().startswith("prompt 4.0 tokens/s")
    log.clock.advance(10.0)
    assert log.report() is None
    log.clock.advance(10.0)
    log.sink.record(IterationStats(num_prompt_tokens=8, time_to_first_token=[2.0]))
    assert log.report().startswith("prompt 0.8 tokens/s")


def test_several_engines_are_added_up_and_one_that_was_restarted_counts_from_zero(log):
    for index, queried in enumerate([100, 60]):
        log.sink.record(
            IterationStats(
                engine_index=index, scheduler=scheduler_stats(1, 2, 0.25, queried, queried)
            )
        )
    line = log.report()
    assert "running 2, waiting 4, KV cache 25.0 %, prefix cache hits 100.0 %" in line
    log.sink.record(IterationStats(engine_index=0, scheduler=scheduler_stats(0, 0, 0.75, 20, 5)))
    assert "running 1, waiting 2, KV cache 75.0 %, prefix cache hits 25.0 %" in log.report()


def test_no_lookups_have_no_rate(log):
    log.sink.record(IterationStats(scheduler=scheduler_stats()))
    assert log.report().endswith("prefix cache hits none looked up")


def test_no_time_is_no_division_by_zero(log):
    log.sink.record(IterationStats(num_generation_tokens=3))
    assert "generation 0.0 tokens/s" in log.report()


@pytest.mark.parametrize("where", [True, False], ids=["here", "own process"])
def test_an_engine_that_closes_logs_its_last_line(scripted, caplog, where):
    caplog.set_level(logging.INFO, "hardpoint")
    extra = {
        "stats": {"sinks": ["log"], "interval_seconds": 600.0},
        "engine": {"in_process": where},
    }
    with LLM(config=scripted_config(scripted, extra)) as llm:
        llm.generate("say abc", SamplingParams(temperature=0.0, max_tokens=20))
    (line,) = [message for message in caplog.messages if "tokens/s" in message]
    assert line.startswith(f"{scripted}: prompt ")
    assert "running 0, waiting 0, KV cache 0.0 %, prefix cache hits " in line
