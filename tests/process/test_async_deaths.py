"""AsyncLLM and the death of its engine: callers are notified, and a new one may serve."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.internals import engine_of, output_processor_of, states_of
from support.process.harness import (
    PATIENCE_S,
    alive,
    assert_quick,
    gone,
    hangs,
    holdings,
    in_step,
    nothing_left,
    process_config,
    wait_until,
)
from support.waiting import HeldSteps, until

from hardpoint import AsyncLLM, EngineClosedError, RequestOutputKind, SamplingParams
from hardpoint.errors import EngineDeadError
from hardpoint.process.child_processes.process import ChildProcess

SLOW = {"plugins": {"enable": ["support.plugins.slow:Slow"]}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
DELTA = RequestOutputKind.DELTA


def long(max_tokens: int = 30_000, slow: dict[str, Any] | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=DELTA,
        plugin_args=slow or {"slow": {"seconds": 0.002}},
    )


def pid_of(llm: AsyncLLM) -> int:
    return llm.engines.pid


@contextlib.asynccontextmanager
async def opened(folder, extra=None, **options):
    """An engine that is gone in the end, whatever became of it."""
    async with AsyncLLM(config=process_config(folder, extra), **options) as llm:
        yield llm
        pid = pid_of(llm)
    assert not alive(pid)


class Streams:
    """Requests that go on until something happens to them."""

    def __init__(self, llm: AsyncLLM, count: int, params: SamplingParams) -> None:
        self.tokens = [0] * count
        self.ended: list[float] = []
        self.reasons: list[str | None] = []
        self.tasks = [asyncio.create_task(self._read(llm, i, params)) for i in range(count)]

    async def _read(self, llm: AsyncLLM, index: int, params: SamplingParams) -> None:
        try:
            async for output in llm.generate([index + 1], params):
                self.tokens[index] += len(output.outputs[0].token_ids)
                if output.finished:
                    self.reasons.append(output.outputs[0].finish_reason)
        finally:
            self.ended.append(time.monotonic())

    async def running(self) -> None:
        """Wait until each has got tokens."""
        while not all(self.tokens):
            assert not self.ended
            await asyncio.sleep(0.01)

    async def errors(self) -> list[BaseException | None]:
        """Wait for all; return their errors."""
        return list(await asyncio.gather(*self.tasks, return_exceptions=True))


async def text(llm: AsyncLLM, prompt: str = "say abc") -> str:
    async for output in llm.generate(prompt, GREEDY):
        last = output
    return last.outputs[0].text


async def kill(pid: int, number: int = signal.SIGKILL) -> float:
    os.kill(pid, number)
    return time.monotonic()


async def noticed(llm: AsyncLLM, pid: int) -> None:
    """Wait until the death of an engine has come through; another one may run already."""
    await until(lambda: not llm.is_running or pid_of(llm) != pid, "the news")


async def kill_noticed(llm: AsyncLLM) -> None:
    """Kill the engine and wait until that has come through."""
    pid = pid_of(llm)
    await kill(pid)
    await noticed(llm, pid)


def gated(gate: Path) -> dict[str, Any]:
    """The configuration of an engine that does not get ready while there is a file."""
    return {
        "plugins": {"enable": ["support.plugins.slow:Slow", "support.plugins.pacing:Gate"]},
        "plugin": {"gate": {"path": str(gate)}},
    }


async def test_engine_killed_under_32_streams_is_reported_to_each(endless):
    async with opened(endless, SLOW) as llm:
        streams = Streams(llm, 32, long())
        await streams.running()
        call = asyncio.create_task(llm.engines.scheduler_stats())
        killed = await kill(pid_of(llm))
        for error in await streams.errors():
            assert type(error) is EngineDeadError
            assert "was killed by signal 9" in str(error)
            ends = ("the request may be sent again", "was in the step in which it died")
            assert str(error).endswith(ends)
        assert_quick("engine killed, streams notified", max(streams.ended) - killed)
        with contextlib.suppress(EngineDeadError):
            await call  # either was quicker
        assert llm.errored
        assert not llm.is_running
        assert "was killed by signal 9" in str(llm.dead_error)
        for ask in (
            text(llm),
            llm.engines.scheduler_stats(),
            llm.plugins.set_policy("fair"),
            llm.plugins.health(),
        ):
            with pytest.raises(EngineDeadError, match="was killed by signal 9"):
                await ask


async def test_calls_in_flight_are_notified_too(endless, tmp_path):
    async with opened(endless, SLOW) as llm:
        streams = Streams(llm, 1, hangs(tmp_path / "begun"))
        await asyncio.to_thread(in_step, tmp_path / "begun")
        calls = [asyncio.create_task(llm.engines.scheduler_stats()) for _ in range(10)]
        await asyncio.sleep(0.1)
        killed = await kill(pid_of(llm))
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert type(error) is EngineDeadError
        assert_quick("engine killed, 10 calls notified", time.monotonic() - killed)
        assert [type(error) for error in await streams.errors()] == [EngineDeadError]


@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.nightly)])
async def test_a_dead_engine_is_started_again(scripted, tmp_path, deaths):
    """Weights, policy and everything else are there again; in-flight requests have failed."""
    gate = tmp_path / "closed"
    settings = gated(gate) | {"engine": {"resume": "off"}}
    async with opened(scripted, settings, restart="on_failure") as llm:
        await llm.plugins.set_policy("fair")
        for times in range(1, deaths + 1):
            streams = Streams(llm, 32, long(400, {"slow": {"seconds": 0.05}}))
            await streams.running()
            first = pid_of(llm)
            gate.touch()
            killed = await kill(first)
            assert {type(error) for error in await streams.errors()} == {EngineDeadError}
            assert_quick("restart: last of 32 notified", max(streams.ended) - killed)
            assert pid_of(llm) == first  # so they were notified before there was a new engine
            gate.unlink()
            assert await text(llm) == " abc abc abc"  # waits for the new engine
            assert_quick("restart: next request answered", time.monotonic() - killed)
            assert pid_of(llm) != first
            assert not alive(first)
            assert llm.is_running
            assert not llm.errored
            assert (await llm.plugins.health()).restarts == times
            assert (await llm.engines.scheduler_stats()).num_running == 0
        assert llm.config.scheduler.policy == "fair"


async def test_an_engine_that_dies_too_often_stays_dead(scripted):
    settings = {"engine": {"max_restarts_per_minute": 1}}
    async with opened(scripted, settings, restart="on_failure") as llm:
        await kill_noticed(llm)
        assert await text(llm) == " abc abc abc"
        await kill(pid_of(llm))
        await until(lambda: llm.errored, "the end")
        with pytest.raises(EngineDeadError):
            await text(llm)


def test_an_engine_that_dies_before_its_first_use_is_known_to_be_dead(scripted):
    llm = AsyncLLM(config=process_config(scripted))
    assert llm.is_running
    os.kill(pid_of(llm), signal.SIGKILL)
    wait_until(lambda: not llm.is_running, PATIENCE_S, "the news")
    assert llm.errored
    assert "was killed by signal 9" in str(llm.dead_error)
    with pytest.raises(EngineDeadError, match="was killed by signal 9"):
        asyncio.run(text(llm))
    llm.close()


@pytest.mark.nightly
async def test_an_engine_killed_while_it_starts_again_is_started_once_more(scripted, tmp_path):
    gate = tmp_path / "closed"

    async with opened(scripted, gated(gate), restart="on_failure") as llm:
        first, others = pid_of(llm), psutil.Process().children()
        gate.touch()  # so that the second one does not get ready
        await kill_noticed(llm)
        assert not llm.errored
        request = asyncio.create_task(text(llm))
        second = await newborn(others)
        await kill(second)
        gate.unlink()
        assert await request == " abc abc abc"
        assert pid_of(llm) not in (first, second)


async def newborn(others: list[psutil.Process]) -> int:
    """Wait for a child process that is none of the others."""
    pids = []

    def look():
        pids[:] = [child.pid for child in psutil.Process().children() if child not in others]
        return pids

    await until(look, "another engine process")
    return pids[0]


async def test_sigterm_drains_the_streams(endless, tmp_path):
    async with opened(endless, SLOW | {"engine": {"drain_seconds": 600.0}}) as llm:
        held = HeldSteps(tmp_path)
        streams = Streams(llm, 4, long(200, held.slow(0.3)))
        await streams.running()
        await kill(pid_of(llm), signal.SIGTERM)
        held.let_go()
        assert await streams.errors() == [None] * 4
        assert streams.reasons == ["length"] * 4
        assert streams.tokens == [200] * 4
        await asyncio.to_thread(gone, pid_of(llm))
        with pytest.raises(EngineDeadError):
            await text(llm)


async def test_closing_tells_those_who_wait(endless, monkeypatch):
    """At once, and not when their requests would have ended, or the engine is killed."""
    monkeypatch.setattr(ChildProcess.close, "__defaults__", (60.0,))  # grace_s
    plugins = {"enable": ["support.plugins.slow:Slow", "support.plugins.pacing:Unhurried"]}

    llm = AsyncLLM(config=process_config(endless, {"plugins": plugins}))
    streams = Streams(llm, 32, long())
    await streams.running()
    began = time.monotonic()
    await llm.aclose()
    assert {type(error) for error in await streams.errors()} == {EngineClosedError}
    assert_quick("closed under 32 streams", time.monotonic() - began)
    with pytest.raises(EngineClosedError):
        await text(llm)


@pytest.mark.nightly
async def test_cancelled_tasks_end_their_requests(endless):
    async with opened(endless, SLOW) as llm:
        streams = Streams(llm, 16, long())
        await streams.running()
        for task in streams.tasks:
            task.cancel()
        await streams.errors()
        began = time.monotonic()
        while (await llm.engines.scheduler_stats()).num_running:
            await asyncio.sleep(0.005)
        assert_quick("cancelled, engine idle", time.monotonic() - began)
        assert (await llm.engines.scheduler_stats()).kv_cache_usage == 0
        assert not states_of(output_processor_of(engine_of(llm)))


# Nothing remains


@pytest.mark.nightly
def test_nothing_remains(endless):
    async def use(llm: AsyncLLM) -> None:
        streams = Streams(llm, 8, long())
        await streams.running()
        for task in streams.tasks:
            task.cancel()
        await streams.errors()

    def closed():
        async def main():
            async with opened(endless, SLOW) as llm:
                await use(llm)

        asyncio.run(main())

    def collected():
        """The loop has ended, and was not closed."""
        llm = AsyncLLM(config=process_config(endless, SLOW))
        pid = pid_of(llm)
        asyncio.run(use(llm))
        del llm
        gc.collect()
        gone(pid)

    def killed():
        async def main():
            async with opened(endless, SLOW, restart="on_failure") as llm:
                await use(llm)
                await kill_noticed(llm)
                await use(llm)

        asyncio.run(main())

    closed()
    before = holdings()
    for way in (closed, collected, killed):
        way()
        nothing_left(before)
