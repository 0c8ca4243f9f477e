"""SchedulerOutput: what a plan tells, and what it tells once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.builtins.scheduler_harness import (
    FirstComeFirstServed,
    Grammars,
    Priority,
    Rig,
    reference,
)
from support.searching import examples

from hardpoint.plugins import FinishReason


def test_plans_are_numbered_from_one():
    rig = Rig()
    rig.add("a")
    assert [rig.step().step for _ in range(3)] == [1, 2, 3]


def test_a_step_with_nothing_to_do_is_a_valid_plan_that_tells_who_ended():
    rig = Rig()
    rig.add("a", max_tokens=1)
    rig.step()
    assert rig.scheduler.has_requests()
    plan = rig.step()
    assert plan.total_num_scheduled_tokens == 0
    assert plan.num_scheduled_tokens == {}
    assert plan.finished_request_ids == {"a"}
    assert not rig.scheduler.has_requests()
    assert rig.step().finished_request_ids == frozenset()


def test_what_ended_between_two_steps_is_told_once():
    rig = Rig()
    for name in "abc":
        rig.add(name)
    rig.add("d", max_tokens=1)
    rig.step()
    rig.abort("a", "b", reason=FinishReason.ABORT)
    plan = rig.step()
    assert plan.finished_request_ids == {"a", "b", "d"}
    rig.abort("c", reason=FinishReason.ABORT)
    assert rig.step().finished_request_ids == {"c"}
    assert plan.finished_request_ids == {"a", "b", "d"}  # what was handed out does not change


def test_preempted_ids_are_told_once():
    rig = Rig()
    rig.add("a")
    rig.step()
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    plan = rig.step()
    assert plan.preempted_request_ids == {"a"}
    assert [entry.source.request_id for entry in plan.new_requests] == ["a"]
    assert rig.step().preempted_request_ids == frozenset()


def test_a_running_request_may_be_absent_from_a_plan():
    rig = Rig(max_num_batched_tokens=4, num_draft_tokens=3)
    rig.add("a", prompt=2)
    rig.add("b", prompt=2)
    rig.step()
    rig.scheduler.update_drafts({"a": [1, 2, 3]})
    plan = rig.step()
    assert plan.num_scheduled_tokens == {"a": 4}
    assert plan.cached_requests.request_ids == ["a"]
    assert rig.scheduler.stats().num_running == 2


def test_structured_requests_of_the_step_and_no_others():
    rig = Rig(surroundings={"grammars": Grammars()}, max_num_batched_tokens=4, num_draft_tokens=3)
    rig.add("g1", prompt=2)
    rig.add("g2", prompt=2)
    rig.step()
    rig.scheduler.update_drafts({"g1": [1, 2, 3]})
    plan = rig.step()
    assert plan.structured_request_ids == {"g1": 0}
    assert plan.draft_token_ids == {"g1": [1, 2, 3]}  # the mask covers their positions, too


def test_without_grammars_nobody_is_structured():
    rig = Rig()
    rig.add("g1")
    assert rig.step().structured_request_ids == {}


def test_computed_tokens_advance_before_the_model_has_run():
    rig = Rig(max_num_batched_tokens=4, asynchronous=True)
    rig.add("a", prompt=10)
    plans = [rig.plan() for _ in range(3)]
    assert [plan.num_scheduled_tokens["a"] for plan in plans] == [4, 4, 2]
    assert plans[1].cached_requests.num_computed_tokens == [4]
    assert plans[2].cached_requests.num_computed_tokens == [8]


def test_events_of_the_cache_are_there_after_the_plan():
    rig = Rig(events=True)
    rig.add("a", prompt=9)
    assert rig.cache.take_events() == []
    rig.plan()
    (stored,) = rig.cache.take_events()
    assert len(stored.block_hashes) == 2
    quiet = Rig()
    quiet.add("a", prompt=9)
    quiet.plan()
    assert quiet.cache.take_events() == []


JOBS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(0, 3), st.integers(0, 2)),
    min_size=1,
    max_size=6,
)


@examples(60)
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
    rig = Rig(
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
        rig.add(str(i), priority=priority, **fields)
        if i % 2 and not depth:
            rig.step()
    assert rig.run(400, depth=depth) == reference(*adds)
    assert rig.cache.num_free_blocks == blocks
