"""A result without a token that was planned: the request is computed again."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import Simulator

from hardpoint.plugins import ModelRunnerOutput


def missing(sim, plan, name="a"):
    """The result of a plan, without one of its requests."""
    result = sim.executor.execute(plan)
    result.sampled_token_ids.pop(name, None)
    return result


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 4}], ids=["whole", "chunks"])
def test_of_a_prompt(limits):
    sim = Simulator(**limits)
    sim.add("a", prompt=10, max_tokens=3)
    plan = sim.plan()
    while "a" not in (result := sim.executor.execute(plan)).sampled_token_ids:
        sim.update(plan, result)
        plan = sim.plan()
    result.sampled_token_ids.clear()
    assert sim.update(plan, result) == {}
    assert sim.plan().num_scheduled_tokens["a"] >= 1


def test_of_a_token_and_the_others_go_on():
    sim, other = Simulator(), Simulator()
    for each in (sim, other):
        each.add("a", prompt=[7] * 6, max_tokens=8)
        each.add("b", prompt=[9] * 6, max_tokens=8)
    sim.step()
    plan = sim.plan()
    outputs = sim.update(plan, missing(sim, plan))
    assert set(outputs) == {"b"}
    assert sim.run() == other.run()
    assert sim.scheduler.stats().num_preemptions == 1


def test_of_a_verified_step():
    """Its drafts are not counted, and the tokens are the same as with the results."""
    sim, other = Simulator(num_draft_tokens=4), Simulator(num_draft_tokens=4)
    for each in (sim, other):
        each.add("a", prompt=[7] * 4, max_tokens=8)
        each.step()
    sim.scheduler.update_drafts({"a": [1, 2, 3]})
    plan = sim.plan()
    assert plan.num_scheduled_tokens == {"a": 4}
    assert sim.update(plan, ModelRunnerOutput()) == {}
    assert sim.scheduler.stats().num_drafts == 0
    assert sim.run() == other.run()


def test_with_steps_under_way():
    sim, other = (Simulator(asynchronous=True) for _ in range(2))
    for each in (sim, other):
        each.add("a", prompt=[7] * 6, max_tokens=8)
    first = sim.plan()
    first_result = sim.executor.execute(first)
    second = sim.plan()
    second_result = sim.executor.execute(second)
    first_result.sampled_token_ids.clear()
    assert sim.update(first, first_result) == {}
    assert sim.update(second, second_result) == {}
    assert sim.run() == other.run()


def test_of_an_unfinished_prompt_is_as_planned():
    sim = Simulator(max_num_batched_tokens=4)
    sim.add("a", prompt=10)
    sim.step()
    assert sim.live("a").num_computed_tokens == 4
    assert sim.scheduler.stats().num_preemptions == 0
