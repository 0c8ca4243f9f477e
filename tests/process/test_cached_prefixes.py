"""Two engine processes: requests go where their prompts are cached, by the engines' reports."""

from __future__ import annotations

import pytest
from support.process.harness import process_config

from hardpoint import LLM, SamplingParams
from hardpoint.plugins import LoadBalancer

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
SIZE = 8
TEXT = "a prompt of a few blocks, which another one may begin with"


class MostCached(LoadBalancer):
    """Takes the engine that has most of the prompt, else the first; notes its view."""

    contract = 1
    uses_cached_prefixes = True
    seen = []

    def choose(self, request, engines):
        cached = [engine.cached_prefix_tokens(request) for engine in engines]
        self.seen.append(cached)
        return cached.index(max(cached))


@pytest.fixture
def llm(scripted):
    extra = {
        "kv_cache": {"block_size": SIZE},
        "parallel": {"data": 2, "balancer": f"{__name__}:MostCached"},
    }
    MostCached.seen.clear()
    with LLM(config=process_config(scripted, extra)) as llm:
        yield llm


def test_a_request_goes_where_its_prompt_is_cached(llm):
    (first,) = llm.generate(TEXT, GREEDY, data_parallel_rank=1)
    assert not MostCached.seen
    whole = (len(first.prompt_token_ids) - 1) // SIZE * SIZE
    (second,) = llm.generate(TEXT, GREEDY)
    assert MostCached.seen[-1] == [0, whole]
    assert second.num_cached_tokens == whole
    llm.generate(TEXT, GREEDY, cache_salt="mine")
    assert MostCached.seen[-1] == [0, 0]
    (third,) = llm.generate(TEXT, GREEDY, cache_salt="mine")
    assert MostCached.seen[-1] == [whole, 0]
    assert third.num_cached_tokens == whole

    llm.reset_prefix_cache()
    for rank in (0, 1):  # its outputs come after the report of the reset
        llm.generate("another", GREEDY, data_parallel_rank=rank)
    (fourth,) = llm.generate(TEXT, GREEDY)
    assert MostCached.seen[-1] == [0, 0]
    assert fourth.num_cached_tokens == 0
