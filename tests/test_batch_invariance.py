"""On the native path a request's logits are the same bits whatever else runs, on the real model."""

from __future__ import annotations

import functools
import random

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.kernels import cpu

PREFIX = "The history of the sea is long, and much of it was never written down. " * 12
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    PREFIX + "The first sailors",
    PREFIX + "Today",
    "A list of colours: red,",
    "Water boils at " * 30,
    "Once upon a time there was a small engine that",
    "1, 2, 3, 5, 8, 13,",
]
MAX_TOKENS = 16

# Prompts in small chunks, in one piece, and with so few blocks that requests are preempted.
ENGINES = {
    "chunks": {"scheduler": {"max_num_batched_tokens": 48, "max_num_seqs": 8}},
    "whole": {"scheduler": {"max_num_batched_tokens": 2048, "max_num_seqs": 8}},
    "preempted": {
        "scheduler": {"max_num_batched_tokens": 96, "max_num_seqs": 8},
        "kv_cache": {"num_blocks": 33},
    },
    "uncached": {
        "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
        "kv_cache": {"prefix_caching": False},
    },
}


def params(tokens):
    asked = {"logprobs": 3, "logprob_token_ids": [5, 49000, 260, 11]}
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **asked)


def result(output):
    """Return tokens and log-probabilities, which are equal only if the logits are, bit for bit."""
    completion = output.outputs[0]
    values = [{i: entry.logprob for i, entry in step.items()} for step in completion.logprobs]
    return list(completion.token_ids), values


CACHE_DTYPES = ("auto", "int8", "fp8")


def open_model(cache_dtype, **config):
    config["kv_cache"] = {**config.get("kv_cache", {}), "dtype": cache_dtype}
    return LLM("smollm2", dtype="bfloat16", max_model_len=512, config=config, progress=False)


@pytest.fixture(scope="module")
def alone():
    """Return a function that returns the result of each prompt alone, in one piece, without a
    cache, by dtype of keys and values.
    """
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(f"torch gives other last bits in other batches, and the kernels: {cause}")

    @functools.cache
    def results(cache_dtype):
        with open_model(cache_dtype, kv_cache={"prefix_caching": False}) as llm:
            return [result(llm.generate(prompt, params(MAX_TOKENS))[0]) for prompt in PROMPTS]

    return results


def check_schedules(alone, opened, schedules, seed):
    rng = random.Random(seed)
    with opened as llm:
        for _ in range(schedules):
            chosen = [rng.randrange(len(PROMPTS)) for _ in range(rng.randint(2, 8))]
            counts = [rng.randint(1, MAX_TOKENS) for _ in chosen]
            outputs = llm.generate([PROMPTS[i] for i in chosen], [params(n) for n in counts])
            for index, count, output in zip(chosen, counts, outputs, strict=True):
                tokens, values = alone[index]
                assert result(output) == (tokens[:count], values[:count]), (chosen, counts)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("engine", "cache_dtype"),
    [  # with few blocks, prompts are also divided
        ("preempted", "auto"),
        pytest.param("chunks", "auto", marks=pytest.mark.nightly),
        pytest.param("preempted", "int8", marks=pytest.mark.nightly),
    ],
)
def test_a_request_has_the_same_logits_in_any_batch(alone, engine, cache_dtype):
    check_schedules(alone(cache_dtype), open_model(cache_dtype, **ENGINES[engine]), 1, seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_has_the_same_logits_in_two_hundred_schedules(alone, engine, cache_dtype):
    opened = open_model(cache_dtype, **ENGINES[engine])
    check_schedules(alone(cache_dtype), opened, 50, seed=engine)
