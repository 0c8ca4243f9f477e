"""The same 40 mixed requests through every face, with everything in the mix: the same results."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest
from support.driving import Job, alone, drafting, run, summary, varied_jobs
from support.process.harness import open_engine, process_config

from hardpoint import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.testing import scripted_config, scripted_engine

DELTA = RequestOutputKind.DELTA
TIGHT = {  # requests are preempted, and prompts computed in pieces
    "max_model_len": 128,
    "kv_cache": {"block_size": 8, "num_blocks": 20},
    "scheduler": {"max_num_batched_tokens": 48, "policy": "priority"},
}
ONE_RANK: dict = {}
NIGHTLY = pytest.mark.nightly
TENSOR, PIPELINE, BOTH = (
    {"executor": {"use": "multiproc"}, "parallel": {"tensor": tensor, "pipeline": pipeline}}
    for tensor, pipeline in ((2, 1), (1, 2), (2, 2))
)
STORES = {  # some calls of the first one fail; what was evicted comes back from both
    "kv_connector": {
        "stores": [{"use": "support.plugins.kv_stores:HostileStore", "name": "hostile"}, "memory"]
    },
    "plugin": {
        "stores": {"timeout_seconds": 20.0, "breaker_seconds": 0.1},
        "memory": {"size_bytes": 1 << 22},
        "hostile": {"ways": ["fail", "forget", "invent", "damage", "slow"], "share": 0.1},
    },
}
ANY_RANKS = [
    pytest.param(ONE_RANK, id="one rank"),
    pytest.param(TENSOR, id="tensor 2", marks=pytest.mark.nightly),
    pytest.param(PIPELINE, id="pipeline 2", marks=pytest.mark.nightly),
    pytest.param(STORES, id="stores", marks=pytest.mark.nightly),
    pytest.param(TENSOR | STORES, id="tensor 2, stores", marks=pytest.mark.nightly),
    pytest.param(PIPELINE | STORES, id="pipeline 2, stores", marks=pytest.mark.nightly),
]
POLICIES = ["fair", "shortest_first", "fcfs", "priority"]
ENDLESS = SamplingParams(
    temperature=0.0,
    max_tokens=110,
    ignore_eos=True,
    output_kind=RequestOutputKind.FINAL_ONLY,
    plugin_args={"slow": {"seconds": 0.02}, "tires": {"tokens": 60}},
)
SLOW = {"plugins": {"enable": ["support.plugins.slow:Slow", "support.plugins.pacing:Tires"]}}


def with_stop_strings() -> list[Job]:
    """The 40 jobs, some ended by a string that their own output holds."""
    jobs = varied_jobs()
    for index in (3, 9, 15):
        request_id, prompt, params = jobs[index]
        jobs[index] = (request_id, prompt, msgspec.structs.replace(params, stop=["5", "e", "\\"]))
    return jobs


@pytest.fixture(scope="module")
def expected(scripted):
    """Each request alone, in this process, with memory to spare."""
    engine = scripted_engine(scripted)
    results = alone(engine, with_stop_strings())
    engine.close()
    reasons = {part[3] for result in results.values() for part in result[0]}
    assert reasons >= {"length", "stop"}
    return results


def of_prompts(outputs) -> dict[str, list]:
    """Results of `generate` in the form of `expected`."""
    return {f"r{index}": [summary(output)] for index, output in enumerate(outputs)}


def prompts_and_params():
    jobs = with_stop_strings()
    return [prompt for _, prompt, _ in jobs], [params for _, _, params in jobs]


def test_llm_in_this_process(scripted, expected):
    with LLM(config=scripted_config(scripted, TIGHT)) as llm:
        assert of_prompts(llm.generate(*prompts_and_params())) == expected
        assert llm.engines.scheduler_stats().num_preemptions > 0  # else TIGHT would prove nothing


@NIGHTLY
def test_llm_with_stores(scripted, expected):
    with LLM(config=scripted_config(scripted, TIGHT | STORES)) as llm:
        for _ in range(2):
            assert of_prompts(llm.generate(*prompts_and_params())) == expected
            llm.reset_prefix_cache()
        tiers = llm.engines.scheduler_stats().kv_tiers
        assert sum(tier.loaded_blocks for tier in tiers.values()) > 30


DRAFTED = [
    pytest.param(0.8, "engine", {}, id="most right"),
    pytest.param(1.0, "worker", {}, id="all right, of the worker", marks=NIGHTLY),
    pytest.param(
        *(0.0, "engine", {"kv_cache": {"prefix_caching": False}}), id="all wrong", marks=NIGHTLY
    ),
    pytest.param(0.8, "worker", {"engine": {"in_process": False}}, id="an engine process"),
    pytest.param(0.8, "engine", PIPELINE, id="pipeline 2", marks=NIGHTLY),
    pytest.param(0.8, "worker", PIPELINE, id="pipeline 2, of the worker", marks=NIGHTLY),
    pytest.param(0.8, "worker", BOTH, id="2 x 2", marks=NIGHTLY),
]


@pytest.mark.parametrize(("right", "made_in", "settings"), DRAFTED)
def test_drafts_change_nothing(scripted, expected, right, made_in, settings):
    drafts = drafting(with_stop_strings(), expected, right=right, made_in=made_in)
    config = {"engine": {"in_process": True}} | TIGHT | drafts
    config |= {k: {**config.get(k, {}), **v} for k, v in settings.items()}
    with LLM(config=scripted_config(scripted, config)) as llm:
        assert of_prompts(llm.generate(*prompts_and_params())) == expected
        stats = llm.engines.scheduler_stats()
    assert stats.num_drafts > 500
    assert stats.num_preemptions > 0
    accepted = stats.num_accepted_drafts / stats.num_drafts
    assert right / 3 <= accepted <= right + 0.1
    assert stats.num_accepted_drafts == sum(stats.num_accepted_by_position)


@NIGHTLY
def test_llm_with_an_engine_process(scripted, expected):
    with LLM(config=process_config(scripted, TIGHT)) as llm:
        assert of_prompts(llm.generate(*prompts_and_params())) == expected
        assert llm.engines.scheduler_stats().num_preemptions > 0


@NIGHTLY
@pytest.mark.parametrize("ranks", [TENSOR, PIPELINE, BOTH], ids=["tensor 2", "pipeline 2", "2 x 2"])
def test_llm_with_several_ranks(scripted, expected, ranks):
    with LLM(config=scripted_config(scripted, TIGHT | ranks)) as llm:
        assert of_prompts(llm.generate(*prompts_and_params())) == expected
        assert llm.engines.scheduler_stats().num_preemptions > 0


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", ANY_RANKS)
@pytest.mark.parametrize("in_process", [pytest.param(True, marks=NIGHTLY), False])
def test_with_policies_that_change_and_requests_that_time_out(
    scripted, expected, in_process, ranks
):
    """Jobs join two by two; the policy changes; endless neighbours time out and are aborted."""
    settings = TIGHT | SLOW | ranks | {"engine": {"in_process": in_process}}
    engine = open_engine(scripted, settings)
    results, ended, aborted = {}, {}, set()
    waiting = with_stop_strings()
    for index in range(3):
        engine.add_request(f"endless{index}", [index] * 9, ENDLESS, RequestExtras(timeout=0.2))
    rounds = 0
    while waiting or engine.has_unfinished_requests():
        for request_id, prompt, params in waiting[:2]:
            engine.add_request(request_id, prompt, params, RequestExtras(priority=rounds % 3))
        if rounds % 5 == 0 and waiting:
            engine.set_policy(POLICIES[rounds // 5 % len(POLICIES)])
            engine.add_request(f"gone{rounds}", [rounds] * 5, ENDLESS)
            aborted.add(f"gone{rounds}")
        elif rounds % 5 == 2:
            engine.abort_requests(aborted)
        waiting, rounds = waiting[2:], rounds + 1
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output.outputs[0].finish_reason
                results[output.request_id] = [summary(output)]
    assert {i: ended.pop(i) for i in list(ended) if i.startswith("endless")} == {
        f"endless{index}": "timeout" for index in range(3)
    }
    assert len(aborted) >= 4
    assert not aborted & set(ended)
    assert {i: results[i] for i in expected} == expected
    assert engine.call_utility("scheduler_stats").kv_cache_usage == 0
    engine.close()


def joined(outputs) -> list[tuple]:
    """The sum of a stream of deltas, in the form of `summary`."""
    parts: dict[int, list] = {}
    for output in outputs:
        for c in output.outputs:
            parts.setdefault(c.index, []).append(c)
    result = []
    for index, cs in sorted(parts.items()):
        last = cs[-1]
        logprobs = [entry for c in cs for entry in c.logprobs or []]
        result.append(
            (
                index,
                [token for c in cs for token in c.token_ids],
                "".join(c.text for c in cs),
                last.finish_reason,
                last.stop_reason,
                None
                if last.logprobs is None
                else [{t: (v.logprob, v.rank) for t, v in entry.items()} for entry in logprobs],
            )
        )
    return result


def as_deltas(job: Job) -> Job:
    return (job[0], job[1], msgspec.structs.replace(job[2], output_kind=DELTA))


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", ANY_RANKS)
def test_streamed_deltas_join_to_the_whole(scripted, expected, tmp_path, ranks):
    """For its first steps, the engine waits until the pacemaker's output before is taken.

    Stages work on two steps at once, and so on one before the outputs of another are taken.
    """
    turn = tmp_path / "turn"
    engine = open_engine(
        scripted, TIGHT | ranks | {"plugins": {"enable": ["support.plugins.pacing:Turns"]}}
    )
    turns = {"turns": {"path": str(turn)}}
    params = SamplingParams(max_tokens=30, ignore_eos=True, plugin_args=turns)
    engine.add_request("pacemaker", [1], params)
    streams: dict[str, list] = {}
    for job in with_stop_strings():
        engine.add_request(*as_deltas(job))
    turn.touch()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "pacemaker":
                turn.touch()
            streams.setdefault(output.request_id, []).append(output)
    engine.close()
    assert len(streams.pop("pacemaker")) == 30
    assert {i: [joined(outputs)] for i, outputs in streams.items()} == expected
    assert any(len(outputs) > 5 for outputs in streams.values())


def test_llm_streams_the_same(scripted, expected):
    with LLM(config=process_config(scripted, TIGHT)) as llm:
        for job in with_stop_strings()[::4]:
            request_id, prompt, params = as_deltas(job)
            if params.n == 1:
                assert [joined(llm.stream(prompt, params))] == expected[request_id]


# AsyncLLM


async def whole(llm: AsyncLLM, job: Job) -> list[tuple]:
    request_id, prompt, params = job
    last = None
    async for output in llm.generate(prompt, params, request_id):
        last = output
    assert last.finished
    return summary(last)


async def streamed(llm: AsyncLLM, job: Job, pause_s: float) -> list[tuple]:
    """Read a stream, slowly if `pause_s` is given, so that deltas are merged."""
    request_id, prompt, params = as_deltas(job)
    outputs = []
    async for output in llm.generate(prompt, params, request_id):
        outputs.append(output)
        if pause_s:
            await asyncio.sleep(pause_s)
    return joined(outputs)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", ANY_RANKS)
async def test_async_llm_gives_the_same(scripted, expected, ranks):
    with contextlib.closing(AsyncLLM(config=process_config(scripted, TIGHT | ranks))) as llm:
        jobs = with_stop_strings()
        results = await asyncio.gather(*(whole(llm, job) for job in jobs))
        assert {job[0]: [r] for job, r in zip(jobs, results, strict=True)} == expected
        results = await asyncio.gather(
            *(streamed(llm, job, index % 3 * 0.01) for index, job in enumerate(jobs))
        )
        assert {job[0]: [r] for job, r in zip(jobs, results, strict=True)} == expected


@pytest.mark.parametrize("ranks", ANY_RANKS)
async def test_async_llm_in_the_mix(scripted, expected, ranks):
    """With neighbours that time out or are left, while the policy changes."""

    async def neighbour(llm, name, timeout=None):
        outputs = llm.generate([7] * 9, ENDLESS, name, timeout=timeout)
        return [o async for o in outputs][-1].outputs[0].finish_reason

    async def change_policies(llm):
        for policy in POLICIES * 2:
            await llm.plugins.set_policy(policy)
            await asyncio.sleep(0.05)

    with contextlib.closing(AsyncLLM(config=process_config(scripted, TIGHT | SLOW | ranks))) as llm:
        timed = [asyncio.create_task(neighbour(llm, f"timed{i}", 0.2)) for i in range(2)]
        left = [asyncio.create_task(neighbour(llm, f"left{i}")) for i in range(2)]
        policies = asyncio.create_task(change_policies(llm))
        jobs = with_stop_strings()
        work = asyncio.gather(*(whole(llm, job) for job in jobs))
        await asyncio.sleep(0.1)
        for task in left:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        results = await work
        assert {job[0]: [r] for job, r in zip(jobs, results, strict=True)} == expected
        assert await asyncio.gather(*timed) == ["timeout"] * 2
        await policies
        stats = await llm.engines.scheduler_stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)


def test_run_helper_itself_tells_differences(open_engine, expected):
    """Guards the comparisons above: another seed is another result."""
    request_id, prompt, params = with_stop_strings()[2]
    engine = open_engine()
    other = msgspec.structs.replace(params, seed=99)
    assert run(engine, [(request_id, prompt, other)]) != {request_id: expected[request_id]}
