"""Candidates of branches equal the results of requests with the same outputs."""

from __future__ import annotations

import asyncio

import pytest

from hardpoint import AsyncLLM, RequestError, SamplingParams
from hardpoint.errors import RequestEndedError
from hardpoint.testing import scripted_config
from hardpoint.toolkit.branches import Branches

PROMPT = [1, 2, 3]
END = 256


def run(scripted, program, **config):
    async def opened():
        async with AsyncLLM(config=scripted_config(scripted, config)) as llm:
            await program(llm)
            async with asyncio.timeout(60):
                while any(await num_requests(llm)):
                    await asyncio.sleep(0.005)

    asyncio.run(opened())


async def num_requests(llm):
    stats = await llm.engines.scheduler_stats()
    return stats.num_running, stats.num_waiting


def params_of(**fields):
    return SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields})


async def alone(llm, outputs, count):
    """Return the likeliest tokens after outputs, as the end of a prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=count, ignore_eos=True)
    async for output in llm.generate([*PROMPT, *outputs], params):
        (entry,) = output.outputs[0].logprobs
    return {token: candidate.logprob for token, candidate in entry.items()}


@pytest.mark.parametrize(
    "config", [{}, {"kv_cache": {"block_size": 4, "num_blocks": 8}, "max_model_len": 24}]
)
def test_candidates_are_those_of_a_request_with_these_outputs(scripted, config):
    async def program(llm):
        async with Branches(llm, PROMPT, params_of(), 3) as branches:
            (first,) = await branches.candidates([[]])
            likeliest, second, third = first
            steps = [[[likeliest], [second], [third]]]
            steps += [[[second, 7, 9], [likeliest, 5], [second]], [[8], [8], [second, 7, 9, 4]]]
            for step in steps:
                for tokens, candidates in zip(step, await branches.candidates(step), strict=True):
                    assert candidates == await alone(llm, tokens, 3)
            assert await branches.candidates([]) == []
            assert await branches.candidates([[]]) == [first]

    run(scripted, program, **config)


def test_requests_go_on_along_branches(scripted):
    async def program(llm):
        begun = []
        fork = llm.fork
        llm.fork = lambda *args: begun.append(args) or fork(*args)
        async with Branches(llm, PROMPT, params_of(), 2, "search") as branches:
            tokens = []
            for _ in range(8):
                assert not branches.has_ended(tokens)
                (candidates,) = await branches.candidates([tokens])
                tokens.append(next(iter(candidates)))
            assert branches.has_ended(tokens)
            assert begun == []
            await branches.candidates([tokens[:4], [*tokens[:4], 9]])
            assert begun == [("search", [*tokens[:4], 9])]
            with pytest.raises(RequestError, match="max_tokens"):
                await branches.candidates([tokens])
            with pytest.raises(RequestEndedError, match="branches: they are closed"):
                await branches.candidates([[]])

    run(scripted, program)


def test_tokens_that_may_not_follow_are_no_candidates(scripted):
    async def program(llm):
        params = params_of(ignore_eos=False, min_tokens=2, stop_token_ids=[7])
        async with Branches(llm, PROMPT, params, 250) as branches:
            assert branches.ends == {7, END}
            early, late = await branches.candidates([[5], [5, 6]])
            assert branches.ends.isdisjoint(early)
            assert branches.ends <= late.keys()
            assert [branches.has_ended(tokens) for tokens in ([5], [5, 6, 7])] == [False, True]

    run(scripted, program)


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_abort_ends_all_branches(scripted, goes_on):
    async def follow(branches):
        tokens = [8]
        while True:
            (candidates,) = await branches.candidates([tokens])
            tokens.append(next(iter(candidates)) if goes_on else 9)

    async def program(llm):
        async with Branches(llm, PROMPT, params_of(max_tokens=400), 2, "search") as branches:
            await branches.candidates([[8], [9]])
            await llm.abort("search")
            words = "a request ended: abort" if goes_on else "'search' is not the id of an open"
            with pytest.raises(RequestEndedError if goes_on else RequestError, match=words):
                await follow(branches)

    run(scripted, program)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: expected the most tokens of a branch, got None"),
        ({"stop": "x"}, r"stop: expected none for branches, got \('x',\)|\['x'\]"),
    ],
    ids=["max_tokens", "stop"],
)
def test_wrong_parameters_are_refused(scripted, fields, words):
    async def program(llm):
        with pytest.raises(RequestError, match=words):
            Branches(llm, PROMPT, params_of(**fields), 2)
        async with Branches(llm, [], params_of(), 2) as branches:
            with pytest.raises(RequestError, match="prompt"):
                await branches.candidates([[]])

    run(scripted, program)
