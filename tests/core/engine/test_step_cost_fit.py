"""The cost of steps is fitted to those that ran."""

from __future__ import annotations

import random

import pytest
from support.core.engine_harness import Rig, ScriptedExecutor, request

from hardpoint.plugins import CachedRequests, NewRequest, SchedulerOutput, StepCost
from hardpoint.testing import ScriptedClock
from hardpoint.toolkit.step_cost import StepCostFit, StepTimes, StepWork, work_of

TRUE = StepCost(
    step=5, single_query=1, context_token=0.001, prompt=0.5, prompt_token=0.6, prompt_pair=0.0005
)


def plan(streams=(), chunks=(), **fields):
    """A plan of requests with computed tokens, and of (computed, tokens) of prompts."""
    rows = [(f"stream {i}", computed, 1) for i, computed in enumerate(streams)]
    rows += [(f"prompt {i}", computed, tokens) for i, (computed, tokens) in enumerate(chunks)]
    return SchedulerOutput(
        step=1,
        cached_requests=CachedRequests([row[0] for row in rows], [row[1] for row in rows]),
        num_scheduled_tokens={name: tokens for name, _, tokens in rows},
        total_num_scheduled_tokens=sum(row[2] for row in rows),
        **fields,
    )


def random_plan(rng, most_streams=32):
    streams = [rng.randint(20, 500) for _ in range(rng.randint(0, most_streams))]
    chunks = [(16 * rng.randint(0, 60), rng.randint(2, 300)) for _ in range(rng.choice([0, 1, 3]))]
    return plan(streams, chunks or ([] if streams else [(0, 100)]))


def taken(step, cost=TRUE):
    return cost.milliseconds(**work_of(step)._asdict())


def trained(rng, steps=300, noise=0.05):
    fit = StepCostFit()
    for _ in range(steps):
        step = random_plan(rng)
        fit.learn(step, taken(step) * rng.uniform(1 - noise, 1 + noise))
    return fit


def errors(fit, rng, count=100):
    """The relative errors of the predictions of random steps."""
    steps = [random_plan(rng) for _ in range(count)]
    return [taken(step, fit.current()) / taken(step) - 1 for step in steps]


def test_the_work_of_a_step_is_counted_by_kind():
    assert work_of(plan([10, 20])) == StepWork(2, 32, 0, 0, 0)
    mixed = plan([10], [(0, 8), (100, 4)])
    assert work_of(mixed) == StepWork(1, 11, 2, 12, 8 * 4 + 4 * 102)
    new = NewRequest(request("n", prompt=[1] * 9), (), ([],), 3)
    whole = plan([10], new_requests=[new])
    whole.num_scheduled_tokens["n"] = 6
    assert work_of(whole) == StepWork(1, 11, 1, 6, 6 * (3 + 3))


def test_it_finds_what_steps_take():
    rng = random.Random(1)
    fit = trained(rng)
    assert fit.current().is_trained
    assert max(map(abs, errors(fit, rng))) < 0.1
    assert 0.01 < fit.current().error < 0.06  # of noise of up to 5 %


def test_no_coefficient_is_negative():
    rng = random.Random(2)
    fit = StepCostFit()
    for _ in range(200):
        step = random_plan(rng)
        fit.learn(step, rng.uniform(1, 100))
        values = [getattr(fit.current(), name) for name in StepCost.__struct_fields__[:6]]
        assert min(values) >= 0


def test_it_is_trained_by_prompts_and_single_queries():
    fit = StepCostFit()
    assert fit.current() == StepCost()
    fit.learn(plan([10, 20]), 7.0)
    assert not fit.current().is_trained
    fit.learn(plan([], [(0, 100)]), 60.0)
    assert not fit.current().is_trained
    for _ in range(2):
        fit.learn(plan([10, 20]), 7.0)
    assert fit.current().is_trained
    assert fit.current().error is None
    fit.learn(plan([10, 20]), 7.0)
    assert fit.current().error is not None


def test_a_first_step_that_has_both_leads_nowhere_near_zero():
    fit = StepCostFit()
    steps = [plan([9] * 3, [(0, 70)] * 27), *(plan([70 + n] * 30) for n in range(20))]
    for step in steps:
        fit.learn(step, taken(step))
    assert taken(steps[-1], fit.current()) == pytest.approx(taken(steps[-1]), rel=0.1)


def test_a_step_that_waited_for_something_else_does_not_count_in_full():
    rng = random.Random(3)
    fit = trained(rng)
    for _ in range(3):
        step = random_plan(rng)
        fit.learn(step, 1000 * taken(step))
        assert max(errors(fit, rng)) < 1
        for _ in range(20):
            step = random_plan(rng)
            fit.learn(step, taken(step))
    assert max(map(abs, errors(fit, rng))) < 0.1


def test_it_follows_a_slower_machine_within_some_steps():
    rng = random.Random(4)
    fit = trained(rng)
    for _ in range(15):
        step = random_plan(rng)
        fit.learn(step, 2 * taken(step))
    assert all(0.7 < error < 1.3 for error in errors(fit, rng))


def test_what_prompts_take_is_not_forgotten_while_there_are_none():
    rng = random.Random(5)
    fit = trained(rng)
    for _ in range(5000):
        step = plan([rng.randint(20, 500) for _ in range(rng.randint(1, 32))])
        fit.learn(step, taken(step))
    assert max(map(abs, errors(fit, rng))) < 0.25


@pytest.mark.parametrize(
    "step", [plan(), plan([10], encoder_inputs={"stream 0": [0]})], ids=["empty", "encoder"]
)
def test_steps_with_no_tokens_or_with_other_work_are_left_out(step):
    fit = StepCostFit()
    fit.learn(step, 50.0)
    fit.learn(plan([], [(0, 100)]), 60.0)
    fit.learn(plan([10]), 0.0)  # a clock may be too coarse
    assert not fit.current().is_trained


def test_the_engine_measures_its_steps():
    fit = StepCostFit()
    times = StepTimes(ScriptedClock(tick=0.01))
    rig = Rig(step_cost=fit, step_times=times, log_stats=True)
    rig.add("a", prompt=range(9), max_tokens=8)
    rig.run()
    cost = fit.current()
    assert rig.scheduler.context.step_cost() is cost
    assert cost.is_trained
    assert cost.milliseconds(single_queries=1, context=12) == pytest.approx(10, rel=0.2)


def test_of_a_pipeline_it_is_the_time_between_results():
    times = StepTimes(ScriptedClock(tick=0.01))
    first = plan([1])
    second = SchedulerOutput(step=2, num_scheduled_tokens={"stream 0": 1})
    times.begins(first)
    times.begins(second)
    assert times.ends(first) == pytest.approx((0.02, 0.02))
    assert times.ends(second) == pytest.approx((0.02, 0.01))


def test_a_pipeline_is_measured_too():
    executor = ScriptedExecutor(2, late=True)
    executor.patient = True
    fit = StepCostFit()
    rig = Rig(executor, step_cost=fit, step_times=StepTimes(ScriptedClock(tick=0.01)))
    rig.add("a", prompt=range(9), max_tokens=8)
    rig.run()
    assert fit.current().is_trained
