"""SchedulerOutput: the contents of a plan, and contents that it has once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.builtins.scheduler_harness import (
    FirstComeFirstServed,
    Priority,
    Simulator,
    reference,
)
from support.searching import examples

from hardpoint.plugins import FinishReason


def test_plans_are_numbered_from_one():
    sim = Simulator()
    sim.add("a")
    assert [sim.step().step for _ in range(3)] == [1, 2, 3]


def test_a_step_with_nothing_to_do_is_a_valid_plan_that_reports_finished_requests():
    sim = Simulator()
    sim.add("a", max_tokens=1)
    sim.step()
    assert sim.scheduler.has_requests()
    plan = sim.step()
    assert plan.total_num_scheduled_tokens == 0
    assert plan.num_scheduled_tokens == {}
    assert plan.finished_request_ids == {"a"}
    assert not sim.scheduler.has_requests()
    assert sim.step().finished_request_ids == frozenset()


def test_what_ended_between_two_steps_is_reported_once():
    sim = Simulator()
    for name in "abc":
        sim.add(name)
    sim.add("d", max_tokens=1)
    sim.step()
    sim.abort("a", "b", reason=FinishReason.ABORT)
    plan = sim.step()
    assert plan.finished_request_ids == {"a", "b", "d"}
    sim.abort("c", reason=FinishReason.ABORT)
    assert sim.step().finished_request_ids == {"c"}
    assert plan.finished_request_ids == {"a", "b", "d"}  # what was handed out does not change


def test_preempted_ids_are_reported_once():
    sim = Simulator()
    sim.add("a")
    sim.step()
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    plan = sim.step()
    assert plan.preempted_request_ids == {"a"}
    assert [entry.source.request_id for entry in plan.new_requests] == ["a"]
    assert sim.step().preempted_request_ids == frozenset()


def test_a_running_request_may_be_absent_from_a_plan():
    sim = Simulator(max_num_batched_tokens=4, num_draft_tokens=3)
    sim.add("a", prompt=2)
    sim.add("b", prompt=2)
    sim.step()
    sim.scheduler.update_drafts({"a": [1, 2, 3]})
    plan = sim.step()
    assert plan.num_scheduled_tokens == {"a": 4}
    assert plan.cached_requests.request_ids == ["a"]
    assert sim.scheduler.stats().num_running == 2


def test_computed_tokens_advance_before_the_model_has_run():
    sim = Simulator(max_num_batched_tokens=4, asynchronous=True)
    sim.add("a", prompt=10)
    plans = [sim.plan() for _ in range(3)]
    assert [plan.num_scheduled_tokens["a"] for plan in plans] == [4, 4, 2]
    assert plans[1].cached_requests.num_computed_tokens == [4]
    assert plans[2].cached_requests.num_computed_tokens == [8]


def test_events_of_the_cache_are_there_after_the_plan():
    sim = Simulator(events=True)
    sim.add("a", prompt=9)
    assert sim.cache.take_events() == []
    sim.plan()
    (stored,) = sim.cache.take_events()
    assert len(stored.block_hashes) == 2
    quiet = Simulator()
    quiet.add("a", prompt=9)
    quiet.plan()
    assert quiet.cache.take_events() == []


JOBS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(0, 3), st.integers(0, 2)),
    min_size=1,
    max_size=6,
)


@examples(8)
@given(
    JOBS,
    st.integers(7, 20),
    st.integers(3, 30),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.sampled_from([0, 1, 2]),
)
def test_whatever_comes_limits_hold_and_tokens_are_those_of_each_alone(
    jobs, blocks, budget, threshold, by_priority, depth
):
    """The harness checks each plan, each record and each cache slot that is read."""
    sim = Simulator(
        blocks=blocks,
        block_size=4,
        policy=Priority if by_priority else FirstComeFirstServed,
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        asynchronous=depth > 0,
    )
    adds = []
    for i, (prompt, outputs, priority, kind) in enumerate(jobs):
        fields = {"prompt": [kind] * prompt, "max_tokens": outputs}
        adds.append((str(i), fields))
        sim.add(str(i), priority=priority, **fields)
        if i % 2 and not depth:
            sim.step()
    assert sim.run(400, depth=depth) == reference(*adds)
    assert sim.cache.num_free_blocks == blocks
