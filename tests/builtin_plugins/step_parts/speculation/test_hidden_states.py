"""Heads that draft from hidden states: the right rows in every situation, and the same tokens."""

from __future__ import annotations

import itertools

import pytest
from support.cases import nightly_but
from support.drafting_heads import fix_costs_of_drafts
from support.driving import FINAL, run
from support.parallel import write_random_model
from support.plugins import heads

from hardpoint import LLM, SamplingParams
from hardpoint.testing import SpeculatorSuite, scripted_config

HERE = "support.plugins.heads"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **FINAL)
PROMPT = [11 * n % 256 for n in range(20)]


def settings(head="ExactHead", **tables):
    table = {"use": [f"{HERE}:{head}"], "num_draft_tokens": 3, "adaptive": False}
    return {"speculation": table | tables.pop("speculation", {}), **tables}


SITUATIONS = {
    "whole prompts": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "preemptions": {"kv_cache": {"num_blocks": 24, "block_size": 8}, "max_model_len": 128},
    "preemptions of chunks": {
        "kv_cache": {"num_blocks": 24, "block_size": 8},
        "max_model_len": 128,
        "scheduler": {"max_num_batched_tokens": 24},
    },
    "few drafts": {"speculation": {"adaptive": True}},
}


@pytest.mark.parametrize(
    ("situation", "head"),
    nightly_but(
        itertools.product(SITUATIONS, ("Head", "ExactHead")),
        ("few drafts", "Head"),
        ("few drafts", "ExactHead"),
        ("preemptions of chunks", "ExactHead"),
    ),
)
def test_tokens_are_those_without_a_head(open_engine, jobs, expected, situation, head, monkeypatch):
    fix_costs_of_drafts(monkeypatch)
    engine = open_engine(settings(head, **SITUATIONS[situation]))
    for _ in range(2):  # the second time with cached prefixes
        assert run(engine, jobs, per_step=3) == expected
    stats = engine.call_utility("scheduler_stats")
    assert stats.num_drafts > 0
    if head == "ExactHead":
        assert stats.num_accepted_drafts > 100  # of the few greedy requests
    assert (stats.num_preemptions > 0) == ("preemptions" in situation)
    assert not engine.health().fallbacks


@pytest.mark.parametrize("length", [16, 17, 20])
def test_a_cached_prefix_has_no_hidden_states_but_the_last_token_has(open_engine, length):
    engine = open_engine(settings(kv_cache={"block_size": 8}))
    results = []
    for _ in range(2):
        heads.STARTS.clear()
        results.append(run(engine, [("r", PROMPT[:length], GREEDY)]))
        stats = engine.call_utility("scheduler_stats")
        assert stats.num_drafts == stats.num_accepted_drafts > 0
        cached = 0 if len(results) == 1 else (length - 1) // 8 * 8
        assert heads.STARTS[0] == (1, cached)
        # A call shows what was computed since the one before: the token before it, and drafts.
        for before, after in zip(heads.STARTS, heads.STARTS[1:], strict=False):
            assert after[1] == length + before[0] - 1
    assert results[0] == results[1]
    assert not engine.health().fallbacks


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


def test_a_head_of_a_model_with_random_weights_changes_no_token(random_model):
    table = {"model": str(random_model), "max_model_len": 128, "device": "cpu"}
    table |= {"load": {"use": "dummy"}, "dtype": "float32"}
    params = [GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=20, **FINAL)]
    prompts = [PROMPT, [*PROMPT[:17], 7]]
    tokens = []
    for more in ({}, settings("Head"), settings("Head", scheduler={"max_num_batched_tokens": 16})):
        with LLM(config=table | more) as llm:
            outputs = llm.generate(prompts, params) + llm.generate(prompts, params)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            assert bool(more) == bool(llm.engines.scheduler_stats().num_drafts)
            assert not llm.plugins.health().fallbacks
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_head_drafts_in_the_last_stage_of_a_pipeline(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate([PROMPT], GREEDY)]
    more = settings(executor={"use": "multiproc"}, parallel={"pipeline": 2})
    with LLM(config=scripted_config(scripted, more)) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate([PROMPT], GREEDY)]
        stats = llm.engines.scheduler_stats()
        assert not llm.plugins.health().fallbacks
    assert tokens == expected
    assert stats.num_drafts == stats.num_accepted_drafts > 0


class TestHead(SpeculatorSuite):
    speculator = heads.Head
    budget_us_per_request = 2000.0  # of operations of torch
