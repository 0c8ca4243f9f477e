"""Several engine processes behind one client: the tokens of one engine, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.driving import varied_jobs
from support.internals import engine_of
from support.process.harness import process_config
from support.searching import soak_seconds
from support.waiting import PATIENCE_S, HeldSteps, until, wait_until

from hardpoint import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineDeadError,
    HardpointError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    plugins,
)
from hardpoint.plugins import LogitsProcessor, Phase

JOBS = 24
SECONDS = 0.002
SLOW = {"slow": {"seconds": SECONDS}}
HERE = __name__
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


class Kills(LogitsProcessor):
    """Ends the process in the step before a token, once the file `seen` exists if it has one."""

    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        at: int
        seen: str = ""

    def apply(self, logits, rows):
        for request, arguments in zip(rows.requests, rows.arguments(), strict=True):
            if len(request.output_token_ids) == arguments.at:
                if arguments.seen:
                    wait_until(Path(arguments.seen).exists, PATIENCE_S, "the tokens before")
                os._exit(41)
        return logits


def config(scripted, data, **engine):
    return process_config(
        scripted,
        {
            "parallel": {"data": data},
            "engine": engine,
            "plugins": {"enable": ["support.plugins.slow:Slow", f"{HERE}:Kills"]},
        },
    )


def mixed() -> tuple[list, list[SamplingParams]]:
    """Prompts and parameters of requests of many kinds that take some time."""
    jobs = [job for job in varied_jobs(40) if job[2].n <= 2][:JOBS]
    params = [msgspec.structs.replace(job[2], plugin_args=SLOW) for job in jobs]
    prompts = [{"prompt_token_ids": p} if isinstance(p, list) else p for _, p, _ in jobs]
    return prompts, params


def results(llm) -> list:
    """Run the mixed requests; return all that a user sees of each."""
    prompts, params = mixed()
    return [
        [(c.token_ids, c.text, c.finish_reason, c.error, c.logprobs) for c in output.outputs]
        for output in llm.generate(prompts, params)
    ]


@pytest.fixture(scope="module")
def expected(scripted):
    with LLM(config=config(scripted, 1)) as llm:
        return results(llm)


@pytest.mark.nightly
def test_several_engines_give_the_tokens_of_one(scripted, expected):
    with LLM(config=config(scripted, 3)) as llm:
        assert results(llm) == expected
        shares = [engine.scheduler_stats().prefix_cache.requests for engine in llm.engines]
        assert sum(shares) == sum(map(len, expected))
        assert min(shares) > 0
        assert llm.engines.scheduler_stats().prefix_cache.requests == sum(shares)


def kill_after(llm, seconds: float, rng: random.Random) -> threading.Thread:
    """Kill some engine after a time, in a thread."""

    def run() -> None:
        time.sleep(seconds)
        if victims := [e.pid for e in llm.engines if e.pid is not None]:
            os.kill(rng.choice(victims), signal.SIGKILL)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.nightly
def test_a_kill_at_any_time_changes_nothing(scripted, expected):
    rng = random.Random(4)
    settings = config(scripted, 3, restart="on_failure", max_resumes=9, max_restarts_per_minute=99)
    with LLM(config=settings) as llm:
        for step in range(0, 8, 3):
            killer = kill_after(llm, 0.05 * step, rng)
            assert results(llm) == expected, f"killed after {0.05 * step:g} s"
            killer.join()
        wait_until(lambda: all(engine.pid for engine in llm.engines), PATIENCE_S, "all engines")
        assert llm.plugins.health().restarts >= 1
        assert results(llm) == expected


@contextlib.contextmanager
def scaled_at_random(llm, rng: random.Random) -> Iterator[list[str]]:
    """Scale between one engine and four meanwhile; yields why that failed, where it did."""
    over, refused = threading.Event(), []

    def run() -> None:
        for count in itertools.cycle([4, 2, 1]):
            if over.wait(rng.uniform(1.0, 6.0)):
                return
            try:
                llm.engines.scale(count)
            except HardpointError as error:  # of an engine that was killed while it started
                refused.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield refused
    finally:
        over.set()
        thread.join()


@pytest.mark.nightly
def test_kills_at_random_while_scaled(scripted, expected):
    rng = random.Random(5)
    settings = config(
        scripted, 1, restart="on_failure", max_resumes=99, max_restarts_per_minute=999
    )
    ends = time.monotonic() + soak_seconds()
    runs = 0
    with LLM(config=settings) as llm, scaled_at_random(llm, rng) as refused:
        while time.monotonic() < ends:
            killer = kill_after(llm, rng.uniform(0.0, 6.0), rng)
            assert results(llm) == expected, f"after {runs} runs; {refused}"
            killer.join()
            runs += 1
    assert all("killed by signal 9" in reason for reason in refused), refused


async def test_streams_go_on_where_they_were(scripted, tmp_path):
    """Each piece comes once, of an engine that is stopped, too."""
    held = HeldSteps(tmp_path)
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=60,
            ignore_eos=True,
            stop=["zz"],
            output_kind=RequestOutputKind.DELTA,
        )
        for seed in range(6)
    ]

    def events() -> list[asyncio.Event]:
        return [asyncio.Event() for _ in range(6)]

    def all_of(llm, params, begun) -> asyncio.Future[list[str]]:
        return asyncio.gather(*(pieces(llm, *pair) for pair in zip(params, begun, strict=True)))

    async def pieces(llm, request_params, has_begun) -> str:
        texts = []
        async for output in llm.generate("say abc", request_params):
            texts.append(output.outputs[0].text)
            has_begun.set()
        return "".join(texts)

    settings = config(scripted, 2, hung_process_seconds=2.0)
    async with AsyncLLM(config=settings) as llm:
        whole = await all_of(llm, params, events())
        slow = [msgspec.structs.replace(fast, plugin_args=held.slow(0.1)) for fast in params]
        resumed = all_of(llm, slow, begun := events())
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(llm.engines[1].pid, signal.SIGSTOP)
        held.let_go()
        assert await resumed == whole
        assert [engine.pid is None for engine in llm.engines] == [False, True]
        assert llm.is_running


@pytest.mark.nightly
def test_one_that_kills_engines_takes_two_and_ends_no_other(scripted, expected, tmp_path):
    """The others end with the very tokens that they would have had."""
    prompts, params = mixed()
    kills = {"at": 5, "seen": str(tmp_path / "seen")}
    bad = SamplingParams(max_tokens=30, ignore_eos=True, plugin_args={"kills": kills})
    settings = config(scripted, 3, restart="on_failure", max_resumes=3)
    outputs = {}
    with LLM(config=settings) as llm:
        engine = engine_of(llm)
        for number, job in enumerate([*zip(prompts, params, strict=True), ("say abc", bad)]):
            engine.add_request(str(number), *job)
        last = str(len(prompts))
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
                if output.request_id == last and len(output.outputs[0].token_ids) == 5:
                    (tmp_path / "seen").touch()
        got = [
            [(c.token_ids, c.text) for c in outputs[str(number)].outputs]
            for number in range(len(prompts))
        ]
        assert got == [[completion[:2] for completion in completions] for completions in expected]
        (ended,) = outputs[last].outputs
        assert ended.finish_reason == "error"
        assert "exited with code 41, in apply() of plugin 'kills'" in ended.error
        assert ended.error.endswith(
            "the request was in the step of 2 engines when they died; it runs no more"
        )
        assert len(ended.token_ids) == 5


@pytest.mark.nightly
async def test_with_the_defaults_a_request_goes_on_once(scripted):
    params = SamplingParams(
        temperature=0.0, max_tokens=400, ignore_eos=True, plugin_args={"slow": {"seconds": 0.02}}
    )

    async def kill(llm) -> None:
        first = llm.engines.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: llm.is_running and llm.engines.pid != first, "another engine")

    async with AsyncLLM(config=config(scripted, 1), restart="on_failure") as llm:
        stream = llm.generate("say abc", params)
        await anext(stream)
        await kill(llm)
        while not await llm.engines.live_requests():  # of the other engine
            await asyncio.sleep(0.01)
        await kill(llm)
        once = r"the request went on at another engine 1 time before \(engine.max_resumes\)$"
        with pytest.raises(EngineDeadError, match=once):
            _ = [output async for output in stream]


@pytest.mark.nightly
def test_a_restarted_engine_has_what_was_changed(scripted):
    settings = config(scripted, 2, restart="on_failure")
    with LLM(config=settings) as llm:
        llm.plugins.set_policy("priority")
        old = llm.engines[1].pid
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: llm.engines[1].pid not in (None, old), PATIENCE_S, "the other engine")
        output = llm.generate("say abc", GREEDY, priority=3, data_parallel_rank=1)[0]
        assert output.outputs[0].text == " abc abc abc"
        assert llm.plugins.health().restarts == 1


@pytest.mark.nightly
def test_the_number_of_engines_changes_under_load(scripted, expected):
    with LLM(config=config(scripted, 1, restart="on_failure")) as llm:
        outputs = []
        load = threading.Thread(target=lambda: outputs.extend(results(llm) for _ in range(6)))
        load.start()
        assert llm.engines.scale(3).ranks == (0, 1, 2)
        assert llm.engines.scale(1, drain_seconds=0.0).ranks == (0,)
        assert llm.engines.scale(2).epoch == 3
        assert llm.engines.retire([0], drain_seconds=0.1).ranks == (1,)
        load.join()
        assert [output == expected for output in outputs] == [True] * 6
        assert len(llm.engines) == 1


def test_one_engine_alone_keeps_its_number(scripted):
    with LLM(config=config(scripted, 1, in_process=False)) as llm:
        with pytest.raises(HardpointError, match="^scale: expected 1, because the engine"):
            llm.engines.scale(2)
        with pytest.raises(HardpointError, match="^retire: there is one engine alone"):
            llm.engines.retire([0])


def test_calls_go_to_all_engines_or_to_one(scripted):
    with LLM(config=config(scripted, 2)) as llm:
        llm.generate(["say abc"] * 2, GREEDY)
        first, second = llm.engines
        assert (first.rank, second.rank) == (0, 1)
        first.pause("keep")
        assert [engine.is_paused() for engine in llm.engines] == [True, False]
        assert not llm.engines.is_paused()
        first.resume()
        llm.engines.pause()
        assert llm.engines.is_paused()
        llm.engines.resume()
        llm.sleep(1)
        assert [engine.is_sleeping() for engine in llm.engines] == [True, True]
        llm.wake_up()
        assert llm.engines.live_requests() == []
        assert sorted(llm.plugins.meters()) == sorted(first.plugin_meters())


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        (
            {"parallel": {"data": 2}, "engine": {"in_process": True}},
            r"^engine.in_process: expected false, for parallel.data = 2 needs engines in processes "
            r"of their own, got true \(from argument LLM\(config=...\)\)$",
        ),
        (
            {"engine": {"in_process": True, "restart": "on_failure"}},
            "^engine.in_process: expected false, for engine.restart needs",
        ),
        ({"parallel": {"data": 0}}, "^parallel.data: "),
        ({"parallel": {"data": 2, "balancer": "leest_cost"}}, "parallel.balancer: .*least_cost"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(scripted, extra, error):
    with pytest.raises(Exception, match=error):
        LLM(config={**process_config(scripted), **extra})


def test_a_rank_is_one_of_the_engines(scripted):
    with LLM(config=config(scripted, 1)) as llm:
        expected = (
            "data_parallel_rank: expected none, or one of 0, the numbers of the engines "
            r"\(parallel.data\), got 1"
        )
        with pytest.raises(RequestError, match=expected):
            llm.generate("say abc", GREEDY, data_parallel_rank=1)
        assert llm.generate("say abc", GREEDY, data_parallel_rank=0)[0].finished


def test_more_engines_than_memory_holds(scripted):
    settings = process_config(scripted, {"parallel": {"data": 2}, "kv_cache": {"num_blocks": 2}})
    with pytest.raises(ConfigError, match="kv_cache.num_blocks: one request of"):
        LLM(config=settings)
