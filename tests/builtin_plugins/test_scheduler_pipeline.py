"""Several steps under way at once: each has its share of the requests, and none is left out."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.scheduler_harness import Simulator
from support.searching import examples

from hardpoint.plugins import WaitingFor


def plans_of(simulator, depth, steps):
    """Plan so many steps, with `depth` of them in flight; return their requests."""
    late, plans = deque(), []
    for _ in range(steps):
        plan = simulator.plan()
        plans.append(set(plan.num_scheduled_tokens))
        late.append((plan, simulator.executor.execute(plan)))
        while len(late) > depth - 1:
            simulator.update(*late.popleft())
    while late:
        simulator.update(*late.popleft())
    return plans


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_requests_that_come_at_once_are_divided_among_the_batches(depth):
    simulator = Simulator(num_batches=depth, blocks=200, max_num_batched_tokens=1000)
    for index in range(12):
        simulator.add(f"r{index}", 5)
    plans = plans_of(simulator, depth, 5 * depth)
    assert [len(plan) for plan in plans] == [12 // depth] * (5 * depth)
    for start in range(len(plans) - depth + 1):
        assert len(set.union(*plans[start : start + depth])) == 12  # none is in two of them


def test_without_a_pipeline_one_batch_has_all():
    simulator = Simulator(blocks=200, max_num_batched_tokens=1000)
    for index in range(12):
        simulator.add(f"r{index}", 5)
    assert [len(plan) for plan in plans_of(simulator, 1, 4)] == [12] * 4


def test_batches_stay_balanced_as_requests_leave_and_join():
    simulator = Simulator(num_batches=2, blocks=300, max_num_seqs=40, max_num_batched_tokens=1000)
    for index in range(12):
        simulator.add(f"r{index}", 5, max_tokens=3 if index < 6 else 60)
    plans_of(simulator, 2, 8)  # the first six were all in one batch
    assert {len(plan) for plan in plans_of(simulator, 2, 8)} == {3}
    for index in range(10):
        simulator.add(f"s{index}", 5, max_tokens=60)
    plans_of(simulator, 2, 2)
    assert {len(plan) for plan in plans_of(simulator, 2, 8)} == {8}


def test_requests_that_lack_blocks_do_not_count():
    """Else all that run were in one batch as long as others wait for memory."""
    simulator = Simulator(num_batches=2, blocks=17, block_size=4, max_num_batched_tokens=1000)
    for index in range(12):
        simulator.add(f"r{index}", 13, max_tokens=3)
    plans = plans_of(simulator, 2, 4)
    assert [len(plan) for plan in plans] == [4, 0, 2, 2]


def test_results_that_come_at_once_leave_no_request_out():
    """Where a batch is done before the next one is planned, requests take turns all the same."""
    simulator = Simulator(num_batches=2, blocks=200, max_num_batched_tokens=1000)
    for index in range(8):
        simulator.add(f"r{index}", 5)
    plans = plans_of(simulator, 1, 9)[1:]
    assert [len(plan) for plan in plans] == [4] * 8
    assert all(plans[i] | plans[i + 1] == plans[0] | plans[1] for i in range(7))


def test_the_reason_of_a_request_that_leaves_its_turn_to_others():
    simulator = Simulator(num_batches=2, blocks=200, max_num_batched_tokens=1000)
    for name in "abcd":
        simulator.add(name, 5)
    simulator.plan()
    assert simulator.why("a") is None
    reason = simulator.why("c")
    assert reason.waiting_for is WaitingFor.NEXT_STEP
    assert "2 requests" in reason.message
    assert "its share" in reason.message


@given(seed=st.integers(0, 1 << 30), depth=st.integers(2, 4))
@examples(8)
def test_tokens_do_not_depend_on_the_number_of_batches(seed, depth):
    def tokens(depth):
        rng = random.Random(seed)
        limits = {"max_num_batched_tokens": rng.choice([8, 20, 64]), "max_num_seqs": 6}
        simulator = Simulator(num_batches=depth, blocks=rng.choice([12, 20, 40]), **limits)
        shared = [rng.randrange(9) for _ in range(12)]
        for index in range(10):
            prompt = shared[: rng.randrange(13)] + [rng.randrange(9) for _ in range(4)]
            simulator.add(f"r{index}", prompt, max_tokens=rng.randint(1, 12))
        return simulator.run(3000, depth=depth - 1)

    assert tokens(depth) == tokens(1)
