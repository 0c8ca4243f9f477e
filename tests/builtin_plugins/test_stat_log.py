"""The log sink: one line of averages, exactly, and silence where there is nothing to say."""

from __future__ import annotations

import logging

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.stats import LogSink
from hardpoint.plugins import IterationStats, PrefixCacheStats, SchedulerStats, StatSinkContext
from hardpoint.testing import ScriptedClock, scripted_config


class Desk:
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
def desk(caplog):
    return Desk(caplog)


def standing(running=0, waiting=0, usage=0.0, queried=0, hit=0):
    return SchedulerStats(
        num_running=running,
        num_waiting=waiting,
        kv_cache_usage=usage,
        prefix_cache=PrefixCacheStats(1, queried, hit),
    )


def test_the_line_has_averages_since_the_last(desk):
    first = IterationStats(
        num_prompt_tokens=30,
        num_generation_tokens=2,
        time_to_first_token=[1.0, 2.0],
        scheduler=standing(2, 1, 0.25, 30, 12),
    )
    desk.sink.record(first)
    desk.sink.record(
        IterationStats(num_generation_tokens=13, scheduler=standing(2, 1, 0.5, 30, 12))
    )
    desk.clock.advance(8.0)  # ten since the first request came
    assert desk.report() == (
        "prompt 3.0 tokens/s, generation 1.5 tokens/s, running 2, waiting 1, "
        "KV cache 50.0 %, prefix cache hits 40.0 %"
    )
    desk.clock.advance(4.0)
    desk.sink.record(IterationStats(num_generation_tokens=6, scheduler=standing(1, 0, 0.5, 40, 12)))
    assert desk.report() == (
        "prompt 0.0 tokens/s, generation 1.5 tokens/s, running 1, waiting 0, "
        "KV cache 50.0 %, prefix cache hits 0.0 %"
    )


def test_silent_when_nothing_happened_and_nothing_runs(desk):
    assert desk.report() is None
    desk.sink.record(IterationStats(scheduler=standing(running=1)))
    assert "running 1" in desk.report()
    assert "running 1" in desk.report()  # a long step; it runs still
    desk.sink.record(IterationStats(num_generation_tokens=1, scheduler=standing()))
    assert "running 0" in desk.report()
    assert desk.report() is None


def test_loading_and_idling_are_told_apart(desk):
    """What comes before the first request is no time without tokens; idling afterwards is."""
    desk.clock.advance(500.0)
    desk.sink.record(IterationStats(num_prompt_tokens=8, time_to_first_token=[2.0]))
    assert desk.report().startswith("prompt 4.0 tokens/s")
    desk.clock.advance(10.0)
    assert desk.report() is None
    desk.clock.advance(10.0)
    desk.sink.record(IterationStats(num_prompt_tokens=8, time_to_first_token=[2.0]))
    assert desk.report().startswith("prompt 0.8 tokens/s")


def test_several_engines_are_added_up_and_one_that_was_started_anew_counts_from_zero(desk):
    for index, queried in enumerate([100, 60]):
        desk.sink.record(
            IterationStats(engine_index=index, scheduler=standing(1, 2, 0.25, queried, queried))
        )
    line = desk.report()
    assert "running 2, waiting 4, KV cache 25.0 %, prefix cache hits 100.0 %" in line
    desk.sink.record(IterationStats(engine_index=0, scheduler=standing(0, 0, 0.75, 20, 5)))
    assert "running 1, waiting 2, KV cache 75.0 %, prefix cache hits 25.0 %" in desk.report()


def test_no_lookups_have_no_rate(desk):
    desk.sink.record(IterationStats(scheduler=standing()))
    assert desk.report().endswith("prefix cache hits none looked up")


def test_no_time_is_no_division_by_zero(desk):
    desk.sink.record(IterationStats(num_generation_tokens=3))
    assert "generation 0.0 tokens/s" in desk.report()


@pytest.mark.parametrize("where", [True, False], ids=["here", "own process"])
def test_an_engine_that_closes_says_its_last_line(scripted, caplog, where):
    caplog.set_level(logging.INFO, "hardpoint")
    extra = {"stats": {"sinks": ["log"]}, "engine": {"in_process": where}}
    with LLM(config=scripted_config(scripted, extra)) as llm:
        llm.generate("say abc", SamplingParams(temperature=0.0, max_tokens=20))
    (line,) = [message for message in caplog.messages if "tokens/s" in message]
    assert line.startswith(f"{scripted}: prompt ")
    assert "running 0, waiting 0, KV cache 0.0 %, prefix cache hits " in line
