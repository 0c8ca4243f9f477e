"""The demo model against transformers: the same tokens, alone and in company.

What transformers computes stands in a file (scripts/demo-reference). No two best logits of its
prompts are closer than the last bits in which matrix products differ with the number of rows, so
every token must be the same.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.demo_reference import GREEDY, LONG_GREEDY, NEW_TOKENS
from support.driving import run
from support.internals import engine_of
from support.processes import ROOT

from hardpoint import LLM, RequestOutputKind, SamplingParams


@pytest.fixture(scope="module")
def fp32():
    with LLM("smollm2", dtype="float32", max_model_len=512, config={"device": "cpu"}) as llm:
        yield llm


@pytest.fixture(scope="module")
def a_few(request):
    """Seven prompts of all shapes; with --all, every prompt."""
    return GREEDY if request.config.getoption("all") else GREEDY[::5]


@pytest.fixture(scope="module")
def half(request):
    """Half of the prompts, of all shapes; with --all, every prompt."""
    return GREEDY if request.config.getoption("all") else GREEDY[::2]


def compare(llm: LLM, references, per_step: int | None) -> None:
    """Run all prompts and assert that every token is the reference's, and its log-probability."""
    jobs = []
    for index, each in enumerate(references):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=NEW_TOKENS - index % 7,  # so that requests leave at different times
            ignore_eos=True,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        jobs.append((each.prompt, each.prompt, params))
    if per_step == 0:
        results = {}
        for job in jobs:
            results.update(run(engine_of(llm), [job]))
    else:
        results = run(engine_of(llm), jobs, per_step)
    for (_, _, params), each in zip(jobs, references, strict=True):
        ((_, tokens, _, _, _, logprobs),) = results[each.prompt][0]
        assert tokens == each.tokens[: params.max_tokens], each.prompt
        values = [entry[token][0] for token, entry in zip(tokens, logprobs, strict=True)]
        assert values == pytest.approx(each.logprobs[: params.max_tokens], abs=1e-3), each.prompt


@pytest.mark.parametrize(
    "per_step",
    [
        pytest.param(0, id="alone"),
        pytest.param(None, id="in one batch", marks=pytest.mark.nightly),
        pytest.param(3, id="joining and leaving"),
    ],
)
def test_fp32_tokens_are_those_of_transformers(fp32, a_few, half, per_step):
    compare(fp32, a_few if per_step == 0 else half, per_step)


@pytest.mark.parametrize("per_step", [0, None], ids=["alone", "in one batch"])
def test_drafts_change_no_fp32_token(a_few, per_step):
    replies = [[each.prompt_ids, each.tokens] for each in a_few]
    options = {"right": 0.7, "count": 4, "replies": replies}
    config = {
        "device": "cpu",
        "plugins": {"enable": ["hardpoint.testing:ScriptedDrafts"]},
        "plugin": {"scripted_drafts": options},
    }
    with LLM("smollm2", dtype="float32", max_model_len=512, config=config) as llm:
        compare(llm, a_few, per_step)
        stats = llm.engines.scheduler_stats()
    assert stats.num_accepted_drafts > 0.4 * stats.num_drafts > 20


SMALL_POOL = {"num_blocks": 17, "watermark": 0.0}
STACKS = {
    "chunks of 16": {"scheduler": {"max_num_batched_tokens": 16}},
    "chunks of 64": {"scheduler": {"max_num_batched_tokens": 64}},
    "whole prompts": {"scheduler": {"chunked_prefill": False}},
    "blocks of 32": {"kv_cache": {"block_size": 32}},
    "no prefix cache": {"kv_cache": {"prefix_caching": False}},
    "preempting": {"kv_cache": SMALL_POOL},
    "preempting, no prefix cache": {"kv_cache": {**SMALL_POOL, "prefix_caching": False}},
    "preempting, priority": {"kv_cache": SMALL_POOL, "scheduler": {"policy": "priority"}},
    "preempting, fair": {"kv_cache": SMALL_POOL, "scheduler": {"policy": "fair"}},
}
ALWAYS = ("preempting",)


@pytest.mark.parametrize(
    "stack",
    [pytest.param(s, marks=[] if s in ALWAYS else [pytest.mark.nightly]) for s in STACKS],
)
def test_fp32_tokens_do_not_depend_on_scheduling(stack, half):
    config = {"device": "cpu", **STACKS[stack]}
    with LLM("smollm2", dtype="float32", max_model_len=96, config=config) as llm:
        compare(llm, half, None)
        stats = llm.engines.scheduler_stats()
    print(f"{stack}: {stats.num_preemptions} preemptions, {stats.prefix_cache.hit_tokens} hits")
    least = 10 if half == GREEDY else 5
    assert (stats.num_preemptions > least) == stack.startswith("preempting")
    assert (stats.prefix_cache.hit_tokens > 100) == ("no prefix cache" not in stack)


@pytest.mark.nightly
def test_bf16_is_as_near_to_fp32_as_transformers_own():
    """Teacher-forced argmax over the same text, against fp32."""
    texts = [each.prompt_ids + each.tokens for each in LONG_GREEDY]
    with LLM("smollm2", dtype="bfloat16", max_model_len=512) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        outputs = llm.generate(texts, params)
    ours = positions = 0
    for each, output in zip(LONG_GREEDY, outputs, strict=True):
        for place, best in enumerate(each.best[:-1], start=1):
            entry = output.prompt_logprobs[place]
            first = next(token for token, item in entry.items() if item.rank == 1)
            positions += 1
            ours += first == best
    theirs = sum(each.bf16_equal for each in LONG_GREEDY)
    print(f"bf16 argmax equal to fp32: ours {ours}, transformers' {theirs}, of {positions}")
    assert positions >= 256
    assert ours >= theirs - 2


@pytest.mark.nightly
def test_the_reference_is_what_transformers_computes():
    done = subprocess.run(
        [sys.executable, "scripts/demo_reference.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
