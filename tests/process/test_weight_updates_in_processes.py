"""Weights that change in engines of their own processes and in several ranks, also under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from support.adapters import write_two_models
from support.waiting import PATIENCE_S, until

from hardpoint import LLM, AsyncLLM, EngineDeadError, ModelError, SamplingParams
from hardpoint.plugins.requests import WeightRun

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5] * 4, [2, 7, 1, 8] * 6, [1, 6, 1, 8, 0, 3]]
SETTINGS = {"kv_cache": {"num_blocks": 96}, "weight_cache": {"path": "off"}}
MULTIPROC = {"executor": {"use": "multiproc"}}
RANKS = {
    "own process": {},
    "tensor": {"parallel": {"tensor": 2}, **MULTIPROC},
    "pipeline": {"parallel": {"pipeline": 2}, **MULTIPROC},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of two models that differ in all matrices."""
    return write_two_models(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def expected(folders):
    token_lists = []
    for folder in folders:
        with LLM(str(folder), config=SETTINGS, max_model_len=128) as llm:
            outputs = llm.generate(PROMPTS, PARAMS)
        token_lists.append([output.outputs[0].token_ids for output in outputs])
    assert token_lists[0] != token_lists[1]
    return token_lists


@pytest.mark.parametrize(
    "ranks",
    ["tensor", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("own process", "pipeline"))],
)
@pytest.mark.usefixtures("forked_ranks")
def test_all_ranks_change_or_none(folders, expected, tmp_path, ranks):
    first, second = folders
    last = "model.norm.weight"  # of the last stage alone
    tensors = load_file(second / "model.safetensors")
    save_file({**tensors, last: tensors[last] * float("nan")}, tmp_path / "bad.safetensors")

    async def run():
        settings = SETTINGS | RANKS[ranks]
        async with AsyncLLM(str(first), config=settings, max_model_len=128) as llm:

            async def tokens():
                async def one(prompt):
                    async for output in llm.generate(prompt, PARAMS):
                        last = output
                    return last.outputs[0].token_ids, last.outputs[0].weight_runs

                results = await asyncio.gather(*map(one, PROMPTS))
                return [ids for ids, _ in results], results[0][1]

            assert await tokens() == (expected[0], None)
            with pytest.raises(ModelError, match="'model.norm.weight' has numbers that are not"):
                await llm.weights.update(tmp_path / "bad.safetensors")
            assert await tokens() == (expected[0], None)
            assert await llm.weights.update(tensors, version="a") == "a"
            ids, ((run,)) = await tokens()
            assert (ids, run.version, run.kv_version) == (expected[1], "a", "a")

    asyncio.run(run())


async def test_an_engine_that_is_restarted_has_the_newest_weights(folders, expected):
    first, second = folders

    llm = AsyncLLM(str(first), config=SETTINGS, max_model_len=128, restart="on_failure")
    async with llm:
        await llm.weights.update(load_file(second / "model.safetensors"))
        os.kill(llm.engines.pid, signal.SIGKILL)
        last = None
        async with asyncio.timeout(PATIENCE_S):
            while last is None:
                with contextlib.suppress(EngineDeadError):
                    async for output in llm.generate(PROMPTS[0], PARAMS):
                        last = output
        assert (await llm.plugins.health()).restarts == 1
        assert last.outputs[0].token_ids == expected[1][0]
        assert last.outputs[0].weight_runs[0].version == "1"


def runs_of(output):
    return output.weight_runs or [WeightRun(0, "0", "0")]


async def outputs_under_updates(versions, settings, params):
    """Run requests while the weights change; return prompts with their outputs."""
    pairs, came = [], Counter()
    is_done, numbers = asyncio.Event(), itertools.count()

    async def stream(llm, max_tokens):
        while not is_done.is_set():
            prompt = [next(numbers) % 250 + 1, 5, 9]
            own_params = msgspec.structs.replace(params, max_tokens=max_tokens)
            async for output in llm.generate(prompt, own_params):
                last = output
                came[runs_of(output.outputs[0])[-1].version] += 1
            pairs.append((prompt, last.outputs[0]))
            max_tokens = params.max_tokens

    async with AsyncLLM(str(versions["0"]), config=settings, max_model_len=120) as llm:
        # The first requests have several lengths: at no time do all of them end.
        tasks = [asyncio.create_task(stream(llm, 80 - 9 * number)) for number in range(8)]
        for before, version in itertools.pairwise(versions):
            await until(lambda before=before: came[before] > 16, "outputs")
            mode = "wait" if version == "2" else "keep"
            await llm.weights.update(versions[version], version=version, mode=mode)
        await until(lambda: came[version], "outputs of the last version")
        is_done.set()
        await asyncio.gather(*tasks)
    return pairs


@pytest.mark.nightly
def test_each_token_has_the_version_that_it_was_sampled_with(folders):
    """Under load: with the tokens of earlier versions in the prompt, a run's tokens follow."""
    first, second = folders
    versions = {"0": first, "1": second, "2": first, "3": second}
    settings = SETTINGS | {"kv_cache": {"num_blocks": 200}}
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    pairs = asyncio.run(outputs_under_updates(versions, settings, params))
    pieces = {folder: [] for folder in folders}
    seen = set()
    for prompt, output in pairs:
        ids, runs = output.token_ids, runs_of(output)
        seen.add(tuple(run.version for run in runs))
        for run, end in zip(runs, [*(run.start for run in runs[1:]), len(ids)], strict=True):
            if run.start < end:
                piece = prompt + ids[: run.start], ids[run.start : end]
                pieces[versions[run.version]].append(piece)
    assert {version for of_one in seen for version in of_one} == set(versions)
    assert ("0", "1") in seen
    assert ("1", "2") not in seen  # those that ran then were finished before
    for folder in folders:
        with LLM(str(folder), config=settings, max_model_len=120) as llm:
            expected = [ids for _, ids in pieces[folder]]
            lengths = [msgspec.structs.replace(params, max_tokens=len(ids)) for ids in expected]
            outputs = llm.generate([sent for sent, _ in pieces[folder]], lengths)
            assert [output.outputs[0].token_ids for output in outputs] == expected
