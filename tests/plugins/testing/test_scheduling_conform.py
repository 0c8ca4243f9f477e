"""Every built-in scheduler and policy passes the public conformance kit."""

from __future__ import annotations

import sys

import pytest
from hypothesis import strategies as st
from support.kit_suites import assert_tests_builtins
from support.plugins.arguments import ByWeight
from support.processes import ROOT
from support.searching import kit_examples

from hardpoint.builtin_plugins.kv_cache.eviction import LeastRecentlyUsed
from hardpoint.builtin_plugins.policies import (
    Fair,
    FirstComeFirstServed,
    Priority,
    ShortestFirst,
)
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.plugins import FinishReason, PauseState, WaitingFor
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature
from hardpoint.testing import (
    EvictionPolicySuite,
    SchedulerSimulator,
    SchedulerSuite,
    SchedulingPolicySuite,
)
from hardpoint.testing.scheduling.fakes.connector import Compile, Transfer

sys.path.insert(0, str(ROOT / "examples" / "acme_tiny_scheduler" / "src"))

from tiny_scheduler import TinyScheduler

pytest_plugins = ["hardpoint.testing"]


class TestDefaultScheduler(SchedulerSuite):
    examples = kit_examples()
    scheduler = DefaultScheduler


class TestDefaultSchedulerWithOtherOptions(SchedulerSuite):
    scheduler = DefaultScheduler
    options = {"max_overtaken": 0, "max_set_aside": 1}
    examples = kit_examples(0.3)


class TestTinyScheduler(SchedulerSuite):
    scheduler = TinyScheduler
    uses_policy = False
    examples = kit_examples(0.3)


class TestFirstComeFirstServed(SchedulingPolicySuite):
    examples = kit_examples()
    policy = FirstComeFirstServed


class TestPolicyWithArguments(SchedulingPolicySuite):
    policy = ByWeight
    arguments = st.builds(ByWeight.Arguments, weight=st.floats(0, 200))  # prepare refuses some
    examples = kit_examples(0.3)


class TestPriority(SchedulingPolicySuite):
    examples = kit_examples()
    policy = Priority


class TestShortestFirst(SchedulingPolicySuite):
    examples = kit_examples()
    policy = ShortestFirst


class TestFair(SchedulingPolicySuite):
    examples = kit_examples()
    policy = Fair


class TestFairByWeight(SchedulingPolicySuite):
    policy = Fair
    options = {"weights": {"acme": 3.0}, "input_cost": 0.5}
    examples = kit_examples(0.3)


class TestLeastRecentlyUsed(EvictionPolicySuite):
    examples = kit_examples()
    eviction = LeastRecentlyUsed


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        ("schedulers", "scheduler"),
        ("scheduling_policies", "policy"),
        ("eviction_policies", "eviction"),
    ],
)
def test_every_builtin_has_a_suite(kind, attribute):
    assert_tests_builtins(kind, attribute, globals())


def test_a_scheduler_without_pauses_skips_their_test():
    with pytest.raises(pytest.skip.Exception, match="'TinyScheduler' cannot be paused"):
        TestTinyScheduler().test_pauses()


# These runs contain what the rules check, so that a check which never applies is noticed.


def test_a_run_has_preemptions_and_cache_hits():
    simulator = SchedulerSimulator(
        DefaultScheduler, blocks=5, block_size=2, max_num_batched_tokens=6
    )
    simulator.add("a", [1, 2, 3], max_tokens=6)
    simulator.add("b", [1, 2, 3, 4], max_tokens=5)
    outputs = simulator.run()
    assert outputs == {"a": simulator.reply([1, 2, 3], 6), "b": simulator.reply([1, 2, 3, 4], 5)}
    assert any(plan.preempted_request_ids for plan in simulator.plans)
    assert any(new.num_computed_tokens for plan in simulator.plans for new in plan.new_requests)
    assert simulator.finish_reasons == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert len(simulator.records) == len(simulator.plans) <= simulator.step_bound


def test_drafts_are_accepted_and_rejected():
    simulator = SchedulerSimulator(DefaultScheduler, num_draft_tokens=3)
    for name, drafts in (("a", "right"), ("b", "wrong"), ("c", "mixed")):
        simulator.add(name, [ord(name)], max_tokens=12, drafts=drafts)
    simulator.run()
    assert 0 < simulator.worker.accepted < simulator.worker.verified


def test_asynchronous_results_arrive_a_step_late():
    simulator = SchedulerSimulator(DefaultScheduler, asynchronous=True)
    simulator.add("a", [1, 2], max_tokens=3)
    simulator.step()
    assert simulator.outputs == {"a": []}
    assert len(simulator.in_flight) == 1
    simulator.step()
    assert len(simulator.outputs["a"]) == 1
    assert simulator.run() == {"a": simulator.reply([1, 2], 3)}


@pytest.mark.parametrize("steps", [None, 2])
def test_what_fails_to_load_is_computed(steps):
    simulator = SchedulerSimulator(DefaultScheduler, connector=True, block_size=2)
    transfer = Transfer(tokens=6, load_steps=steps, failed_block=1, save_steps=2)
    simulator.add("a", [1, 2, 3, 4, 5, 6, 7, 8], transfer=transfer)
    assert simulator.run() == {"a": simulator.reply([1, 2, 3, 4, 5, 6, 7, 8], 4)}
    loaded = simulator.requests["a"].cached
    assert loaded in (2, 6)  # the tokens before the failed block, or all external ones
    assert not simulator.worker.transfers.has_jobs


def test_a_load_that_fails_for_a_preempted_request_is_not_tried_again():
    # The block that b could not load belongs to a when the failure is reported.
    simulator = SchedulerSimulator(
        DefaultScheduler,
        asynchronous=True,
        connector=True,
        block_size=4,
        blocks=3,
        max_num_batched_tokens=8,
    )
    simulator.add("a", [7, 8, 0, 0], max_tokens=2)
    transfer = Transfer(tokens=6, failed_block=1)
    simulator.add("b", [7, 8, 9, 0, 0, 0], max_tokens=1, transfer=transfer)
    a, b = simulator.reply([7, 8, 0, 0], 2), simulator.reply([7, 8, 9, 0, 0, 0], 1)
    assert simulator.run() == {"a": a, "b": b}


def test_a_grammar_that_fails_ends_its_request_alone():
    simulator = SchedulerSimulator(DefaultScheduler, grammars=True)
    simulator.add("a", [1], compile=Compile(pending_polls=2, fails=True))
    simulator.add("b", [1], compile=Compile(pending_polls=1))
    simulator.run()
    assert simulator.finish_reasons == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}
    assert "cannot be compiled" in simulator.requests["a"].error


def test_features_take_turns_whatever_the_adapters():
    simulator = SchedulerSimulator(DefaultScheduler, encoder_cache_tokens=3, max_encoder_tokens=3)
    for name in "abc":
        feature = MultiModalFeature(f"cat {name}", 0, 3)
        lora = LoRARequest(f"poet {name}", ord(name))
        simulator.add(name, [1, 2, 3, 4], features=[feature], lora=lora)
    simulator.run()
    encoded = [sorted(plan.encoder_inputs) for plan in simulator.plans if plan.encoder_inputs]
    assert encoded == [["a"], ["b"], ["c"]]


def test_a_lost_plan_is_scheduled_again():
    simulator = SchedulerSimulator(DefaultScheduler)
    simulator.add("a", [1, 2, 3], max_tokens=3)
    simulator.step()
    simulator.lose(executed=False)
    simulator.lose()
    assert simulator.run() == {"a": simulator.reply([1, 2, 3], 3)}


def test_a_pause_holds_the_right_requests():
    simulator = SchedulerSimulator(DefaultScheduler)
    simulator.add("old", [1, 2, 3], timeout=60.0)
    simulator.step()
    simulator.pause(PauseState.PAUSED_NEW)
    simulator.add("new", [1, 2])
    simulator.add("late", [1, 2], timeout=5.0)
    simulator.run_until_idle()
    simulator.clock.advance(10.0)
    simulator.run_until_idle()
    assert simulator.outputs == {"old": simulator.reply([1, 2, 3], 4), "new": [], "late": []}
    assert simulator.finish_reasons["late"] is FinishReason.TIMEOUT
    assert simulator.scheduler.why_waiting("new").waiting_for is WaitingFor.PAUSED
    simulator.pause(PauseState.UNPAUSED)
    assert simulator.run()["new"] == simulator.reply([1, 2], 4)


def test_a_pause_is_not_complete_while_blocks_are_loaded():
    simulator = SchedulerSimulator(DefaultScheduler, connector=True, block_size=2)
    simulator.add("a", [1, 2, 3, 4, 5, 6, 7, 8], transfer=Transfer(tokens=6, load_steps=4))
    simulator.step()
    simulator.pause(PauseState.PAUSED_ALL)
    assert simulator.worker.transfers.has_jobs
    simulator.run_until_idle()
    assert not simulator.worker.transfers.has_jobs
    assert simulator.outputs == {"a": []}
    simulator.pause(PauseState.UNPAUSED)
    assert simulator.run() == {"a": simulator.reply([1, 2, 3, 4, 5, 6, 7, 8], 4)}
