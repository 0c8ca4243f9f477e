"""Calls of step parts and of their worker halves, in each form of an engine."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.parallel import write_random_model

from hardpoint import LLM, AsyncLLM, ModelError, RequestError, SamplingParams
from hardpoint.errors import PluginFaultError

PART = {"use": "support.plugins.answering:Answering", "name": "answering"}
FORMS = {
    "in this process": {"engine": {"in_process": True}},
    "in a process of its own": {"engine": {"in_process": False}},
    "two ranks": {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}},
}


@pytest.fixture(scope="module", params=FORMS)
def llm(request, tmp_path_factory):
    folder = write_random_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")
    settings = {
        "plugins": {"enable": [PART]},
        "kv_cache": {"num_blocks": 64},
        "load": {"use": "dummy"},
    }
    with LLM(str(folder), config=settings | FORMS[request.param], max_model_len=64) as llm:
        llm.num_ranks = 2 if request.param == "two ranks" else 1
        yield llm


def test_every_rank_answers(llm):
    ranks = [f"hello in rank {rank}" for rank in range(llm.num_ranks)]
    answer = llm.plugins.call_part("answering", "hello", {"kind": [1, None]})
    assert answer == {"answers": ranks, "kind": [1, None]}


def test_errors_of_worker_halves_reach_the_caller_and_nothing_else(llm):
    with pytest.raises(ModelError, match="its file is missing"):
        llm.plugins.call_part("answering", "refuse")
    with pytest.raises(
        PluginFaultError, match="'answering'.*: its call.. failed: KeyError: 'no seat"
    ):
        llm.plugins.call_part("answering", "fail")
    (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


def test_an_unknown_part_is_refused(llm):
    with pytest.raises(RequestError, match="part: .* answering, .*pooling, .*got 'adapters'"):
        llm.plugins.call_part("adapters", "list")


def test_an_answer_that_takes_long_stops_nothing(tmp_path):
    folder = write_random_model(tmp_path, "LlamaForCausalLM")
    settings = {
        "plugins": {"enable": [PART]},
        "kv_cache": {"num_blocks": 64},
        "load": {"use": "dummy"},
    }

    async def run():
        async with AsyncLLM(str(folder), config=settings, max_model_len=64) as llm:
            later = asyncio.create_task(llm.plugins.call_part("answering", "later"))
            await asyncio.sleep(0)
            outputs = [output async for output in llm.generate([1, 2], SamplingParams())]
            assert not later.done()
            assert await llm.plugins.call_part("answering", "now") is None
            return await later, outputs[-1].finished

    assert asyncio.run(run()) == ("answered", True)
    assert "answering" not in {thread.name for thread in threading.enumerate()}
