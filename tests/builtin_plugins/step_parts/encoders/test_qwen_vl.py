"""Qwen2.5-VL and Qwen3-VL: equal to transformers, and the same in a batch as alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gemma_images import distance
from support.qwen_images import prompt, reference, write_model

from hardpoint import LLM, SamplingParams

PROMPTS = {
    "one": prompt("see ", 0, " what is it?"),
    "begins": prompt(1, "and then"),
    "ends": prompt("it is ", 4),
    "two beside": prompt("x", 2, 1, "y"),
    "four": prompt("first ", 0, " second ", 1, " third ", 2, " fourth ", 3, " all?"),
    "twice": prompt("the same ", 3, " and the same ", 3, " again"),
    "text": prompt("only text here, some of it"),
}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module", params=["2.5", "3"])
def folder(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen_vl"), request.param)


def open_llm(folder: Path, **tables: Any) -> LLM:
    config = {"dtype": "float32", "max_model_len": 512, "kv_cache": {"block_size": 8}}
    for name, table in tables.items():
        default = config.get(name, {})
        config[name] = {**default, **table} if isinstance(table, dict) else table
    return LLM(str(folder), config=config)


def results(output) -> tuple[list[int], list[dict[int, float]]]:
    completion = output.outputs[0]
    assert completion.finish_reason == "length", completion.error
    values = [{t: each.logprob for t, each in entry.items()} for entry in completion.logprobs]
    return completion.token_ids, values


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Any]:
    """Each prompt computed alone, whole, without a cache."""
    with open_llm(folder, kv_cache={"prefix_caching": False}) as llm:
        return {name: results(llm.generate([each], GREEDY)[0]) for name, each in PROMPTS.items()}


def test_logits_and_greedy_tokens_are_those_of_transformers(folder):
    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=120, detokenize=False
    )
    known = reference(folder)
    with open_llm(folder) as llm:
        outputs = llm.generate(list(PROMPTS.values()), params)
    for (name, each), output in zip(PROMPTS.items(), outputs, strict=True):
        token_ids, expected = known.logprobs(each)
        assert output.prompt_token_ids == token_ids, name
        assert distance(output.prompt_logprobs, expected) < 1e-4, name
        assert output.outputs[0].token_ids == known.greedy(each, 8), name


@pytest.mark.parametrize(
    "tables",
    [
        {"scheduler": {"max_num_batched_tokens": 24}},
        {"scheduler": {"long_prefill_token_threshold": 5}},
        pytest.param({"scheduler": {"max_num_seqs": 8}}, marks=pytest.mark.nightly),
        {"plugin": {"encoders": {"budget_tokens": 64}}},
        {"speculation": {"use": ["ngram"]}},
        {"scheduler": {"asynchronous": True}},
        pytest.param(
            {"parallel": {"pipeline": 2}, "executor": {"use": "multiproc"}},
            marks=pytest.mark.nightly,
        ),
        {"attention": {"use": "native_cpu"}},
        {"plugin": {"kv_canary": {"enabled": True}}},
    ],
    ids=lambda tables: ", ".join(f"{name}.{next(iter(tables[name]))}" for name in tables),
)
def test_a_batch_is_the_same_as_each_alone(folder, alone, tables):
    with open_llm(folder, **tables) as llm:
        outputs = llm.generate(list(PROMPTS.values()), GREEDY)
        again = llm.generate(list(PROMPTS.values()), GREEDY)
    for name, first, second in zip(PROMPTS, outputs, again, strict=True):
        assert results(first) == alone[name], name
        assert results(second) == alone[name], name


def test_preempted_requests_are_the_same_as_alone(folder):
    given = [prompt("abcdefg", index, "xyz") for index in range(4)] * 2
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=3)
    cache = {"prefix_caching": False}
    with open_llm(folder, kv_cache=cache) as llm:
        alone = [results(llm.generate([each], params)[0]) for each in given]
    few = {**cache, "num_blocks": 40, "watermark": 0.0}
    with open_llm(folder, kv_cache=few, max_model_len=128) as llm:
        together = llm.generate(given, params)
        assert llm.engines.scheduler_stats().num_preemptions > 0
    assert [results(output) for output in together] == alone
