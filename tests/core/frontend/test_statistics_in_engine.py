"""Statistics through whole engines: in this process, in one of their own, in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import sys
import threading
import weakref

import msgspec
import pytest
from support.core.engine_harness import Rig, ScriptedExecutor
from support.engines import build_engine
from support.internals import engine_of
from support.process.forked_python import forked_python
from support.waiting import PATIENCE_S, until

from hardpoint import (
    LLM,
    AsyncLLM,
    EngineClosedError,
    EngineDeadError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    plugins,
    typed,
)
from hardpoint.errors import PluginFaultError, PluginLoadError
from hardpoint.plugins import EngineConfig, EngineCoreOutputs, OverloadedError, StatSink
from hardpoint.testing import ScriptedClock, scripted_config, scripted_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
ENDLESS = SamplingParams(
    temperature=0.0, max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
SLOWLY = msgspec.structs.replace(ENDLESS, plugin_args={"slow": {"seconds": 0.05}})
SLOW = {"plugins": {"enable": ["support.plugins.slow:Slow"]}}
OWN = {"in_process": False}


class Recorder(StatSink):
    """Keeps everything, across engines."""

    contract = 1
    seen: list = []
    calls: list[str] = []

    def record(self, stats):
        self.seen.append(stats)
        self.calls.append("record")

    def report(self):
        self.calls.append("report")

    def close(self):
        self.calls.append("close")


class Broken(StatSink):
    contract = 1

    class Options(plugins.Options):
        built: bool = True

    def __init__(self, context):
        super().__init__(context)
        if not context.options.built:
            raise OSError("no such folder")

    def record(self, stats):
        raise OSError("disk full")


@pytest.fixture(autouse=True)
def recorded():
    Recorder.seen, Recorder.calls = [], []
    return Recorder


def stats(*sinks, **fields):
    return {"sinks": [f"{__name__}:{sink}" for sink in sinks], **fields}


def finished():
    return [
        (ended.request_id, ended.finish_reason, ended.metrics.num_generation_tokens)
        for each in Recorder.seen
        for ended in each.finished
    ]


def num_running():
    """The number of running requests that the engine reported last."""
    return [each.scheduler for each in Recorder.seen if each.scheduler is not None][-1].num_running


def wiretap(engine):
    """Return a list that gets every batch which comes from the engine."""
    batches: list[EngineCoreOutputs] = []
    get_output = engine._client.get_output

    def tapped(**how):
        batches.append(get_output(**how))
        return batches[-1]

    engine._client.get_output = tapped
    return batches


def opened(scripted, extra):
    return build_engine(typed.convert(scripted_config(scripted, extra), EngineConfig, path=""))


def drive(engine, *prompts, params=GREEDY):
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    return outputs


@pytest.mark.parametrize("where", [{}, OWN], ids=["here", "own process"])
def test_off_by_default_nothing_travels_and_outputs_have_no_metrics(scripted, where):
    with contextlib.closing(opened(scripted, {"engine": where})) as engine:
        batches = wiretap(engine)
        (output,) = drive(engine, "say abc")
        assert output.outputs[0].text == " abc abc abc"
        assert output.metrics is None
        assert [each.scheduler_stats for each in batches] == [None] * len(batches)
        assert [o.events for each in batches for o in each.outputs if o.events] == []
        assert not engine._frontend.observers


@pytest.mark.parametrize("where", [{}, OWN], ids=["here", "own process"])
def test_figures_of_a_run(scripted, where):
    extra = {"engine": where, "stats": stats("Recorder", request_metrics=True)}
    with LLM(config=scripted_config(scripted, extra)) as llm:
        first, second = llm.generate(["say abc", "long"], [GREEDY, SamplingParams(max_tokens=5)])
        assert Recorder.calls.count("close") == 0
    metrics = first.metrics
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens) == (7, 0)
    assert metrics.num_generation_tokens == len(first.outputs[0].token_ids) == 13
    durations = (metrics.queue_seconds, metrics.prefill_seconds, metrics.decode_seconds)
    assert all(0 <= each < PATIENCE_S for each in durations)
    assert 0 < metrics.time_to_first_token <= metrics.e2e_seconds < PATIENCE_S
    seen = Recorder.seen
    assert sum(each.num_prompt_tokens for each in seen) == 7 + 4
    assert sum(each.num_generation_tokens for each in seen) == 13 + 5
    assert sum(len(each.inter_token_latency) for each in seen) <= 12 + 4
    assert sum(len(each.time_to_first_token) for each in seen) == 2
    assert sorted(finished()) == [("0", "stop", 13), ("1", "length", 5)]
    assert seen[-1].scheduler.num_running == 0
    assert Recorder.calls[-2:] == ["report", "close"]
    assert second.metrics.num_generation_tokens == 5


@pytest.mark.parametrize("where", [{}, OWN], ids=["here", "own process"])
def test_sinks_get_the_trace_of_a_request(scripted, where):
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    config = scripted_config(scripted, {"engine": where, "stats": stats("Recorder")})
    with LLM(config=config) as llm:
        llm.generate(["say abc", "long"], GREEDY, trace_headers=[trace, None])
        with pytest.raises(RequestError, match=r"trace_headers.a: expected a string, got 1"):
            llm.generate("say abc", GREEDY, trace_headers={"a": 1})
    ended = [request for each in Recorder.seen for request in each.finished]
    assert {request.request_id: request.trace_headers for request in ended} == {
        "0": trace,
        "1": None,
    }


def test_a_stop_string_ends_the_count_where_the_user_sees_the_end(scripted):
    engine = scripted_engine(scripted, {"stats": stats("Recorder", request_metrics=True)})
    (output,) = drive(engine, "long", params=SamplingParams(temperature=0.0, stop="345"))
    engine.close()
    assert finished() == [("0", "stop", len(output.outputs[0].token_ids))]
    assert output.metrics.num_generation_tokens == len(output.outputs[0].token_ids)


def test_preemptions_are_counted(scripted):
    extra = {
        "kv_cache": {"block_size": 4, "num_blocks": 12, "watermark": 0.0},
        "max_model_len": 40,
        "stats": stats("Recorder", request_metrics=True),
    }
    engine = scripted_engine(scripted, extra)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = drive(engine, *([i + 1] * 8 for i in range(3)), params=params)
    engine.close()
    total = sum(output.metrics.num_preemptions for output in outputs)
    assert total == sum(each.num_preemptions for each in Recorder.seen) > 0
    assert total == Recorder.seen[-1].scheduler.num_preemptions


def test_aborts_refusals_and_what_closing_ends(scripted):
    extra = {"scheduler": {"max_num_seqs": 1, "max_waiting": 1}, "stats": stats("Recorder")}
    engine = scripted_engine(scripted, extra)
    engine.add_request(
        "a",
        "x",
        ENDLESS,
    )
    engine.step()
    engine.add_request("b", "x", ENDLESS)
    with pytest.raises(OverloadedError):
        engine.add_request("c", "x", ENDLESS)
    engine.abort_requests(["b"])
    engine.step()
    engine.close()
    assert finished() == [("c", "error", 0), ("b", "abort", 0), ("a", "abort", 2)]


def test_a_step_reports_when_the_interval_has_passed(open_engine):
    clock = ScriptedClock()
    extra = {"stats": stats("Recorder", interval_seconds=5)}
    engine = open_engine(extra, clock=clock)
    engine.add_request("a", "x", ENDLESS)
    for seconds in (4.0, 1.0, 4.0, 0.5, 7.0):
        clock.advance(seconds)
        engine.step()
    assert Recorder.calls == ["record", "report", "record", "record", "record", "report", "record"]


def test_a_broken_sink_harms_nobody_and_is_counted(scripted, caplog):
    engine = scripted_engine(scripted, {"stats": stats("Broken", "Recorder")})
    (output,) = drive(engine, "say abc")
    assert output.outputs[0].text == " abc abc abc"
    assert finished() == [("0", "stop", 13)]
    fault = engine.health().fallbacks["broken"]
    assert (fault.count, engine.health().ok) == (len(Recorder.seen), True)
    assert fault.message.endswith("record() failed: OSError: disk full")
    engine.close()
    assert engine.health().fallbacks["broken"].count == fault.count
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert told.endswith("; the engine goes on, and only this call is lost")


def test_a_broken_sink_ends_the_engine_where_that_is_wanted(scripted):
    extra = {"stats": stats("Broken"), "plugins": {"on_error": {"broken": "engine"}}}
    with LLM(config=scripted_config(scripted, extra)) as llm:
        with pytest.raises(PluginFaultError, match="plugin 'broken' .*: record.. failed: OSError"):
            llm.generate("say abc", GREEDY)
        with pytest.raises(EngineDeadError):
            llm.generate("say abc", GREEDY)


def test_a_sink_that_cannot_be_built_stops_the_start_and_those_before_it_are_closed(scripted):
    extra = {"stats": stats("Recorder", "Broken"), "plugin": {"broken": {"built": False}}}
    with pytest.raises(PluginLoadError, match="'broken' .*its constructor failed: OSError: no su"):
        scripted_engine(scripted, extra)
    assert Recorder.calls == ["close"]


def test_sinks_are_closed_when_the_engine_cannot_start(scripted):
    extra = {"stats": stats("Recorder"), "kv_cache": {"num_blocks": 1}}
    with pytest.raises(plugins.ConfigError):
        scripted_engine(scripted, extra)
    assert Recorder.calls == ["report", "close"]


@pytest.mark.parametrize("depth", [1, 2], ids=["step", "batch queue"])
def test_the_engine_tells_each_client_how_its_scheduler_stands(depth):
    rig = Rig(ScriptedExecutor(depth), log_stats=True)
    rig.add("a", max_tokens=2)
    rig.add("b", max_tokens=3, client_index=1)
    seen = []
    while rig.core.has_requests():
        outputs, _ = rig.core.step()
        seen.append({client: each.scheduler_stats.num_running for client, each in outputs.items()})
    assert [each for each in seen if each] == [{0: 2, 1: 2}, {0: 1, 1: 1}, {1: 0}]
    rig.add("c")
    (aborted,) = rig.core.abort_requests(["c"]).values()
    assert (aborted.scheduler_stats.num_running, aborted.scheduler_stats.num_waiting) == (0, 0)
    events = [event.type.name for event in aborted.outputs[0].events]
    assert events == ["QUEUED"]


def test_an_engine_that_is_not_asked_reports_nothing():
    rig = Rig()
    rig.add("a", max_tokens=1)
    outputs, _ = rig.core.step()
    assert outputs[0].scheduler_stats is None
    assert outputs[0].outputs[0].events == ()


# In an event loop


async def last(stream):
    return [output async for output in stream][-1]


async def test_reports_come_while_nothing_happens_and_end_with_the_engine(scripted):
    sinks = stats("Recorder", request_metrics=True, interval_seconds=0.02)
    extra = SLOW | {"stats": sinks}
    async with AsyncLLM(config=scripted_config(scripted, extra)) as llm:
        assert Recorder.calls == []
        output = await last(llm.generate("say abc", GREEDY))
        assert output.metrics.num_generation_tokens == 13
        assert finished() == [("0", "stop", 13)]
        batches = Recorder.calls.count("record")
        told = Recorder.calls.count("report")
        await until(lambda: Recorder.calls.count("report") >= told + 3, "reports")
        assert Recorder.calls.count("record") == batches
        stream = llm.generate("x", SLOWLY, request_id="left")
        await anext(stream)
        await stream.aclose()
        await until(lambda: len(finished()) == 2, "a report of its end")
        assert finished()[1][:2] == ("left", "abort")
        # the engine's own word of the abort came too: nothing runs there
        await until(lambda: num_running() == 0, "the engine's word")
    assert Recorder.calls[-1] == "close"
    calls = len(Recorder.calls)
    await asyncio.sleep(0.1)
    assert len(Recorder.calls) == calls


async def test_the_last_output_of_a_stream_carries_the_metrics(scripted):
    extra = {"stats": {"request_metrics": True}}
    async with AsyncLLM(config=scripted_config(scripted, extra)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20, output_kind=RequestOutputKind.DELTA)
        *before, last = [output async for output in llm.generate("say abc", params)]
        assert [output.metrics for output in before] == [None] * len(before)
        assert last.metrics.num_generation_tokens == 13


async def test_a_large_batch_in_parts_counts_everything_once(scripted):
    extra = {"stats": stats("Recorder"), "scheduler": {"max_num_seqs": 100}}
    async with AsyncLLM(config=scripted_config(scripted, extra)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, n=100)
        await last(llm.generate("x", params))
    assert finished() == [("0", "length", 3)] * 100
    assert sum(each.num_generation_tokens for each in Recorder.seen) == 300
    assert sum(each.num_prompt_tokens for each in Recorder.seen) == 100


async def test_an_engine_that_was_dropped_is_not_kept_by_its_reports(scripted):
    extra = {"stats": stats("Recorder", interval_seconds=0.02)}
    llm = AsyncLLM(config=scripted_config(scripted, extra))
    await last(llm.generate("say abc", GREEDY))
    dropped = weakref.ref(engine_of(llm))
    del llm
    gc.collect()
    await until(lambda: dropped() is None, "threads that still use it")
    assert Recorder.calls[-1] == "close"
    calls = len(Recorder.calls)
    await asyncio.sleep(0.1)
    assert len(Recorder.calls) == calls


async def test_reports_go_on_when_the_engine_is_started_anew(scripted):
    extra = SLOW | {"stats": stats("Recorder", interval_seconds=0.02)}
    extra |= {"engine": {"resume": "off"}}
    config = scripted_config(scripted, extra)
    async with AsyncLLM(config=config, restart="on_failure") as llm:
        stream = llm.generate("x", SLOWLY, request_id="lost")
        await anext(stream)
        os.kill(llm.engines.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await last(stream)
        await until(finished, "a report of its end")
        assert finished()[0][:2] == ("lost", "error")
        assert num_running() == 0
        assert (await last(llm.generate("say abc", GREEDY))).finished
        assert finished()[1:] == [("0", "stop", 13)]
        told = Recorder.calls.count("report")
        await until(lambda: Recorder.calls.count("report") > told, "a report")
        assert "close" not in Recorder.calls


async def test_a_sink_may_end_an_engine_in_a_loop(scripted):
    extra = {"stats": stats("Broken"), "plugins": {"on_error": {"broken": "engine"}}}
    async with AsyncLLM(config=scripted_config(scripted, extra)) as llm:
        message = None
        while message is None:  # all outputs of the first ones may come before statistics do
            try:
                await last(llm.generate("say abc", ENDLESS))
            except EngineDeadError as error:
                message = str(error)
        assert re.search("plugin 'broken' .*: record.. failed", message)
        assert llm.errored


async def test_closing_in_another_thread_closes_the_sinks_once(scripted):
    extra = SLOW | {"stats": stats("Recorder", interval_seconds=0.01)}
    llm = AsyncLLM(config=scripted_config(scripted, extra))
    stream = llm.generate("x", SLOWLY)
    await anext(stream)
    closing = threading.Thread(target=llm.close)
    closing.start()
    with pytest.raises(EngineClosedError):
        await last(stream)
    await asyncio.to_thread(closing.join)
    await stream.aclose()
    assert [call for call in Recorder.calls if call == "close"] == ["close"]
    assert Recorder.calls[-1] == "close"
    assert [ended[:2] for ended in finished()] == [("0", "abort")]


def test_a_sink_of_main_is_not_sent_to_the_engine_process(scripted, monkeypatch):
    class Script(StatSink):
        contract = 1

        def record(self, stats, lock=threading.Lock()):  # noqa: B008 - it cannot be pickled
            with lock:
                Recorder.seen.append(stats)

    Script.__module__, Script.__qualname__ = "__main__", "Script"
    monkeypatch.setattr(sys.modules["__main__"], "Script", Script, raising=False)
    extra = {"engine": OWN, "stats": {"sinks": ["__main__:Script"]}}
    with LLM(config=scripted_config(scripted, extra)) as llm:
        llm.generate("say abc", GREEDY)
    assert sum(each.num_generation_tokens for each in Recorder.seen) == 13


@pytest.mark.nightly
def test_a_sink_of_the_users_script_stays_in_its_process(scripted, tmp_path):
    """It need not be such that it could travel to the engine's."""
    config = scripted_config(scripted, {"engine": OWN, "stats": {"sinks": ["__main__:Script"]}})
    program = tmp_path / "script.py"
    program.write_text(
        f"""
import threading
from hardpoint import LLM, SamplingParams
from hardpoint.plugins import StatSink

LOCK, TOKENS = threading.Lock(), []

class Script(StatSink):
    contract = 1

    def record(self, stats, lock=LOCK):
        with lock:
            TOKENS.append(stats.num_generation_tokens)

with LLM(config={config!r}) as llm:
    llm.generate("say abc", SamplingParams(temperature=0.0, max_tokens=20))
print(sum(TOKENS))
"""
    )
    done = forked_python().run([str(program)], tmp_path, dict(os.environ))
    assert done.stdout == "13\n", done.stderr
