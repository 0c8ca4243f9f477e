"""Exports of sinks, through engines: at any time, without a failure and without a long wait."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from support.async_requests import GREEDY, collect, config, endless
from support.process.harness import pid_of
from support.samples import Sample
from support.waiting import PATIENCE_S, until

from hardpoint import LLM, AsyncLLM, EngineDeadError
from hardpoint.core.frontend import llm_engine
from hardpoint.plugins import PluginReport, StatSink
from hardpoint.process import async_engine
from hardpoint.testing import scripted_config

HURRY_S = 0.2


class Exports(StatSink):
    """Exports what it is told, and keeps that."""

    contract = 1
    reports: list[PluginReport] = []

    def record(self, stats):
        pass

    def exposition(self, plugins):
        self.reports.append(plugins)
        return f"exported {len(self.reports)}"


class Fails(Sample, StatSink, contract=1):
    def record(self, stats):
        pass

    def exposition(self, plugins):
        raise OSError("no figures")


class ReturnsBytes(Fails):
    def exposition(self, plugins):
        return b"exported 1\n"


class ReturnsHalfACharacter(Fails):
    def exposition(self, plugins):
        return "\ud83d"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let an export wait for the answer of an engine that runs, however slowly."""
    for module in (async_engine, llm_engine):
        monkeypatch.setattr(module, "METRICS_TIMEOUT_S", PATIENCE_S)


def hurry(monkeypatch):
    """Let an export wait no longer than a moment for an engine that hangs."""
    for module in (async_engine, llm_engine):
        monkeypatch.setattr(module, "METRICS_TIMEOUT_S", HURRY_S)


@pytest.fixture(autouse=True)
def reports():
    Exports.reports = []
    return Exports.reports


def sinks(*names):
    return {"sinks": [f"{__name__}:{name}" for name in names]}


def value(text, name, **labels):
    """Return the value of the only series of a name, with some labels."""
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith(f"hardpoint:{name}{{")
        if all(f'{label}="{given}"' in line for label, given in labels.items())
    )
    return float(line.rpartition(" ")[2])


def stopped(text):
    return value(text, "request_success_total", finished_reason="stop")


def rows(text):
    return value(text, "plugin_rows_total", plugin="slow")


async def kill_while_it_hangs(llm, stream, known, monkeypatch):
    os.kill(llm.engines.pid, signal.SIGSTOP)
    began = time.monotonic()
    with monkeypatch.context() as patch:
        hurry(patch)
        text = await llm.metrics()
    assert HURRY_S <= time.monotonic() - began < PATIENCE_S / 2
    assert (stopped(text), rows(text)) == (1, known)
    os.kill(llm.engines.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await collect(stream)
    text = await llm.metrics()
    assert value(text, "num_requests_running") == value(text, "num_requests_waiting") == 0
    assert value(text, "request_success_total", finished_reason="error") == 1
    assert rows(text) == known


async def test_an_engine_in_a_loop_always_answers(scripted, monkeypatch):
    """While it runs, is paused, hangs, is restarted and is dead."""
    settings = config(
        scripted,
        stats={"sinks": ["prometheus"]},
        engine={"max_restarts_per_minute": 1, "resume": "off"},
    )

    async with AsyncLLM(config=settings, restart="on_failure") as llm:
        await collect(llm.generate("say abc", GREEDY))
        stream = llm.generate("x", endless(0.01))
        await anext(stream)
        text = await llm.metrics()
        assert value(text, "generation_tokens_total") > 13
        assert value(text, "num_requests_running") == 1
        await llm.engines.pause("keep")
        text = await llm.metrics()  # nothing was recorded since: pausing freed its blocks
        assert value(text, "num_requests_running") == 0
        assert value(text, "num_requests_waiting") == 1
        known = rows(text)
        assert known > 0
        await kill_while_it_hangs(llm, stream, known, monkeypatch)

        await collect(llm.generate("say abc", GREEDY))
        text = await llm.metrics()
        assert value(text, "engine_restarts_total") == 1
        assert (stopped(text), rows(text)) == (2, known)
        os.kill(llm.engines.pid, signal.SIGKILL)
        await until(lambda: llm.errored, "the end")
        began = time.monotonic()
        assert stopped(await llm.metrics()) == 2
        assert time.monotonic() - began < PATIENCE_S / 2
    assert await llm.metrics() == ""


def test_an_engine_in_its_own_process_that_hangs_is_not_waited_for(scripted, reports, monkeypatch):
    extra = {"engine": {"in_process": False}, "stats": sinks("Exports")}
    with LLM(config=scripted_config(scripted, extra)) as llm:
        llm.generate("say abc", GREEDY)
        assert llm.metrics() == "exported 1\n"
        pid = pid_of(llm)
        os.kill(pid, signal.SIGSTOP)
        hurry(monkeypatch)
        began = time.monotonic()
        assert llm.metrics() == "exported 2\n"
        assert HURRY_S <= time.monotonic() - began < PATIENCE_S / 2
        os.kill(pid, signal.SIGKILL)
    answered, last = reports
    assert answered.scheduler.prefix_cache.queried_tokens == 7
    assert answered.num_blocks == last.num_blocks > 0
    assert last.scheduler is None
    assert last.meters == answered.meters


def test_a_sleeping_engine_reports_its_level(scripted, reports):
    with LLM(config=scripted_config(scripted, {"stats": sinks("Exports")})) as llm:
        llm.sleep(2)
        llm.metrics()
        llm.wake_up(["weights"])
        llm.metrics()
        llm.wake_up()
        llm.metrics()
    assert [report.sleep_level for report in reports] == [2, 2, 0]


def test_a_sink_that_fails_leaves_out_its_own_text(scripted, reports):
    failing = ["Fails", "ReturnsBytes", "ReturnsHalfACharacter"]
    extra = {"stats": sinks(*failing[:2], "Exports", failing[2])}
    with LLM(config=scripted_config(scripted, extra)) as llm:
        assert llm.metrics() == "exported 1\n"
        assert llm.metrics() == "exported 2\n"
        fallbacks = llm.plugins.health().fallbacks
    assert {name: fault.count for name, fault in fallbacks.items()} == {
        "fails": 2,
        "returns_bytes": 2,
        "returns_half_a_character": 2,
    }
    assert "exposition() failed: OSError: no figures" in fallbacks["fails"].message
    assert "TypeError: expected a str, got bytes" in fallbacks["returns_bytes"].message
    assert reports[1].health.fallbacks["fails"].count == 1
    with pytest.raises(AttributeError):
        reports[0].meters = {}


def test_a_sink_may_end_the_engine(scripted):
    extra = {"stats": sinks("Fails"), "plugins": {"on_error": {"fails": "engine"}}}
    with LLM(config=scripted_config(scripted, extra)) as llm:
        with pytest.raises(EngineDeadError, match="plugin 'fails' .*: exposition.. failed"):
            llm.metrics()
        assert llm.metrics() == ""

    async def main():
        async with AsyncLLM(config=scripted_config(scripted, extra)) as llm:
            assert await llm.metrics() == ""
            assert "exposition() failed" in str(llm.dead_error)

    asyncio.run(main())
