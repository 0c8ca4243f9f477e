"""A dead engine is restarted, if enabled: with its weights and the latest configuration."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import time

import pytest
from support.internals import client_of, engine_of
from support.waiting import PATIENCE_S, alive, until, until_told_of_its_death

from hardpoint import (
    AsyncLLM,
    EngineClosedError,
    EngineDeadError,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.core.client.restarts import RestartBudget
from hardpoint.core.frontend.lifecycle import Restarter
from hardpoint.plugins import ModelError
from hardpoint.testing import scripted_config

LIMIT = r"not restarted: 1 restart within a minute \(engine\.max_restarts_per_minute\)"
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
ENDLESS = SamplingParams(
    temperature=0.0,
    max_tokens=400,
    ignore_eos=True,
    output_kind=RequestOutputKind.DELTA,
    plugin_args={"slow": {"seconds": 0.05}},
)


def pid_of(llm) -> int:
    return llm.engine_pid


async def collect(outputs) -> list:
    return [output async for output in outputs]


async def kill(llm) -> None:
    """Kill the engine, and wait until that is known."""
    pid = pid_of(llm)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not llm.is_running or pid_of(llm) != pid, "the word of its death")


async def serves(llm) -> bool:
    return (await collect(llm.generate("say abc", GREEDY)))[-1].outputs[0].text == " abc abc abc"


def test_requests_in_flight_fail_and_the_next_are_served(scripted):
    async def main():
        config = scripted_config(scripted, {"plugins": {"enable": ["support.plugins.slow:Slow"]}})
        async with AsyncLLM(config=config, restart="on_failure") as llm:
            await llm.set_policy("fair", {"tag": "team", "weights": {"a": 3.0}})
            manifest, first = llm.manifest, pid_of(llm)
            streams = [llm.generate([i + 1] * 3, ENDLESS) for i in range(8)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            tasks = [asyncio.create_task(collect(stream)) for stream in streams]
            await asyncio.sleep(0)
            os.kill(first, signal.SIGKILL)
            began = time.monotonic()
            failures = await asyncio.gather(*tasks, return_exceptions=True)
            assert time.monotonic() - began < 10
            for failure in failures:
                assert type(failure) is EngineDeadError
                # Between two steps it may, and in one it was.
                ends = ("the request may be sent again", "was in the step in which it died")
                assert "(SIGKILL)" in str(failure)
                assert str(failure).endswith(ends)
            assert (llm.is_running, llm.errored) == (False, False)

            # sent again while the new engine starts, they wait for it
            assert all(await asyncio.gather(*(serves(llm) for _ in range(4))))
            assert pid_of(llm) != first
            assert llm.is_running
            health = await llm.health()
            assert (health.restarts, health.ok) == (1, True)

            # what was changed lives on, and can be changed again
            assert llm.manifest == manifest
            await llm.set_policy("priority")
            assert llm.manifest.generation == manifest.generation + 1
            await kill(llm)
            assert await serves(llm)
            assert llm.config.scheduler.policy == "priority"
            assert (await llm.health()).restarts == 2

    asyncio.run(main())


def test_one_that_is_dead_when_a_request_comes_is_restarted(scripted):
    """Nobody was in flight, so nobody needs to hear of it."""

    async def main():
        async with AsyncLLM(config=scripted_config(scripted), restart="on_failure") as llm:
            assert await serves(llm)
            os.kill(pid_of(llm), signal.SIGKILL)
            until_told_of_its_death(client_of(llm))
            assert llm.is_running  # the loop has had no time to hear of it
            assert await serves(llm)
            assert (await llm.health()).restarts == 1

    asyncio.run(main())


def test_a_program_that_went_elsewhere_gets_the_same_engine_again(scripted, tmp_path, monkeypatch):
    (tmp_path / "model").symlink_to(scripted)
    monkeypatch.chdir(tmp_path)

    async def main():
        async with AsyncLLM(config=scripted_config("model"), restart="on_failure") as llm:
            assert await serves(llm)
            monkeypatch.chdir("/")
            monkeypatch.setattr(sys, "path", [*sys.path, "/elsewhere"])
            await kill(llm)
            assert await serves(llm)
            assert (await llm.health()).restarts == 1
            assert os.readlink(f"/proc/{pid_of(llm)}/cwd") == str(tmp_path)

    asyncio.run(main())


def test_too_many_deaths_are_the_end(scripted, caplog):
    async def main():
        config = scripted_config(scripted, {"engine": {"max_restarts_per_minute": 1}})
        async with AsyncLLM(config=config, restart="on_failure") as llm:
            assert await serves(llm)
            await kill(llm)
            assert await serves(llm)
            last = pid_of(llm)
            await kill(llm)
            assert llm.errored
            ended = rf"\(pid {last}\) was killed by signal 9 .*; {LIMIT}$"
            for call in (llm.health(), serves(llm)):
                with pytest.raises(EngineDeadError, match=ended):
                    await call
            assert re.search(ended, str(llm.dead_error))
        told = [record for record in caplog.records if record.levelname == "ERROR"]
        assert [bool(re.search(ended, record.getMessage())) for record in told] == [True]

    asyncio.run(main())


def test_closing_while_it_is_restarted(scripted):
    async def main():
        llm = AsyncLLM(config=scripted_config(scripted), restart="on_failure")
        assert await serves(llm)
        restarter, started, go_on = engine_of(llm)._restarter, [], threading.Event()
        connect = restarter._connect

        def held_up(parts):
            started.append(connect(parts))
            assert go_on.wait(PATIENCE_S)
            return started[0]

        restarter._connect = held_up
        await kill(llm)
        waiting = asyncio.create_task(serves(llm))
        await until(lambda: started, "the new engine")
        await llm.aclose()
        go_on.set()
        with pytest.raises(EngineClosedError):
            await waiting
        assert not alive(started[0][0].pid)

    asyncio.run(main())


# The restarter alone, with engines that the test plays


class Client:
    pid = 7

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def restarter(outcomes, *, clock=lambda: 0.0, most=3, enabled=True) -> Restarter:
    """One whose starts come to `outcomes`, in order."""
    remaining = iter(outcomes)

    def connect(_parts):
        outcome = next(remaining)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, "relay"

    return Restarter(connect, RestartBudget(enabled=enabled, max_per_minute=most, clock=clock))


def test_no_more_than_allowed_within_a_minute():
    now = [0.0]
    limited = restarter([], clock=lambda: now[0])
    allowed = []
    for second in (0, 10, 20, 30, 59, 60, 61, 70, 75, 81):
        now[0] = float(second)
        allowed.append(limited.may_restart())
    assert allowed == [True, True, True, False, False, True, False, True, False, True]


def test_never_is_never():
    assert not restarter([], enabled=False).may_restart()


def test_one_that_dies_while_it_starts_is_tried_again():
    client = Client()
    several = restarter([EngineDeadError("killed"), EngineDeadError("killed"), client])
    assert several.may_restart()
    assert asyncio.run(several.restart("parts")) == (client, "relay")
    assert several.count == 1


def test_but_not_for_ever():
    limited = restarter([EngineDeadError(f"killed {n}") for n in range(5)], most=2)
    assert limited.may_restart()
    words = r"^killed 1; not restarted: 2 restarts within a minute \(engine\.max_res.*minute\)$"
    with pytest.raises(EngineDeadError, match=words):
        asyncio.run(limited.restart("parts"))
    assert limited.count == 0


def test_the_limit_is_not_blamed_where_there_is_none():
    for never in (restarter([], enabled=False), restarter([])):
        never.give_up(error := EngineDeadError("killed"))
        assert str(error) == "killed"


def test_what_cannot_be_built_is_not_tried_again():
    broken = restarter([ModelError("the file is gone"), Client()])
    with pytest.raises(ModelError, match="the file is gone"):
        asyncio.run(broken.restart("parts"))


def test_one_that_was_closed_meanwhile_is_closed():
    client = Client()
    late = restarter([client])
    late.close()
    assert not late.may_restart()
    with pytest.raises(EngineClosedError, match="closed while it was restarted"):
        asyncio.run(late.restart("parts"))
    assert client.closed
