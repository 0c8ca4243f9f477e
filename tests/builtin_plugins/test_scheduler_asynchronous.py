"""Steps planned before the results of the last ones are in: placeholders, and the same tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.scheduler_harness import (
    FirstComeFirstServed,
    Priority,
    Simulator,
    next_token,
    reference,
)
from support.searching import examples

from hardpoint.plugins import FinishReason, ModelRunnerOutput, RequestStatus, WaitingFor
from hardpoint.plugins.requests import TokenLogprobs


def start(prompt=4, **fields):
    sim = Simulator(asynchronous=True)
    sim.add("a", prompt=prompt, **fields)
    return sim


def test_a_placeholder_stands_for_a_token_that_is_on_its_way():
    sim = start()
    first = sim.plan()
    live = sim.live("a")
    assert (live.num_computed_tokens, live.num_output_placeholders) == (4, 1)
    second = sim.plan()
    assert second.num_scheduled_tokens == {"a": 1}
    assert (live.num_computed_tokens, live.num_output_placeholders) == (5, 2)
    sim.update(first)
    assert (live.num_tokens, live.num_output_placeholders) == (5, 1)
    sim.update(second)
    assert (live.num_tokens, live.num_output_placeholders) == (6, 0)


def test_an_unfinished_prompt_has_no_placeholder():
    sim = Simulator(asynchronous=True, max_num_batched_tokens=3)
    sim.add("a", prompt=7)
    for expected in (0, 0, 1):
        sim.plan()
        assert sim.live("a").num_output_placeholders == expected


def test_nothing_is_planned_beyond_what_a_request_may_generate():
    sim = start(max_tokens=3)
    plans = [sim.plan() for _ in range(5)]
    assert [plan.num_scheduled_tokens.get("a") for plan in plans] == [4, 1, 1, None, None]
    assert sim.why("a").waiting_for is WaitingFor.RESULTS
    for plan in plans:
        sim.update(plan)
    assert len(sim.tokens["a"]) == 3
    assert sim.ends["a"].finish_reason is FinishReason.LENGTH


def test_results_that_come_after_the_end_are_thrown_away():
    sim = start(prompt=[9] * 4, eos_token_ids=[next_token([9] * 4)])
    first, second = sim.plan(), sim.plan()
    results = [sim.executor.execute(plan) for plan in (first, second)]
    outputs = sim.update(first, results[0])
    assert outputs["a"].finish_reason is FinishReason.STOP
    assert sim.update(second, results[1]) == {}
    assert sim.cache.num_free_blocks == 64
    assert sim.step().finished_request_ids == {"a"}


def test_what_was_sampled_for_one_that_was_preempted_since_is_sampled_again():
    sim = start(max_tokens=4)
    first = sim.plan()
    result = sim.executor.execute(first)
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    second = sim.plan()  # it is back before its first result is
    assert sim.update(first, result) == {}
    assert sim.live("a").num_output_placeholders == 1
    sim.update(second)
    assert sim.run(depth=1) == reference(
        ("a", {"prompt": [1000, 1001, 1002, 1003], "max_tokens": 4})
    )


def test_a_request_whose_results_are_on_their_way_does_not_preempt_itself():
    """Or it would lose them in every step, and never get on."""
    sim = Simulator(blocks=2, block_size=4, asynchronous=True)
    sim.add("a", prompt=6, max_tokens=50)
    plans = [sim.plan() for _ in range(4)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 6}, {"a": 1}, {"a": 1}, {}]
    assert sim.live("a").status is RequestStatus.RUNNING
    assert sim.why("a").waiting_for is WaitingFor.RESULTS
    assert sim.records[-1].admission_stopped.waiting_for is WaitingFor.BLOCKS


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_that_outgrows_the_pool_ends_as_it_would_without(depth):
    ends = []
    for late in (0, depth):
        sim = Simulator(blocks=2, block_size=4, asynchronous=late > 0)
        sim.add("a", prompt=6, max_tokens=50)
        sim.run(60, depth=late)
        ends.append((sim.tokens["a"], sim.ends["a"].error))
    assert ends[0] == ends[1]
    assert ends[0][1].startswith("the KV cache is too small: 9 tokens need 3 blocks of 4 tokens")


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("policy", [FirstComeFirstServed, Priority])
@pytest.mark.parametrize("blocks", [7, 64])
def test_results_that_come_late_give_the_same_tokens(depth, policy, blocks):
    adds = [
        (name, {"prompt": [i // 2] * (6 + i), "max_tokens": 3 + 2 * i, "priority": i % 2})
        for i, name in enumerate("abcde")
    ]
    sim = Simulator(blocks=blocks, block_size=4, policy=policy, asynchronous=True, max_num_seqs=4)
    for name, fields in adds:
        sim.add(name, **fields)
    assert sim.run(depth=depth) == reference(*adds)
    assert (sim.scheduler.stats().num_preemptions > 0) == (blocks == 7)


@examples(8)
@given(
    st.lists(st.tuples(st.integers(1, 15), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(6, 12),
    st.integers(2, 20),
)
def test_late_results_never_change_a_token(jobs, depth, blocks, budget):
    sim = Simulator(blocks=blocks, block_size=4, asynchronous=True, max_num_batched_tokens=budget)
    adds = [
        (str(i), {"prompt": [5] * prompt, "max_tokens": outputs})
        for i, (prompt, outputs) in enumerate(jobs)
    ]
    for name, fields in adds:
        sim.add(name, **fields)
    assert sim.run(500, depth=depth) == reference(*adds)
    assert sim.cache.num_free_blocks == blocks


def test_a_lost_plan_takes_later_ones_with_it():
    sim = start(max_tokens=6)
    sim.add("b", prompt=[3] * 9, max_tokens=6)
    lost = sim.plan()
    sim.add("c", prompt=[3] * 9, max_tokens=6)  # finds what b should have computed
    later = sim.plan()
    assert later.new_requests[0].num_computed_tokens == 8
    sim.lose(lost)
    sim.executor.record_lost_plan(later)
    assert sim.live("c").status is RequestStatus.PREEMPTED
    assert sim.update(later, ModelRunnerOutput(sampled_token_ids={"a": [1], "c": [1]})) == {}
    plan = sim.plan()
    assert [entry.num_computed_tokens for entry in plan.new_requests] == [0, 0, 8]
    sim.update(plan)
    wanted = {"prompt": [3] * 9, "max_tokens": 6}
    assert sim.run(depth=1)["c"] == reference(("c", wanted))["c"]


def test_what_a_lost_plan_should_have_computed_is_not_found():
    sim = Simulator(asynchronous=True)
    sim.add("a", prompt=[3] * 9)
    lost = sim.plan()
    sim.abort("a", reason=FinishReason.ABORT)
    sim.lose(lost)
    sim.add("b", prompt=[3] * 9)
    assert sim.plan().new_requests[0].num_computed_tokens == 0


def test_logprobs_of_a_prompt_are_delivered_once_whatever_was_planned_since():
    sim = Simulator(asynchronous=True, max_num_batched_tokens=3)
    sim.add("a", prompt=7, params={"prompt_logprobs": 0})
    plans = [sim.plan() for _ in range(3)]
    reported = []
    for plan, positions in zip(plans, ([0, 1, 2, 3], [4, 5, 6], []), strict=True):
        logprobs = [None if p == 0 else TokenLogprobs([p], [0.0], 1) for p in positions]
        result = sim.executor.execute(plan)
        output = sim.update(plan, result, prompt_logprobs={"a": logprobs}).get("a")
        reported += [entry and entry.token_ids[0] for entry in output.prompt_logprobs or ()]
    assert reported == [None, 1, 2, 3, 4, 5, 6]
