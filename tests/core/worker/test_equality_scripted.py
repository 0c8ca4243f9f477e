"""Bit for bit: a request gives the same tokens alone and in any company (DESIGN section 6)."""

from __future__ import annotations

import pytest
from support.driving import FINAL, alone, drafting, run, summary, varied_jobs
from support.internals import core_of
from support.searching import searches_long

from hardpoint import SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.testing import ScriptedClock, history_hash, scripted_engine

COUNT = 40 if searches_long() else 12


@pytest.fixture(scope="module")
def expected(scripted):
    engine = scripted_engine(scripted)
    yield alone(engine, varied_jobs(COUNT))
    engine.close()


SMALL_POOL = {"kv_cache": {"block_size": 8, "num_blocks": 20}, "max_model_len": 128}

STACKS = {
    "defaults": {},
    "chunks-of-16": {"scheduler": {"max_num_batched_tokens": 16}},
    "chunks-of-64": {"scheduler": {"max_num_batched_tokens": 64}},
    "whole-prompts": {"scheduler": {"chunked_prefill": False, "max_num_batched_tokens": 512}},
    "long-prefill-threshold": {"scheduler": {"long_prefill_token_threshold": 7}},
    "three-at-once": {"scheduler": {"max_num_seqs": 3}},
    "blocks-of-4": {"kv_cache": {"block_size": 4}},
    "blocks-of-32": {"kv_cache": {"block_size": 32}},
    "no-prefix-cache": {"kv_cache": {"prefix_caching": False}},
    "preempting": {**SMALL_POOL, "scheduler": {"max_num_batched_tokens": 48}},
    "preempting-without-cache": {
        "max_model_len": 128,
        "kv_cache": {"block_size": 8, "num_blocks": 20, "prefix_caching": False},
    },
    "priority": {**SMALL_POOL, "scheduler": {"policy": "priority"}},
    "fair": {**SMALL_POOL, "scheduler": {"policy": "fair"}},
    "shortest-first": {**SMALL_POOL, "scheduler": {"policy": "shortest_first"}},
}


@pytest.mark.parametrize("extra", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("per_step", [None, 2])
def test_batched_equals_alone(open_engine, expected, extra, per_step):
    engine = open_engine(extra)
    assert run(engine, varied_jobs(COUNT), per_step) == expected


@pytest.mark.parametrize(
    "stack",
    ["defaults", "chunks-of-16", "whole-prompts", "long-prefill-threshold", "three-at-once"],
)
def test_drafts_change_nothing(open_engine, expected, stack):
    jobs = varied_jobs(COUNT)
    engine = open_engine({**STACKS[stack], **drafting(jobs, expected)})
    assert run(engine, jobs, 2) == expected
    stats = engine.call_utility("scheduler_stats")
    assert stats.num_accepted_drafts > 0.4 * stats.num_drafts > 5 * COUNT
    assert stats.kv_cache_usage == 0


def test_alone_with_drafts(open_engine, expected):
    jobs = varied_jobs(COUNT)
    engine = open_engine(drafting(jobs, expected, made_in="worker", right=0.5))
    assert alone(engine, jobs) == expected


def test_drafts_change_no_log_probability_of_a_prompt(scripted):
    params = SamplingParams(max_tokens=9, seed=3, prompt_logprobs=2, **FINAL)
    jobs = [(f"r{size}", list(range(size)), params) for size in (1, 2, 15, 40)]

    def outputs(extra):
        engine = scripted_engine(scripted, extra)
        for job in jobs:
            engine.add_request(*job)
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step() if output.finished}
        engine.close()
        return found

    plain = outputs({"scheduler": {"max_num_batched_tokens": 7}})
    expected = {name: [summary(output)] for name, output in plain.items()}
    drafts = drafting(jobs, expected)
    for size in (7, 64):
        drafted = outputs({**drafts, "scheduler": {"max_num_batched_tokens": size}})
        assert {name: [summary(output)] for name, output in drafted.items()} == expected
        assert all(drafted[n].prompt_logprobs == plain[n].prompt_logprobs for n in plain)


def test_prompts_that_begin_alike_share_blocks_and_tokens_stay(open_engine, expected):
    """The second round finds the prompts of the first; a third one is salted."""
    engine = open_engine({"kv_cache": {"block_size": 4}})
    run(engine, varied_jobs(COUNT))
    first = engine.call_utility("scheduler_stats").prefix_cache
    assert run(engine, varied_jobs(COUNT), 3) == expected
    second = engine.call_utility("scheduler_stats").prefix_cache
    assert second.hit_tokens - first.hit_tokens > 0.7 * (second.queried_tokens / 2)
    for request_id, prompt, params in varied_jobs(COUNT):
        engine.add_request(request_id, prompt, params, RequestExtras(cache_salt=request_id))
    engine.step()
    own = sum(len(prompt) // 4 * 4 * 2 for _, prompt, params in varied_jobs(COUNT) if params.n == 3)
    assert engine.call_utility("scheduler_stats").prefix_cache.hit_tokens - second.hit_tokens <= own


def test_preemption_really_happens(open_engine):
    """Guards the `preempting` case above: without preemption it would prove nothing."""
    engine = open_engine(
        {"max_model_len": 64, "kv_cache": {"block_size": 4, "memory_bytes": 4 * 8 * 16}}
    )
    plans = []
    core = core_of(engine)
    schedule = core._scheduler.schedule
    core._scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
    jobs = [
        (f"r{i}", [i] * 10, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **FINAL))
        for i in range(4)
    ]
    run(engine, jobs)
    assert sum(len(plan.preempted_request_ids) for plan in plans) >= 2
    cache = core._scheduler.context.kv_cache
    assert cache.num_free_blocks == cache.num_blocks


def test_same_seed_same_tokens_and_completions_differ(open_engine):
    engine = open_engine()
    params = SamplingParams(temperature=1.0, seed=11, n=4, max_tokens=12, **FINAL)
    first = run(engine, [("a", "hello", params)])["a"][0]
    second = run(engine, [("b", "hello", params)])["b"][0]
    assert first == second
    assert len({tuple(completion[1]) for completion in first}) == 4


def test_unseeded_requests_differ_but_an_engine_seed_repeats_them(scripted):
    params = SamplingParams(temperature=1.0, max_tokens=12, **FINAL)
    jobs = [("a", "x", params), ("b", "x", params)]
    runs = []
    for _ in range(2):
        engine = scripted_engine(scripted, {"seed": 3})
        runs.append(run(engine, jobs))
        engine.close()
    assert runs[0] == runs[1]
    assert runs[0]["a"] != runs[0]["b"]


def test_logits_depend_on_the_whole_history(open_engine):
    """Changing one early token changes what follows: the scripted model reads its blocks."""
    engine = open_engine()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **FINAL)
    results = run(engine, [("a", [1] * 40, params), ("b", [2] + [1] * 39, params)])
    assert results["a"] != results["b"]
    assert history_hash([1, 2]) != history_hash([2, 1])


def test_fcfs_and_priority_order_admission(scripted):
    for policy, first in (("fcfs", "low"), ("priority", "high")):
        clock = ScriptedClock()
        engine = scripted_engine(
            scripted, {"scheduler": {"policy": policy, "max_num_seqs": 1}}, clock=clock
        )
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, **FINAL)
        for request_id, priority in (("low", 5), ("high", -5)):
            clock.advance(1.0)
            engine.add_request(request_id, "x", params, RequestExtras(priority=priority))
        finished = []
        while engine.has_unfinished_requests():
            finished += [output.request_id for output in engine.step()]
        assert finished[0] == first
        engine.close()
