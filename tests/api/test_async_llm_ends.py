"""AsyncLLM: event loops, ends and openings."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time

import pytest
from support.async_requests import GREEDY, collect, config, endless
from support.waiting import PATIENCE_S, alive, until, wait_until

from hardpoint import (
    AsyncLLM,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    HardpointError,
)
from hardpoint.testing import write_scripted_model
from hardpoint.toolkit.limited import LimitedProcess

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(
        tmp_path_factory.mktemp("model"),
        {"say abc": " abc abc abc"},
        max_position_embeddings=1 << 15,
    )


class TestLoops:
    def test_a_loop_that_is_over_is_told_too(self, folder):
        with contextlib.closing(AsyncLLM(config=config(folder))) as llm:
            asyncio.run(collect(llm.generate("say abc", GREEDY)))
            with pytest.raises(HardpointError, match="which is closed; open one engine per event"):
                asyncio.run(llm.plugins.health())


class TestEnd:
    async def test_close_tells_whoever_waits(self, folder):
        llm = AsyncLLM(config=config(folder))
        tasks = [asyncio.create_task(collect(llm.generate("x", endless()))) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            while (await llm.engines.scheduler_stats()).num_running < 3:
                await asyncio.sleep(0.01)
        pid = llm.engines.pid
        llm.close()
        llm.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineClosedError)
        assert not llm.is_running
        calls = (llm.plugins.health(), llm.abort("x"), collect(llm.generate("x")))
        for call in (*calls, collect(llm.chat(HI)), llm.model.apply_chat_template(HI)):
            with pytest.raises(EngineClosedError, match="^the engine is closed$"):
                await call
        with pytest.raises(EngineClosedError, match="^the engine is closed$"):
            llm.open_conversation()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    async def test_close_while_a_chat_template_is_rendered(self, folder, monkeypatch):
        ask, begun, closed = LimitedProcess.ask, threading.Event(), threading.Event()

        def held(*args, **options):
            begun.set()
            assert closed.wait(PATIENCE_S)
            return ask(*args, **options)

        monkeypatch.setattr(LimitedProcess, "ask", held)
        async with AsyncLLM(config=config(folder)) as llm:
            chat = asyncio.create_task(collect(llm.chat(HI)))
            await until(begun.is_set, "the template")
            await llm.aclose()
            closed.set()
            with pytest.raises(EngineClosedError, match="^the engine is closed$"):
                await chat

    async def test_a_death_is_told_to_all_at_once(self, folder):
        async with AsyncLLM(config=config(folder)) as llm:
            pid, streaming = llm.engines.pid, set()

            async def stream(number):
                async for _ in llm.generate([number + 1], endless(0.001)):
                    streaming.add(number)

            async def one(number):
                with pytest.raises(EngineDeadError) as error:
                    await stream(number)
                return time.monotonic(), str(error.value)

            tasks = [asyncio.create_task(one(number)) for number in range(32)]
            await until(lambda: len(streaming) == 32, "all to stream")
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            for told, words in await asyncio.gather(*tasks):
                assert told - began < PATIENCE_S
                assert words.startswith(
                    f"the engine process (pid {pid}) was killed by signal 9 (SIGKILL)"
                )
                ends = ("the request may be sent again", "was in the step in which it died")
                assert words.endswith(ends)
            assert (llm.is_running, llm.errored) == (False, True)
            assert str(pid) in str(llm.dead_error)
            for call in (
                llm.plugins.health(),
                llm.engines.scheduler_stats(),
                collect(llm.generate("x")),
                collect(llm.chat(HI)),
            ):
                with pytest.raises(EngineDeadError, match="was killed by signal 9"):
                    await call

    def test_a_death_before_the_first_use_is_told_too(self, folder):
        llm = AsyncLLM(config=config(folder))
        os.kill(llm.engines.pid, signal.SIGKILL)
        wait_until(lambda: not llm.is_running, PATIENCE_S, "the word of its death")
        with pytest.raises(EngineDeadError, match="was killed by signal 9"):
            llm.open_conversation()
        with pytest.raises(EngineDeadError, match="was killed by signal 9"):
            asyncio.run(collect(llm.generate("x", GREEDY)))
        llm.close()

    def test_one_that_nobody_holds_is_given_back(self, folder):
        async def main():
            llm = AsyncLLM(config=config(folder))
            await collect(llm.generate("say abc", GREEDY))
            return llm.engines.pid

        pid = asyncio.run(main())
        gc.collect()
        wait_until(lambda: not alive(pid), PATIENCE_S, f"the end of process {pid}")


class TestOpening:
    def test_it_never_runs_in_this_process(self, folder):
        with pytest.raises(ConfigError, match=r"engine.in_process: expected false, for AsyncLLM"):
            AsyncLLM(config=config(folder, engine={"in_process": True}))

    def test_restart_is_one_of_two(self, folder):
        with pytest.raises(ConfigError, match='restart: expected "never" or "on_failure", got "?'):
            AsyncLLM(config=config(folder), restart="always")

    def test_what_the_engine_refuses_is_raised_here(self, folder):
        small = config(folder, kv_cache={"num_blocks": 2})
        with pytest.raises(ConfigError, match="kv_cache.num_blocks: one request of 32768 tokens"):
            AsyncLLM(config=small)
