"""The route finds the likeliest outputs; a wrong request is refused."""

import asyncio
from pathlib import Path

import acme_beams
import pytest
from acme_beams import BeamSearch, beam_search

from hardpoint import AsyncLLM, RequestError, SamplingParams
from hardpoint.testing import HookSuite, scripted_config, serve, write_scripted_model

pytest_plugins = ["hardpoint.testing"]


class TestBeams(HookSuite):
    hooks = acme_beams


def test_the_route_returns_the_best_outputs_first():
    with serve({"plugins": {"enable": ["beams"]}}) as server:
        body = {"prompt": [1, 2, 3], "max_tokens": 6, "num_beams": 2}
        answer = server.ask("/acme/beams", body)
        assert answer.status == 200, server.log
        first, second = answer.json()["beams"]
        assert first["score"] >= second["score"]
        assert first["token_ids"] != second["token_ids"]
        refused = server.ask("/acme/beams", {**body, "num_beams": 0})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "num_beams")


def test_beams_need_a_limit_and_no_request_is_left(tmp_path: Path):
    async def search():
        config = scripted_config(write_scripted_model(tmp_path / "model"))
        async with AsyncLLM(config=config) as llm:
            with pytest.raises(RequestError, match="max_tokens: expected the most tokens"):
                await beam_search(llm, [1, 2], SamplingParams(max_tokens=None), BeamSearch())
            params = SamplingParams(max_tokens=5, ignore_eos=True)
            search = BeamSearch(num_beams=3)
            outputs = await beam_search(llm, [1, 2], params, search)
            again = await beam_search(llm, [1, 2], params, search)
            assert [beam.token_ids for beam in outputs] == [beam.token_ids for beam in again]
            stats = await llm.engines.scheduler_stats()
            assert (len(outputs), stats.num_waiting) == (3, 0)

    asyncio.run(search())
