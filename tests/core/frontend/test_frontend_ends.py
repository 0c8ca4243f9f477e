"""Requests that end in the frontend: by errors, interrupts, aborts; and who is notified."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from concurrent.futures import Future

import msgspec
import psutil
import pytest
from support.engines import build_engine
from support.internals import core_of, engine_of, output_processor_of, states_of
from support.plugins.arguments import Tagged
from support.waiting import until

from hardpoint import AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams, plugins, typed
from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.core.frontend.frontend import Frontend
from hardpoint.errors import EngineFaultError, PluginFaultError
from hardpoint.plugins import EngineConfig, StatSink, hookimpl
from hardpoint.testing import scripted_config, scripted_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
ENDLESS = SamplingParams(
    temperature=0.0, max_tokens=30_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
SLOWLY = msgspec.structs.replace(ENDLESS, plugin_args={"slow": {"seconds": 0.07}})


class Sink(StatSink):
    """Keeps what it is told; fails if it is to."""

    contract = 1
    seen: list = []

    class Options(plugins.Options):
        fails: bool = False

    def record(self, stats):
        self.seen.append(stats)
        if self.context.options.fails:
            raise OSError("disk full")


class Finished:
    """Keeps the ids of requests that finished."""

    contract = 1
    ids: list[str] = []

    @hookimpl
    def request_finished(self, output):
        self.ids.append(output.request_id)


SINK = {"stats": {"sinks": [f"{__name__}:Sink"]}}
HOOK = {"plugins": {"enable": [f"{__name__}:Finished", "support.plugins.slow:Slow"]}}


@pytest.fixture(autouse=True)
def nothing_yet():
    Sink.seen, Finished.ids = [], []


def lost(**_):
    """Stands for a `get_output` that fails."""
    raise ValueError("lost")


def drive(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def broken_decode(self, *_given, **_how):
    raise RuntimeError(f"no such token in {self.vocab_size}")


def broken_outputs(*_):
    raise PluginFaultError("plugin 'x': it broke")


TOKENIZER_FAULT = "plugin 'transformers'.*: its decode failed: RuntimeError: no such token in 257"


def test_an_error_of_the_tokenizer_ends_its_request_and_names_it(scripted, monkeypatch):
    engine = scripted_engine(scripted)
    engine.add_request("r", "say abc", SamplingParams(logprobs=1))
    engine.add_request("other", "say abc", GREEDY)
    monkeypatch.setattr(TransformersTokenizer, "decode", broken_decode)
    outputs = drive(engine)
    (ended,) = (output for output in outputs if output.request_id == "r")
    assert ended.outputs[0].finish_reason == "error"
    assert re.match(TOKENIZER_FAULT, ended.outputs[0].error)
    assert outputs[-1].outputs[0].text == " abc abc abc"
    assert core_of(engine).num_unfinished_requests() == 0

    engine.add_request("last", "say abc", GREEDY)
    monkeypatch.setattr(Frontend, "process_outputs", broken_outputs)
    with pytest.raises(EngineFaultError, match="plugin 'x': it broke"):
        drive(engine)
    with pytest.raises(EngineDeadError):
        engine.step()


async def test_in_an_event_loop_too_and_an_error_of_the_frontend_ends_the_process(
    scripted, monkeypatch
):
    config = scripted_config(scripted, {"plugins": {"enable": ["support.plugins.slow:Slow"]}})
    async with AsyncLLM(config=config, restart="on_failure") as llm:
        others = llm.generate("long", SLOWLY)
        await anext(others)
        monkeypatch.setattr(TransformersTokenizer, "decode", broken_decode)
        ended = await anext(llm.generate("say abc", SamplingParams(logprobs=1)))
        assert re.match(TOKENIZER_FAULT, ended.outputs[0].error)
        await anext(others)

        other = asyncio.create_task(anext(others))
        monkeypatch.setattr(Frontend, "process_outputs", broken_outputs)
        with pytest.raises(EngineFaultError, match="plugin 'x': it broke") as told:
            await anext(llm.generate("say abc"))
        assert "sent again" not in str(told.value)  # nobody here would serve it
        await asyncio.gather(other, return_exceptions=True)
        assert llm.errored
        pid = llm.engines.pid
        await until(lambda: not psutil.pid_exists(pid), "its end, without anybody closing it")
        with pytest.raises(EngineFaultError, match="it broke"):
            await llm.engines.scheduler_stats()


async def test_a_call_in_flight_hears_why_it_ended(scripted):
    async with AsyncLLM(config=scripted_config(scripted)) as llm:
        engine = engine_of(llm)
        await llm.plugins.health()
        engine._client.call = lambda *_, **__: pending
        pending = Future()
        call = asyncio.create_task(llm.engines.scheduler_stats())
        await asyncio.sleep(0)
        engine._engine_died(RuntimeError("a sink broke"), final=True)
        pending.set_exception(EngineDeadError("the engine was closed"))
        with pytest.raises(EngineDeadError, match="a sink broke"):
            await call


def test_an_interrupt_while_outputs_are_taken_leaves_no_request_half_told(open_engine, monkeypatch):
    engine = open_engine()
    for name in ("a", "b"):
        engine.add_request(name, "long", ENDLESS)
    engine.step()
    states = list(states_of(output_processor_of(engine)).values())

    monkeypatch.setattr(states[0], "advance", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.has_unfinished_requests()
    assert core_of(engine).num_unfinished_requests() == 0
    engine.add_request("c", "say abc", GREEDY)
    assert drive(engine)[-1].outputs[0].text == " abc abc abc"


def test_when_an_engine_ends_sinks_hear_that_nothing_runs(scripted, monkeypatch):
    engine = scripted_engine(scripted, SINK)
    engine.add_request("r", "long", ENDLESS)
    while not any(each.scheduler is not None for each in Sink.seen):
        engine.step()
    assert Sink.seen[-1].scheduler.num_running == 1
    monkeypatch.setattr(engine._client, "get_output", lost)
    with pytest.raises(EngineDeadError):
        engine.step()
    last = [each for each in Sink.seen if each.scheduler is not None][-1]
    assert (last.scheduler.num_running, last.scheduler.num_waiting) == (0, 0)
    assert [ended.finish_reason for each in Sink.seen for ended in each.finished] == ["error"]


def die(llm):
    engine_of(llm)._engine_died(EngineDeadError("gone"))


async def test_in_an_event_loop_they_hear_it_at_once(scripted):
    config = scripted_config(scripted, {**SINK, "engine": {"in_process": False}})
    async with AsyncLLM(config=config) as llm:
        await anext(llm.generate("long", ENDLESS))
        die(llm)
        assert Sink.seen[-1].scheduler.num_running == 0  # not only with the next report


class Unclosing(Tagged):
    """A parser of one request, since that has arguments; it cannot be closed."""

    contract = 1

    def close(self):
        super().close()
        if self.arguments.tag == "x":
            raise OSError("a file is gone")


def test_a_parser_that_fails_then_keeps_the_error_from_nobody(scripted, caplog):
    async def main():
        extra = {
            "reasoning": {"parser": f"{__name__}:Unclosing"},
            "plugins": {"enable": ["support.plugins.slow:Slow"]},
            "engine": {"in_process": False},
        }
        async with AsyncLLM(config=scripted_config(scripted, extra)) as llm:
            arguments = {**SLOWLY.plugin_args, "unclosing": {"tag": "x"}}
            own = msgspec.structs.replace(SLOWLY, plugin_args=arguments)
            streams = [llm.generate("long", params) for params in (SLOWLY, own, SLOWLY)]
            for stream in streams:
                await anext(stream)
            die(llm)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="gone"):
                    async for _ in stream:
                        pass
            assert llm.errored

    asyncio.run(main())
    assert "a file is gone, after its request has ended" in caplog.text


def test_a_sink_that_fails_then_is_survived(scripted, caplog, monkeypatch):
    extra = {
        **SINK,
        "plugin": {"sink": {"fails": True}},
        "plugins": {"on_error": {"sink": "engine"}},
    }
    config = typed.convert(scripted_config(scripted, extra), EngineConfig, path="")
    engine = build_engine(config)
    engine.add_request("r", "long", ENDLESS)
    monkeypatch.setattr(engine._client, "get_output", lost)
    with (
        caplog.at_level(logging.WARNING, "hardpoint"),
        pytest.raises(EngineDeadError, match="lost"),
    ):
        engine.step()
    assert "disk full, after the engine has ended" in caplog.text


def test_the_hook_is_not_called_for_aborted_requests(open_engine):
    engine = open_engine(HOOK)
    engine.add_request("aborted", "long", ENDLESS)
    engine.step()
    engine.abort_requests(["aborted"])
    engine.add_request("paused", "long", ENDLESS)
    engine.step()
    engine.call_utility("pause")
    engine.call_utility("resume")
    engine.add_request("whole", "say abc", GREEDY)
    drive(engine)
    assert Finished.ids == ["whole"]


def test_nor_is_it_in_an_event_loop(scripted):
    async def main():
        async with AsyncLLM(config=scripted_config(scripted, HOOK)) as llm:
            stream = llm.generate("long", SLOWLY, "aborted")
            await anext(stream)
            await llm.abort("aborted")
            reasons = [output.outputs[0].finish_reason async for output in stream]
            assert reasons[-1] == "abort"
            async for _ in llm.generate("say abc", GREEDY, "whole"):
                pass

    asyncio.run(main())
    assert Finished.ids == ["whole"]
