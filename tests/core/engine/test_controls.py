"""Pause, sleep, caches, workers, profiles and adapters: the same calls on every face."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest
from support.waiting import PATIENCE_S, HeldSteps

from hardpoint import (
    LLM,
    AsyncLLM,
    EnginePausedError,
    HardpointError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.calls.groups import AsyncGroups, SyncGroups
from hardpoint.core.engine.utility_calls import UTILITIES
from hardpoint.old_names.members import ASYNC_NAMES, SYNC_NAMES
from hardpoint.plugins.requests import LoRARequest
from hardpoint.testing import scripted_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SLOWLY = {"slow": {"seconds": 0.02}}
LONG = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, plugin_args=SLOWLY)
DELTAS = msgspec.structs.replace(LONG, output_kind=RequestOutputKind.DELTA)
ENABLED = {"enable": ["support.plugins.slow:Slow"]}
PAUSED = "the engine is paused, so this would wait for ever; call engines.resume() first"


@pytest.fixture(scope="module", params=[True, False], ids=["in-process", "own-process"])
def llm(request, scripted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    engine = {"in_process": request.param, "profile_dir": str(folder)}
    with LLM(config=scripted_config(scripted, {"engine": engine, "plugins": ENABLED})) as llm:
        llm.here = request.param
        yield llm


def tokens(llm, params=GREEDY):
    return llm.generate("say abc", params)[0].outputs[0].token_ids


def deltas(held):
    """Parameters of a stream that has not ended when a pause comes."""
    return msgspec.structs.replace(DELTAS, max_tokens=200, plugin_args=held.slow(0.3))


class TestPause:
    def test_a_call_that_would_wait_for_ever_raises(self, llm):
        before = tokens(llm)
        for _ in range(2):
            llm.engines.pause()
            assert llm.engines.is_paused()
            with pytest.raises(
                HardpointError, match=PAUSED.replace("(", r"\(").replace(")", r"\)")
            ):
                llm.generate("say abc", GREEDY)
            assert llm.engines.scheduler_stats().num_waiting == 0  # nothing of it is left
        llm.engines.resume()
        assert not llm.engines.is_paused()
        assert tokens(llm) == before

    def test_a_stream_that_is_kept_goes_on_after(self, llm, tmp_path):
        held = HeldSteps(tmp_path)
        whole = tokens(llm, msgspec.structs.replace(LONG, max_tokens=200, plugin_args={}))
        stream = llm.stream("say abc", deltas(held))
        got = next(stream).outputs[0].token_ids
        llm.engines.pause("keep")
        held.let_go()
        before = []  # of steps before the pause
        with pytest.raises(EnginePausedError, match="the engine is paused"):
            before.extend(output.outputs[0].token_ids for output in stream)
        for some in before:
            got = got + some
        with pytest.raises(HardpointError, match="the engine is paused"):
            llm.generate("other", GREEDY)
        llm.engines.resume()
        for output in stream:
            got = got + output.outputs[0].token_ids
        assert got == whole

    def test_a_stream_that_is_aborted_ends_with_what_it_has(self, llm, tmp_path):
        stream = llm.stream("say abc", deltas(HeldSteps(tmp_path)))
        next(stream)
        llm.engines.pause("abort")
        assert [output.outputs[0].finish_reason for output in stream][-1] == "abort"
        llm.engines.resume()

    def test_wait_needs_somebody_who_steps_the_engine(self, llm):
        stream = llm.stream("say abc", DELTAS)
        next(stream)
        if llm.here:
            words = "mode: expected 'abort' or 'keep' in an engine that runs in this process"
            with pytest.raises(RequestError, match=words):
                llm.engines.pause("wait")
            assert not llm.engines.is_paused()
        else:
            llm.engines.pause("wait")  # returns when it has ended
            llm.engines.resume()
        assert [output.outputs[0].finish_reason for output in stream][-1] == "length"

    def test_a_step_of_a_paused_engine_returns_at_once(self, llm):
        engine = llm.llm_engine
        llm.engines.pause("keep")
        engine.add_request("a", "say abc", GREEDY)
        assert engine.step() == []
        llm.engines.resume()
        while engine.has_unfinished_requests():
            engine.step()

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (
                lambda llm: llm.engines.pause("soon"),
                'mode: expected "abort" or "wait" or "keep", got',
            ),
            (lambda llm: llm.sleep(9), "level: expected 0, 1 or 2, got 9"),
            (lambda llm: llm.sleep("1"), "level: expected a whole number, got '1'"),
            (lambda llm: llm.wake_up(["moon"]), "tags: expected some of weights, kv_cache, sched"),
            (lambda llm: llm.collective_rpc("close"), "method: expected one of plugin_meters, "),
            (
                lambda llm: llm.collective_rpc("stop_profile", args=[1]),
                "stop_profile: expected 0 arguments, got 1",
            ),
            (
                lambda llm: llm.llm_engine.call_utility("close"),
                "method: expected one of call_part, ",
            ),
            (
                lambda llm: llm.llm_engine.call_utility("resume", 1),
                "resume: expected 0 arguments, got 1",
            ),
        ],
    )
    def test_wrong_words_are_refused_and_change_nothing(self, llm, call, words):
        with pytest.raises(RequestError) as error:
            call(llm)
        assert str(error.value).startswith(words)
        assert not llm.engines.is_paused()
        assert not llm.engines.is_sleeping()


class TestSleep:
    @pytest.mark.parametrize("level", [0, 1, 2])
    def test_the_same_tokens_after_it(self, llm, level):
        before = tokens(llm)
        llm.sleep(level)
        assert llm.engines.is_sleeping() is (level > 0)
        with pytest.raises(HardpointError, match=r"call engines.resume\(\) first, or wake_up\(\)"):
            llm.generate("say abc", GREEDY)
        assert (
            llm.engines.scheduler_stats().num_waiting == 0
        )  # it was ended while the model was gone
        llm.wake_up()
        assert not llm.engines.is_sleeping()
        assert not llm.engines.is_paused()
        assert tokens(llm) == before

    def test_part_by_part(self, llm):
        llm.sleep(2)
        with pytest.raises(HardpointError, match=r"the engine sleeps \(weights, kv_cache\)"):
            llm.engines.resume()
        with pytest.raises(HardpointError, match=r"the engine sleeps already \(weights, kv_c"):
            llm.sleep(1)
        llm.wake_up(["weights"])
        assert llm.engines.is_sleeping()
        assert llm.engines.is_paused()
        llm.wake_up(("kv_cache",))
        assert not llm.engines.is_paused()


class TestTheRest:
    def test_caches(self, llm):
        tokens(llm)
        llm.reset_prefix_cache()
        with pytest.raises(HardpointError, match="there is no encoder cache"):
            llm.engines.reset_encoder_cache()

    def test_workers(self, llm):
        (meters,) = llm.collective_rpc("plugin_meters", timeout=PATIENCE_S)
        assert "temperature" in meters
        with pytest.raises(RequestError, match="timeout: expected a number > 0, got -1"):
            llm.collective_rpc("plugin_meters", timeout=-1)

    def test_adapters(self, llm):
        assert (llm.adapters.list(), llm.adapters.remove(1), llm.adapters.pin(1)) == (
            [],
            False,
            False,
        )
        with pytest.raises(RequestError, match="^lora: expected none, as adapters.max_loras is 0"):
            llm.adapters.add(LoRARequest("poems", 1))

    def test_profiles(self, llm):
        llm.debug.start_profile()
        tokens(llm)
        (path,) = llm.debug.stop_profile()
        assert Path(path).stat().st_size > 1000
        with pytest.raises(HardpointError, match="no profile is being recorded"):
            llm.debug.stop_profile()


@pytest.mark.nightly
async def test_a_profile_on_an_event_loop(scripted, tmp_path):
    extra = {"engine": {"profile_dir": str(tmp_path)}}
    async with AsyncLLM(config=scripted_config(scripted, extra)) as llm:
        await llm.debug.start_profile()
        (path,) = await llm.debug.stop_profile()
        assert Path(path).exists()


async def test_on_an_event_loop(scripted):
    extra = {"plugins": ENABLED}
    params = msgspec.structs.replace(LONG, max_tokens=8)
    async with AsyncLLM(config=scripted_config(scripted, extra)) as llm:

        async def whole() -> list[int]:
            async for output in llm.generate("say abc", params):
                last = output
            return last.outputs[0].token_ids

        before = await whole()
        await llm.engines.pause("keep")
        assert await llm.engines.is_paused()
        waiting = asyncio.create_task(whole())
        await asyncio.sleep(0.1)
        assert not waiting.done()  # another task may resume, so it waits
        await llm.engines.resume()
        assert await asyncio.wait_for(waiting, PATIENCE_S) == before
        running = asyncio.create_task(whole())
        await asyncio.sleep(0)
        await llm.engines.pause("wait")
        await llm.engines.resume()
        assert await asyncio.wait_for(running, PATIENCE_S) == before
        await llm.sleep(2)
        assert await llm.engines.is_sleeping()
        with pytest.raises(HardpointError, match="the engine sleeps already"):
            await llm.sleep(1)
        await llm.wake_up(["weights"])
        await llm.wake_up()
        assert not await llm.engines.is_sleeping()
        assert await whole() == before
        (meters,) = await llm.collective_rpc("plugin_meters")
        assert "temperature" in meters
        assert await llm.adapters.list() == []
        assert [await llm.adapters.remove(1), await llm.adapters.pin(1)] == [False, False]
        for refused in (
            llm.adapters.add(LoRARequest("poems", 1)),
            llm.engines.reset_encoder_cache(),
        ):
            with pytest.raises(HardpointError, match="there is no|adapters.max_loras is 0"):
                await refused
        await llm.reset_prefix_cache(recompute_running=True)


def test_both_faces_have_every_utility():
    inside = {"step_faults", "slow_plugins", "plugin_report"}  # parts of health() and metrics()
    inside |= {"live_change"}  # a step of plugins.change() and engines.set_config()
    faces = {LLM: (SyncGroups, SYNC_NAMES), AsyncLLM: (AsyncGroups, ASYNC_NAMES)}
    for face, (groups, places) in faces.items():
        types = get_type_hints(groups)
        missing = set()
        for name in UTILITIES.keys() - inside:
            group, _, member = places.get(name, name).rpartition(".")
            if not hasattr(types[group] if group else face, member):
                missing.add(name)
        # Of a request that runs beside its caller.
        assert missing == ({"why_waiting"} if face is LLM else set())
