"""Experts that are spread over several engine processes: the tokens of one engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import psutil
import pytest
import torch
from support.driving import varied_jobs
from support.internals import engine_of
from support.parallel import (
    drive,
    mixed_jobs,
    parallel_config,
    reference_of,
    same,
    write_random_model,
)
from support.process.harness import hangs, process_config
from support.waiting import PATIENCE_S, HeldSteps, wait_until

from hardpoint import LLM, AsyncLLM, EngineDeadError, HardpointError, RequestError, SamplingParams
from hardpoint.plugins.server.engine_set import EngineSet

KILLS = "process.test_replicas:Kills"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
MEETS = {"parallel": {"data": 2, "expert": True}, "engine": {"in_process": False}}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture of experts, and the results of the mixed requests in one process."""
    folder = tmp_path_factory.mktemp("random") / "mixtral"
    write_random_model(folder, "MixtralForCausalLM", **MIXTURE)
    config = {"model": str(folder), "load": {"use": "dummy"}}
    return config, reference_of(config, mixed_jobs())


def over_engines(mixture, **parallel):
    use = "multiproc" if parallel.get("tensor", 1) > 1 else "uniproc"
    settings = parallel_config(**mixture[0], executor={"use": use})
    return settings | MEETS | {"parallel": MEETS["parallel"] | parallel}


def check(llm, expected, num_preempted=0):
    """The mixed requests, with some preempted, next to one that leaves."""
    engine, jobs = engine_of(llm), mixed_jobs()
    engine.call_utility("pause", "keep")  # so that all of them are there at the first step
    for job in [*jobs[:6], ("leaves", [1, 2, 3] * 9, GREEDY), *jobs[6:]]:
        engine.add_request(*job)
    engine.call_utility("resume")
    engine.abort_requests("leaves")
    got = drive(engine, [])
    got.pop("leaves", None)
    same(engine, jobs, expected, got)
    stats = llm.engines.scheduler_stats()
    assert stats.num_preemptions > num_preempted
    assert stats.num_running == stats.num_waiting == 0


def test_two_engines_with_half_of_the_experts_give_the_tokens_of_one(mixture):
    prompts = [{"prompt_token_ids": [3, 5, 7, number]} for number in range(5)]
    with LLM(config=over_engines(mixture)) as llm:
        check(llm, mixture[1])
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
        for rank in (0, 1):  # the other one has no request
            alone = llm.generate(prompts, GREEDY, data_parallel_rank=rank)
            assert [output.outputs[0].token_ids for output in alone] == together
        lookups = [engine.scheduler_stats().prefix_cache.requests for engine in llm.engines]
        assert min(lookups) > 5


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"communicator": "torch"}, {"data": 4}])
def test_more_ranks_and_other_communication(mixture, parallel):
    with LLM(config=over_engines(mixture, **parallel)) as llm:
        check(llm, mixture[1], -1 if "data" in parallel else 3)


def scripted_settings(scripted, **engine):
    plugins = {"enable": ["support.plugins.slow:Slow", KILLS]}
    settings = {"parallel": MEETS["parallel"], "engine": engine, "plugins": plugins}
    return process_config(scripted, settings)


def results(llm):
    jobs = [job for job in varied_jobs(40) if job[2].n <= 2][:24]
    prompts = [{"prompt_token_ids": p} if isinstance(p, list) else p for _, p, _ in jobs]
    outputs = llm.generate(prompts, [params for *_, params in jobs])
    return [[(c.token_ids, c.text, c.error) for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(scripted):
    with LLM(config=process_config(scripted, {})) as llm:
        return results(llm)


def are_new(llm, before):
    return not {None, *before} & {engine.pid for engine in llm.engines}


@pytest.mark.nightly
def test_a_death_ends_all_engines_and_requests_go_on(scripted, expected):
    settings = scripted_settings(
        scripted, restart="on_failure", max_resumes=9, max_restarts_per_minute=99
    )
    with LLM(config=settings) as llm:
        assert results(llm) == expected
        for rank, seconds in ((1, 0.0), (0, 0.05)):
            before = {engine.pid for engine in llm.engines}
            victim = llm.engines[rank].pid
            kill = threading.Timer(seconds, os.kill, (victim, signal.SIGKILL))
            kill.start()
            assert results(llm) == expected
            kill.join()
            wait_until(partial(are_new, llm, before), PATIENCE_S, "all engines")
        assert llm.plugins.health().restarts == 4  # two engines, twice
        # At its first token: one that is lost with the engine would be progress at the next one.
        bad = SamplingParams(max_tokens=30, ignore_eos=True, plugin_args={"kills": {"at": 0}})
        outputs = llm.generate(["say abc"] * 4, [GREEDY, bad, GREEDY, GREEDY])
        assert (
            outputs[1]
            .outputs[0]
            .error.endswith(
                "the request was in the step of 2 engines when they died; it runs no more"
            )
        )
        good = llm.generate("say abc", GREEDY)[0].outputs[0].token_ids
        assert [outputs[i].outputs[0].token_ids for i in (0, 2, 3)] == [good] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_the_engine_that_hangs_is_blamed_rather_than_one_that_waits_for_it(
    scripted, tmp_path, rank
):
    """Both are in a step for too long; which of them is noticed first is left to chance."""
    with LLM(config=scripted_settings(scripted, hung_step_seconds=2.0)) as llm:
        pids = [engine.pid for engine in llm.engines]
        bad = hangs(tmp_path / "begun")
        with pytest.raises(EngineDeadError) as raised:
            llm.generate("say abc", bad, data_parallel_rank=rank)
    error = str(raised.value)
    assert error.startswith(
        (
            f"the engine process (pid {pids[rank]}) hangs: a step takes longer than 2 s",
            f"engine {rank} (pid {pids[rank]}) does not go on, in apply() of plugin 'slow'",
        )
    )
    assert "in apply() of plugin 'slow'" in error


@pytest.mark.nightly
async def test_a_pause_in_the_midst_of_requests(scripted, tmp_path):
    held = HeldSteps(tmp_path)
    slow = msgspec.structs.replace(GREEDY, plugin_args=held.slow(0.2))

    async def tokens(llm, params):
        return [output async for output in llm.generate("say abc", params)][-1].outputs[0].token_ids

    async with AsyncLLM(config=scripted_settings(scripted)) as llm:
        whole = await tokens(llm, GREEDY)
        tasks = [asyncio.create_task(tokens(llm, slow)) for _ in range(3)]
        while (await llm.engines.scheduler_stats()).num_running < 3:
            await asyncio.sleep(0.01)
        await llm.engines.pause("keep")
        held.let_go()
        assert await llm.engines.is_paused()
        assert len(await llm.engines.live_requests()) == 3
        await llm.engines.resume()
        assert await asyncio.gather(*tasks) == [whole] * 3


def test_calls_go_to_all_engines_together(scripted, expected):
    with LLM(config=scripted_settings(scripted)) as llm:
        for level in (1, 2):
            llm.sleep(level)
            assert [engine.is_sleeping() for engine in llm.engines] == [True, True]
            llm.engines.pause()  # there is nothing to agree on
            llm.wake_up()
            assert results(llm) == expected
        second = llm.engines[1]
        assert second.scheduler_stats().num_running == 0
        for call in (second.pause, second.sleep, second.resume):
            with pytest.raises(RequestError, match="expected all engines, got engine 1 alone"):
                call()
        with pytest.raises(HardpointError, match="^update_weights: the weights of engines that"):
            llm.weights.update({"lm_head.weight": torch.zeros(2, 2)})


@pytest.mark.nightly
def test_the_number_changes_while_requests_run(mixture):
    jobs = mixed_jobs()
    with LLM(config=over_engines(mixture)) as llm:
        engine = engine_of(llm)
        # Jobs join in twelve steps, so that there are as many.
        changes = {
            5: lambda _: sets.append(llm.engines.scale(4)),
            11: lambda _: sets.append(llm.engines.scale(1)),
        }
        sets = []
        got = drive(engine, jobs, before_step=changes)
        same(engine, jobs, mixture[1], got)
        assert sets == [EngineSet(1, (0, 1, 2, 3)), EngineSet(2, (0,))]
        with pytest.raises(HardpointError, match="^engine . of 3: parallel.data: 4 experts cannot"):
            llm.engines.scale(3)
        assert llm.engines.scale(2) == EngineSet(3, (0, 1))


def new_process(before):
    """Wait for a process that is started in a change of engines."""
    pids = []

    def is_there():
        pids[:] = [c.pid for c in psutil.Process().children() if c.pid not in before]
        return pids

    wait_until(is_there, PATIENCE_S, "a process")
    return pids[0]


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["new", pytest.param("old", marks=pytest.mark.nightly)])
def test_a_change_is_undone_if_an_engine_dies_meanwhile(scripted, expected, tmp_path, victim):
    """No engine that starts gets ready before."""
    settings = scripted_settings(scripted, restart="on_failure", max_resumes=9)
    settings["plugins"]["enable"].append("support.plugins.pacing:Gate")
    gate = tmp_path / "closed"
    settings["plugin"] = {"gate": {"path": str(gate)}}
    with LLM(config=settings) as llm, ThreadPoolExecutor() as pool:
        before = [engine.pid for engine in llm.engines]
        ids = {child.pid for child in psutil.Process().children()}
        gate.touch()
        change = pool.submit(llm.engines.scale, 4)
        new = new_process(ids)
        os.kill(new if victim == "new" else before[1], signal.SIGKILL)
        wait_until(change.done, PATIENCE_S, "the change to fail")
        gate.unlink()
        got = results(llm)
        with pytest.raises(HardpointError, match="died|ended|engine . of 4"):
            change.result(PATIENCE_S)
        assert got == expected
        wait_until(lambda: len(llm.engines) == 2, PATIENCE_S, "the engines")
        pids = [engine.pid for engine in llm.engines]
        assert (pids == before) is (victim == "new")
        wait_until(
            lambda: len(psutil.Process().children()) == len(ids), PATIENCE_S, "the others' end"
        )
        assert llm.engines.scale(1) == EngineSet(1, (0,))
        assert results(llm) == expected


@pytest.mark.nightly
def test_kills_at_random_while_the_number_changes(scripted, expected):
    rng, outcomes = random.Random(5), Counter()
    others = {child.pid for child in psutil.Process().children()}
    settings = scripted_settings(
        scripted, restart="on_failure", max_resumes=99, max_restarts_per_minute=99
    )

    def change(llm, count):
        with contextlib.suppress(HardpointError):
            llm.engines.scale(count)
            return True
        return False

    def engines():
        return {child.pid for child in psutil.Process().children()} - others

    def kill():
        time.sleep(rng.random())
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(rng.choice(sorted(engines())), signal.SIGKILL)

    with LLM(config=settings) as llm, ThreadPoolExecutor() as pool:
        for number in range(100):
            if number >= 12 and outcomes[True] and outcomes[False]:
                break
            changed = pool.submit(change, llm, rng.choice([1, 2, 4]))
            killed = pool.submit(kill)
            assert results(llm) == expected
            killed.result(PATIENCE_S)
            outcomes[changed.result(PATIENCE_S)] += 1
            wait_until(
                lambda: len(llm.engines) == len(engine_of(llm).parts.client.pids),
                PATIENCE_S,
                "the engines",
            )
        assert outcomes[True]
        assert outcomes[False]
        wait_until(lambda: {e.pid for e in llm.engines} == engines(), PATIENCE_S, "the end")


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"parallel": {"pipeline": 2}}, "^parallel.pipeline: expected 1, since the engines share"),
        (
            {"scheduler": {"asynchronous": True}},
            "^scheduler.asynchronous: expected false, since the engines share experts",
        ),
        (
            {"executor": {"use": "ray"}},
            "^executor.use: expected an executor of this host, since the engines share experts "
            r"\(parallel.expert with parallel.data = 2\), got 'ray'",
        ),
        (
            {"parallel": {"join_address": "tcp://127.0.0.1:7000"}},
            "^parallel.join_address: expected none, since the engines share experts",
        ),
        ({"max_model_len": "auto"}, "^max_model_len: expected a number, or none, since"),
        ({"parallel": {"ray": {}}}, "^parallel.ray: expected none, since the engines share exper"),
        ({"parallel": {"data": 3}}, "^engine . of 3: parallel.data: 4 experts cannot be spread"),
    ],
)
def test_what_cannot_work_is_refused(mixture, extra, error):
    settings = over_engines(mixture)
    for name, value in extra.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    began = time.monotonic()
    with pytest.raises(HardpointError, match=error):
        LLM(config=settings)
    assert time.monotonic() - began < PATIENCE_S


def test_a_dense_model_has_no_experts_to_spread(tmp_path):
    folder = write_random_model(tmp_path / "llama", "LlamaForCausalLM")
    config = {"model": str(folder), "load": {"use": "dummy"}}
    with pytest.raises(HardpointError, match="^engine . of 2: parallel.expert: plugin 'Llama"):
        LLM(config=over_engines((config, None)))
