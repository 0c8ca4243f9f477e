"""Beam search by forks finds the outputs of transformers, whatever the engine does meanwhile."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from support.processes import ROOT

from hardpoint import AsyncLLM, SamplingParams

CASES = json.loads((ROOT / "tests/support/demo_reference.json").read_text())["beams"]
SHORT = sorted(CASES, key=lambda case: case["num_beams"] * case["max_tokens"])[:2]
SETTINGS = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 16}},
    "preempting": {"kv_cache": {"num_blocks": 9, "watermark": 0.0}},
    "no prefix cache": {"kv_cache": {"prefix_caching": False}},
    "own process": {"engine": {"in_process": False}},
    "two engines": {"engine": {"in_process": False}, "parallel": {"data": 2}},
}


@pytest.fixture
def beams(acme_beams, monkeypatch):
    monkeypatch.syspath_prepend(acme_beams)
    yield __import__("acme_beams")
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_beams"]:
        del sys.modules[name]


def check(beams, cases, settings) -> None:
    async def search() -> None:
        config = {"device": "cpu", **settings}
        async with AsyncLLM("smollm2", dtype="float32", max_model_len=96, config=config) as llm:
            for case in cases:
                params = SamplingParams(max_tokens=case["max_tokens"])
                names = ("num_beams", "length_penalty", "early_stopping")
                search = beams.BeamSearch(**{name: case[name] for name in names})
                found = await beams.beam_search(llm, case["prompt"], params, search)
                assert [beam.token_ids for beam in found] == case["tokens"]
                scores = [beam.score for beam in found]
                assert scores == pytest.approx(case["scores"], abs=1e-3)
            stats = await llm.engines.scheduler_stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            if "num_blocks" in settings.get("kv_cache", {}):
                assert stats.num_preemptions

    asyncio.run(search())


@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_beams_are_those_of_transformers(beams, case):
    check(beams, [SHORT[case]], {})


@pytest.mark.nightly
@pytest.mark.parametrize("name", SETTINGS)
def test_beams_do_not_depend_on_the_engine(beams, name):
    check(beams, CASES, SETTINGS[name])


@pytest.mark.nightly
async def test_an_abort_ends_a_request_and_its_forks(scripted):
    from hardpoint.testing import scripted_config

    enabled = [*scripted_config(scripted)["plugins"]["enable"], "support.plugins.slow:Slow"]
    config = scripted_config(scripted, {"plugins": {"enable": enabled}})
    async with AsyncLLM(config=config) as llm:
        slow = {"slow": {"seconds": 0.05}}
        params = SamplingParams(max_tokens=400, ignore_eos=True, plugin_args=slow)
        source = llm.generate([1, 2, 3], params, "r")
        first = await anext(source)
        forks = [llm.fork("r", [token]) for token in (7, 8)]
        started = [await anext(fork) for fork in forks]
        assert [one.outputs[0].index for one in (first, *started)] == [0, 1, 2]
        assert [one.outputs[0].token_ids[0] for one in started] == [7, 8]
        await llm.abort("r")
        for stream in (source, *forks):
            last = [output async for output in stream][-1]
            assert last.outputs[0].finish_reason == "abort"
        stats = await llm.engines.scheduler_stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
