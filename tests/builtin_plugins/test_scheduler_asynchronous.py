"""Steps planned before the results of the last ones are in: placeholders, and the same tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.scheduler_harness import (
    FirstComeFirstServed,
    Priority,
    Rig,
    next_token,
    reference,
)
from support.searching import examples

from hardpoint.plugins import FinishReason, ModelRunnerOutput, RequestStatus, WaitingFor
from hardpoint.plugins.requests import TokenLogprobs


def start(prompt=4, **fields):
    rig = Rig(asynchronous=True)
    rig.add("a", prompt=prompt, **fields)
    return rig


def test_a_placeholder_stands_for_a_token_that_is_on_its_way():
    rig = start()
    first = rig.plan()
    live = rig.live("a")
    assert (live.num_computed_tokens, live.num_output_placeholders) == (4, 1)
    second = rig.plan()
    assert second.num_scheduled_tokens == {"a": 1}
    assert (live.num_computed_tokens, live.num_output_placeholders) == (5, 2)
    rig.update(first)
    assert (live.num_tokens, live.num_output_placeholders) == (5, 1)
    rig.update(second)
    assert (live.num_tokens, live.num_output_placeholders) == (6, 0)


def test_an_unfinished_prompt_has_no_placeholder():
    rig = Rig(asynchronous=True, max_num_batched_tokens=3)
    rig.add("a", prompt=7)
    for expected in (0, 0, 1):
        rig.plan()
        assert rig.live("a").num_output_placeholders == expected


def test_nothing_is_planned_beyond_what_a_request_may_generate():
    rig = start(max_tokens=3)
    plans = [rig.plan() for _ in range(5)]
    assert [plan.num_scheduled_tokens.get("a") for plan in plans] == [4, 1, 1, None, None]
    assert rig.why("a").waiting_for is WaitingFor.RESULTS
    for plan in plans:
        rig.update(plan)
    assert len(rig.tokens["a"]) == 3
    assert rig.ends["a"].finish_reason is FinishReason.LENGTH


def test_results_that_come_after_the_end_are_thrown_away():
    rig = start(prompt=[9] * 4, eos_token_ids=[next_token([9] * 4)])
    first, second = rig.plan(), rig.plan()
    results = [rig.executor.execute(plan) for plan in (first, second)]
    outputs = rig.update(first, results[0])
    assert outputs["a"].finish_reason is FinishReason.STOP
    assert rig.update(second, results[1]) == {}
    assert rig.cache.num_free_blocks == 64
    assert rig.step().finished_request_ids == {"a"}


def test_what_was_sampled_for_one_that_was_preempted_since_is_sampled_anew():
    rig = start(max_tokens=4)
    first = rig.plan()
    result = rig.executor.execute(first)
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    second = rig.plan()  # it is back before its first result is
    assert rig.update(first, result) == {}
    assert rig.live("a").num_output_placeholders == 1
    rig.update(second)
    assert rig.run(depth=1) == reference(
        ("a", {"prompt": [1000, 1001, 1002, 1003], "max_tokens": 4})
    )


def test_a_request_whose_results_are_on_their_way_does_not_preempt_itself():
    """Or it would lose them in every step, and never get on."""
    rig = Rig(blocks=2, block_size=4, asynchronous=True)
    rig.add("a", prompt=6, max_tokens=50)
    plans = [rig.plan() for _ in range(4)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 6}, {"a": 1}, {"a": 1}, {}]
    assert rig.live("a").status is RequestStatus.RUNNING
    assert rig.why("a").waiting_for is WaitingFor.RESULTS
    assert rig.records[-1].admission_stopped.waiting_for is WaitingFor.BLOCKS


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_that_outgrows_the_pool_ends_as_it_would_without(depth):
    ends = []
    for late in (0, depth):
        rig = Rig(blocks=2, block_size=4, asynchronous=late > 0)
        rig.add("a", prompt=6, max_tokens=50)
        rig.run(60, depth=late)
        ends.append((rig.tokens["a"], rig.ends["a"].error))
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
    rig = Rig(blocks=blocks, block_size=4, policy=policy, asynchronous=True, max_num_seqs=4)
    for name, fields in adds:
        rig.add(name, **fields)
    assert rig.run(depth=depth) == reference(*adds)
    assert (rig.scheduler.stats().num_preemptions > 0) == (blocks == 7)


@examples(40)
@given(
    st.lists(st.tuples(st.integers(1, 15), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(6, 12),
    st.integers(2, 20),
)
def test_late_results_never_change_a_token(jobs, depth, blocks, budget):
    rig = Rig(blocks=blocks, block_size=4, asynchronous=True, max_num_batched_tokens=budget)
    adds = [
        (str(i), {"prompt": [5] * prompt, "max_tokens": outputs})
        for i, (prompt, outputs) in enumerate(jobs)
    ]
    for name, fields in adds:
        rig.add(name, **fields)
    assert rig.run(500, depth=depth) == reference(*adds)
    assert rig.cache.num_free_blocks == blocks


def test_a_lost_plan_takes_later_ones_with_it():
    rig = start(max_tokens=6)
    rig.add("b", prompt=[3] * 9, max_tokens=6)
    lost = rig.plan()
    rig.add("c", prompt=[3] * 9, max_tokens=6)  # finds what b should have computed
    later = rig.plan()
    assert later.new_requests[0].num_computed_tokens == 8
    rig.scheduler.plan_lost(lost)
    assert rig.live("c").status is RequestStatus.PREEMPTED
    assert rig.update(later, ModelRunnerOutput(sampled_token_ids={"a": [1], "c": [1]})) == {}
    plan = rig.plan()
    assert [entry.num_computed_tokens for entry in plan.new_requests] == [0, 0, 8]
    rig.update(plan)
    wanted = {"prompt": [3] * 9, "max_tokens": 6}
    assert rig.run(depth=1)["c"] == reference(("c", wanted))["c"]


def test_what_a_lost_plan_should_have_computed_is_found_by_nobody():
    rig = Rig(asynchronous=True)
    rig.add("a", prompt=[3] * 9)
    lost = rig.plan()
    rig.abort("a", reason=FinishReason.ABORT)
    rig.scheduler.plan_lost(lost)
    rig.add("b", prompt=[3] * 9)
    assert rig.plan().new_requests[0].num_computed_tokens == 0


def test_logprobs_of_a_prompt_are_delivered_once_whatever_was_planned_since():
    rig = Rig(asynchronous=True, max_num_batched_tokens=3)
    rig.add("a", prompt=7, params={"prompt_logprobs": 0})
    plans = [rig.plan() for _ in range(3)]
    told = []
    for plan, positions in zip(plans, ([0, 1, 2, 3], [4, 5, 6], []), strict=True):
        logprobs = [None if p == 0 else TokenLogprobs([p], [0.0], 1) for p in positions]
        result = rig.executor.execute(plan)
        output = rig.update(plan, result, prompt_logprobs={"a": logprobs}).get("a")
        told += [entry and entry.token_ids[0] for entry in output.prompt_logprobs or ()]
    assert told == [None, 1, 2, 3, 4, 5, 6]
