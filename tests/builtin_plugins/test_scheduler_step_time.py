"""The default scheduler limits the time that prompts take from requests that generate."""

from __future__ import annotations

import random

import pytest
from support.builtins.scheduler_harness import Simulator
from support.searching import searches_long

from hardpoint.errors import ConfigError
from hardpoint.plugins import StepCost, WaitingFor
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits

COST = StepCost(step=5, single_query=1, prompt_token=0.5, is_trained=True)
ANY_COSTS = [
    COST,
    StepCost(),
    StepCost(is_trained=True),
    StepCost(step=0.1, single_query=0.01, prompt_token=0.02, prompt_pair=1e-4, is_trained=True),
    StepCost(step=50, context_token=0.1, prompt=30, prompt_token=3, is_trained=True),
]


def simulator(milliseconds=20.0, cost=COST, max_slowdown=1e9, **settings):
    """By default a step has 20 ms, and two streams take 7 of them: 26 tokens are left."""
    limits = {"blocks": 256, "max_num_batched_tokens": 256} | settings
    return Simulator(
        context={"step_cost": lambda: cost},
        options={"max_slowdown": max_slowdown},
        step_milliseconds=milliseconds,
        **limits,
    )


def streams(sim, count=2):
    """Start requests that generate."""
    for number in range(count):
        sim.add(f"stream {number}", prompt=2)
    sim.step()


def test_prompts_get_what_the_streams_leave_of_the_time_in_whole_blocks():
    sim = simulator()
    streams(sim)
    sim.add("long", prompt=100)
    tokens = [sim.step().num_scheduled_tokens for _ in range(5)]
    assert [t["long"] for t in tokens] == [24, 24, 24, 24, 4]
    assert all(t["stream 0"] == t["stream 1"] == 1 for t in tokens)


def test_the_last_prompt_that_fits_in_part_ends_with_a_block():
    sim = simulator()
    streams(sim)
    for name in "abc":
        sim.add(name, prompt=10)
    assert dict(list(sim.step().num_scheduled_tokens.items())[2:]) == {"a": 10, "b": 10, "c": 4}
    assert dict(list(sim.step().num_scheduled_tokens.items())[2:]) == {"a": 1, "b": 1, "c": 6}


def test_the_context_of_streams_and_prompts_takes_time():
    cost = StepCost(context_token=0.25, prompt=1, prompt_pair=0.01, is_trained=True)
    sim = simulator(cost=cost)
    sim.add("stream", prompt=39)
    sim.step()
    sim.add("long", prompt=180)  # 40 tokens of context take 10 ms, the row 1: 9 are left
    chunks = [sim.step().num_scheduled_tokens["long"] for _ in range(3)]
    assert chunks == [40, 16, 12]  # 40 ** 2 / 2 = 800 pairs, 16 * (40 + 8), 12 * (56 + 6)


def test_alone_prompts_get_the_whole_budget():
    sim = simulator()
    sim.add("a", prompt=150)
    sim.add("b", prompt=150)
    assert sim.step().num_scheduled_tokens == {"a": 150, "b": 106}
    assert sim.step().num_scheduled_tokens == {"a": 1, "b": 26}  # 132 in all


def test_the_first_prompt_gets_a_block_however_little_time_is_left():
    sim = simulator(milliseconds=0.001)
    streams(sim)
    sim.add("a", prompt=10)
    sim.add("b", prompt=10)
    assert [sim.step().num_scheduled_tokens.get("a") for _ in range(4)] == [4, 4, 2, 1]
    assert sim.step().num_scheduled_tokens["b"] == 4


def test_while_nothing_is_known_prompts_get_four_blocks():
    sim = simulator(cost=StepCost())
    streams(sim)
    sim.add("a", prompt=30)
    assert [sim.step().num_scheduled_tokens.get("a") for _ in range(3)] == [16, 14, 1]


def test_a_new_prompt_slows_streams_down_less_than_one_that_waited():
    sim = simulator(milliseconds=100.0, max_slowdown=3)  # streams take 7 ms: a step takes 21
    streams(sim)
    sim.add("new", prompt=100, arrival_time=sim.clock())
    assert sim.step().num_scheduled_tokens["new"] == 28
    sim.clock.now += 2  # and now 42
    assert sim.step().num_scheduled_tokens["new"] == 68


def test_streams_come_before_a_prompt_that_was_admitted_before():
    sim = simulator(long_prefill_token_threshold=20)
    sim.add("early", prompt=100)
    sim.add("late", prompt=1)
    assert list(sim.step().num_scheduled_tokens) == ["early", "late"]
    assert list(sim.step().num_scheduled_tokens) == ["late", "early"]


def test_the_reason_to_wait_is_that_no_time_is_left():
    sim = simulator(milliseconds=0.001)
    streams(sim)
    sim.add("a", prompt=10)
    sim.add("b", prompt=10)
    sim.step()
    reason = sim.scheduler.why_waiting("b")
    assert reason.waiting_for is WaitingFor.BUDGET
    assert "leave the step no time for further prompts" in reason.message


def test_without_a_limit_nothing_changes():
    plans = []
    for cost in ANY_COSTS:
        sim = simulator(milliseconds=0.0, cost=cost)
        streams(sim)
        sim.add("a", prompt=300 - 150)
        sim.add("b", prompt=140)
        plans.append([sim.step().num_scheduled_tokens for _ in range(3)])
    assert plans == [plans[0]] * len(plans)
    assert plans[0][0] == {"stream 0": 1, "stream 1": 1, "a": 150, "b": 104}


def test_the_same_cost_gives_the_same_plans():
    first, second = (random_schedule(random.Random(1), 20.0, COST) for _ in range(2))
    assert first == second


def test_whole_prompts_cannot_be_limited():
    with pytest.raises(ConfigError) as error:
        SchedulerLimits(
            max_num_seqs=1,
            max_num_batched_tokens=9,
            max_model_len=9,
            chunked_prefill=False,
            step_milliseconds=20.0,
        )
    assert str(error.value) == (
        "scheduler.step_milliseconds: expected 0 without scheduler.chunked_prefill, got 20.0"
    )


def random_schedule(rng, milliseconds, cost, **settings):
    """Return the tokens and ends of random requests, and the plans of their steps."""
    sim = simulator(milliseconds, cost, max_slowdown=rng.choice([1, 3, 1e9]), **settings)
    plans = []
    for number in range(rng.randint(2, 10)):
        arrival = sim.clock() - rng.choice([0, 0.5, 3])
        sim.add(f"r{number}", rng.randint(1, 90), rng.randint(1, 12), arrival_time=arrival)
        for _ in range(rng.randint(0, 4)):
            plans.append(sim.step().num_scheduled_tokens)
    sim.run()
    return sim.tokens, sim.ends, plans


@pytest.mark.parametrize("part", range(4))
def test_tokens_are_the_same_for_every_limit_in_two_hundred_schedules(part):
    differing = 0
    seeds = range(50 * part, 50 * part + 50)[: None if searches_long() else 15]
    for seed in seeds:
        rng = random.Random(seed)
        settings = {
            "blocks": rng.choice([48, 256]),
            "caching": rng.random() < 0.5,
            "max_num_batched_tokens": rng.choice([16, 64, 256]),
            "max_num_seqs": rng.choice([2, 4, 16]),
        }
        cost = rng.choice(ANY_COSTS)
        runs = [
            random_schedule(random.Random(seed), limit, cost, **settings)
            for limit in (0.0, 1.0, 20.0, 1000.0)
        ]
        assert all(run[:2] == runs[0][:2] for run in runs), seed
        differing += any(run[2] != runs[0][2] for run in runs)
    assert differing > len(seeds) / 2  # the limits matter
