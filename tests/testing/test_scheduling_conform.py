"""Every built-in scheduler and policy passes the kit that is offered to others."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest
from support.processes import ROOT

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
    SchedulerRig,
    SchedulerSuite,
    SchedulingPolicySuite,
)
from hardpoint.testing.scheduling.fakes.connector import Compile, Transfer

sys.path.insert(0, str(ROOT / "examples"))

from tiny_scheduler import TinyScheduler

pytest_plugins = ["hardpoint.testing"]


class TestDefaultScheduler(SchedulerSuite):
    scheduler = DefaultScheduler


class TestDefaultSchedulerInNoHurry(SchedulerSuite):
    scheduler = DefaultScheduler
    options = {"max_overtaken": 0, "max_set_aside": 1}
    examples = 0.3


class TestTinyScheduler(SchedulerSuite):
    scheduler = TinyScheduler
    asks_policy = False
    examples = 0.3


class TestFirstComeFirstServed(SchedulingPolicySuite):
    policy = FirstComeFirstServed


class TestPriority(SchedulingPolicySuite):
    policy = Priority


class TestShortestFirst(SchedulingPolicySuite):
    policy = ShortestFirst


class TestFair(SchedulingPolicySuite):
    policy = Fair


class TestFairByWeight(SchedulingPolicySuite):
    policy = Fair
    options = {"weights": {"acme": 3.0}, "input_cost": 0.5}
    examples = 0.3


class TestLeastRecentlyUsed(EvictionPolicySuite):
    eviction = LeastRecentlyUsed


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        ("schedulers", "scheduler"),
        ("scheduling_policies", "policy"),
        ("eviction_policies", "eviction"),
    ],
)
def test_every_builtin_has_its_class_here(kind, attribute):
    group = entry_points(group=f"hardpoint.{kind}")
    builtins = {point.load() for point in group if point.value.startswith("hardpoint.")}
    suites = [c for c in globals().values() if isinstance(c, type) and c.__name__[:4] == "Test"]
    tested = {getattr(suite, attribute) for suite in suites if hasattr(suite, attribute)}
    assert builtins
    assert builtins <= tested


def test_who_cannot_be_paused_is_not_asked_to():
    with pytest.raises(pytest.skip.Exception, match="'TinyScheduler' cannot be paused"):
        TestTinyScheduler().test_pauses()


# The rig shows what happens, so that a check which sees nothing does not go unnoticed.


def test_a_run_has_what_the_rules_are_about():
    rig = SchedulerRig(DefaultScheduler, blocks=5, block_size=2, max_num_batched_tokens=6)
    rig.add("a", [1, 2, 3], max_tokens=6)
    rig.add("b", [1, 2, 3, 4], max_tokens=5)
    outputs = rig.run()
    assert outputs == {"a": rig.reply([1, 2, 3], 6), "b": rig.reply([1, 2, 3, 4], 5)}
    assert any(plan.preempted_request_ids for plan in rig.plans)
    assert any(new.num_computed_tokens for plan in rig.plans for new in plan.new_requests)
    assert rig.finish_reasons == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert len(rig.records) == len(rig.plans) <= rig.bound


def test_drafts_are_accepted_and_rejected():
    rig = SchedulerRig(DefaultScheduler, num_draft_tokens=3)
    for name, drafts in (("a", "right"), ("b", "wrong"), ("c", "mixed")):
        rig.add(name, [ord(name)], max_tokens=12, drafts=drafts)
    rig.run()
    assert 0 < rig.worker.accepted < rig.worker.verified


def test_results_come_a_step_late():
    rig = SchedulerRig(DefaultScheduler, asynchronous=True)
    rig.add("a", [1, 2], max_tokens=3)
    rig.step()
    assert rig.outputs == {"a": []}
    assert len(rig.in_flight) == 1
    rig.step()
    assert len(rig.outputs["a"]) == 1
    assert rig.run() == {"a": rig.reply([1, 2], 3)}


@pytest.mark.parametrize("steps", [None, 2])
def test_what_fails_to_load_is_computed(steps):
    rig = SchedulerRig(DefaultScheduler, connector=True, block_size=2)
    transfer = Transfer(tokens=6, steps=steps, fails=1, keeps=2)
    rig.add("a", [1, 2, 3, 4, 5, 6, 7, 8], transfer=transfer)
    assert rig.run() == {"a": rig.reply([1, 2, 3, 4, 5, 6, 7, 8], 4)}
    loaded = rig.lives["a"].cached
    assert loaded in (2, 6)  # what came before the block that failed, or what was hoped for
    assert not rig.worker.transfers.busy


def test_a_grammar_that_fails_ends_its_request_alone():
    rig = SchedulerRig(DefaultScheduler, grammars=True)
    rig.add("a", [1], compile=Compile(asks=2, fails=True))
    rig.add("b", [1], compile=Compile(asks=1))
    rig.run()
    assert rig.finish_reasons == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}
    assert "cannot be compiled" in rig.lives["a"].error


def test_features_and_adapters_take_turns():
    rig = SchedulerRig(DefaultScheduler, encoder_cache_tokens=3, max_encoder_tokens=3, max_loras=1)
    for name in "abc":
        feature = MultiModalFeature(f"cat {name}", 0, 3)
        lora = LoRARequest(f"poet {name}", ord(name))
        rig.add(name, [1, 2, 3, 4], features=[feature], lora=lora)
    rig.run()
    encoded = [sorted(plan.encoder_inputs) for plan in rig.plans if plan.encoder_inputs]
    assert encoded == [["a"], ["b"], ["c"]]


def test_a_lost_plan_is_made_good():
    rig = SchedulerRig(DefaultScheduler)
    rig.add("a", [1, 2, 3], max_tokens=3)
    rig.step()
    rig.lose(executed=False)
    rig.lose()
    assert rig.run() == {"a": rig.reply([1, 2, 3], 3)}


def test_a_pause_holds_whom_it_should():
    rig = SchedulerRig(DefaultScheduler)
    rig.add("old", [1, 2, 3], timeout=60.0)
    rig.step()
    rig.pause(PauseState.PAUSED_NEW)
    rig.add("new", [1, 2])
    rig.add("late", [1, 2], timeout=5.0)
    rig.settle()
    rig.clock.advance(10.0)
    rig.settle()
    assert rig.outputs == {"old": rig.reply([1, 2, 3], 4), "new": [], "late": []}
    assert rig.finish_reasons["late"] is FinishReason.TIMEOUT
    assert rig.scheduler.why_waiting("new").waiting_for is WaitingFor.PAUSED
    rig.pause(PauseState.UNPAUSED)
    assert rig.run()["new"] == rig.reply([1, 2], 4)


def test_a_pause_is_not_complete_while_blocks_are_loaded():
    rig = SchedulerRig(DefaultScheduler, connector=True, block_size=2)
    rig.add("a", [1, 2, 3, 4, 5, 6, 7, 8], transfer=Transfer(tokens=6, steps=4))
    rig.step()
    rig.pause(PauseState.PAUSED_ALL)
    assert rig.worker.transfers.busy
    rig.settle()
    assert not rig.worker.transfers.busy
    assert rig.outputs == {"a": []}
    rig.pause(PauseState.UNPAUSED)
    assert rig.run() == {"a": rig.reply([1, 2, 3, 4, 5, 6, 7, 8], 4)}
