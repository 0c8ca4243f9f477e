"""A dead engine is restarted, if enabled: with its weights and the latest configuration."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time

import pytest
from support.async_requests import GREEDY, collect
from support.waiting import PATIENCE_S, until, wait_until

from hardpoint import (
    AsyncLLM,
    EngineClosedError,
    EngineDeadError,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.replicas.restarts import RestartBudget
from hardpoint.testing import scripted_config

LIMIT = r"not restarted: 1 restart within a minute \(engine\.max_restarts_per_minute\)"
ENDLESS = SamplingParams(
    temperature=0.0,
    max_tokens=400,
    ignore_eos=True,
    output_kind=RequestOutputKind.DELTA,
    plugin_args={"slow": {"seconds": 0.05}},
)


def pid_of(llm) -> int:
    return llm.engines.pid


async def kill(llm) -> None:
    """Kill the engine, and wait until that is known."""
    pid = pid_of(llm)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not llm.is_running or pid_of(llm) != pid, "the word of its death")


async def serves(llm) -> bool:
    return (await collect(llm.generate("say abc", GREEDY)))[-1].outputs[0].text == " abc abc abc"


async def test_requests_in_flight_fail_and_the_next_are_served(scripted):
    config = scripted_config(
        scripted,
        {
            "plugins": {"enable": ["support.plugins.slow:Slow"]},
            "engine": {"resume": "off"},
        },
    )
    async with AsyncLLM(config=config, restart="on_failure") as llm:
        await llm.plugins.set_policy("fair", {"tag": "team", "weights": {"a": 3.0}})
        manifest, first = llm.plugins.manifest, pid_of(llm)
        streams = [llm.generate([i + 1] * 3, ENDLESS) for i in range(8)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        began = time.monotonic()
        failures = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - began < PATIENCE_S / 2
        for failure in failures:
            assert type(failure) is EngineDeadError
            # Between two steps it may, and in one it was.
            ends = ("the request may be sent again", "was in the step in which it died")
            assert "(SIGKILL)" in str(failure)
            assert str(failure).endswith(ends)
        assert not llm.errored

        # sent again while the new engine starts, they wait for it
        assert all(await asyncio.gather(*(serves(llm) for _ in range(4))))
        assert pid_of(llm) != first
        assert llm.is_running
        health = await llm.plugins.health()
        assert (health.restarts, health.ok) == (1, True)

        # what was changed lives on, and can be changed again
        assert llm.plugins.manifest == manifest
        await llm.plugins.set_policy("priority")
        assert llm.plugins.manifest.generation == manifest.generation + 1
        await kill(llm)
        assert await serves(llm)
        assert llm.config.scheduler.policy == "priority"
        assert (await llm.plugins.health()).restarts == 2


async def test_one_that_is_dead_when_a_request_comes_is_restarted(scripted):
    """Nobody was in flight, so nobody needs to hear of it."""
    async with AsyncLLM(config=scripted_config(scripted), restart="on_failure") as llm:
        assert await serves(llm)
        first = pid_of(llm)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not llm.is_running, PATIENCE_S, "the report of its death")
        assert await serves(llm)
        assert (await llm.plugins.health()).restarts == 1


async def test_a_program_that_went_elsewhere_gets_the_same_engine_again(
    scripted, tmp_path, monkeypatch
):
    (tmp_path / "model").symlink_to(scripted)
    monkeypatch.chdir(tmp_path)

    async with AsyncLLM(config=scripted_config("model"), restart="on_failure") as llm:
        assert await serves(llm)
        monkeypatch.chdir("/")
        monkeypatch.setattr(sys, "path", [*sys.path, "/elsewhere"])
        await kill(llm)
        assert await serves(llm)
        assert (await llm.plugins.health()).restarts == 1
        assert os.readlink(f"/proc/{pid_of(llm)}/cwd") == str(tmp_path)


async def test_too_many_deaths_are_the_end(scripted, caplog):
    config = scripted_config(scripted, {"engine": {"max_restarts_per_minute": 1}})
    async with AsyncLLM(config=config, restart="on_failure") as llm:
        assert await serves(llm)
        await kill(llm)
        assert await serves(llm)
        last = pid_of(llm)
        await kill(llm)
        await until(lambda: llm.errored, "the end of restarts")
        ended = rf"\(pid {last}\) was killed by signal 9 .*; {LIMIT}$"
        for call in (llm.plugins.health(), serves(llm)):
            with pytest.raises(EngineDeadError, match=ended):
                await call
        assert re.search(ended, str(llm.dead_error))
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [bool(re.search(ended, record.getMessage())) for record in told] == [True]


async def test_closing_while_it_is_restarted(scripted):
    llm = AsyncLLM(config=scripted_config(scripted), restart="on_failure")
    assert await serves(llm)
    await kill(llm)
    waiting = asyncio.create_task(serves(llm))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await llm.aclose()
    assert time.monotonic() - began < PATIENCE_S / 2
    with pytest.raises(EngineClosedError):
        await waiting


# How often


def test_no_more_than_allowed_within_a_minute():
    now = [0.0]
    limited = RestartBudget(enabled=True, max_per_minute=3, clock=lambda: now[0])
    allowed = []
    for second in (0, 10, 20, 30, 59, 60, 61, 70, 75, 81):
        now[0] = float(second)
        allowed.append(limited.may_restart())
    assert allowed == [True, True, True, False, False, True, False, True, False, True]
    assert limited.is_spent


def test_each_engine_of_another_machine_has_a_limit_of_its_own():
    limited = RestartBudget(enabled=True, max_per_minute=1, clock=lambda: 0.0)
    assert [limited.may_restart(rank) for rank in (7, 7, None, None, 8, 7)] == [
        True, False, True, False, True, False,
    ]  # fmt: skip


def test_never_is_never():
    never = RestartBudget(enabled=False, max_per_minute=3)
    assert not never.may_restart()
    assert not never.is_spent
