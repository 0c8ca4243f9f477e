"""A fleet of one engine takes the steps of the kit's simulator, which checks each of them."""

from __future__ import annotations

import contextlib

import pytest

from hardpoint.plugins import RequestError
from hardpoint.simulation import Lengths, SyntheticLoad
from hardpoint.simulation.workload import tokens_of
from hardpoint.testing.engine_access import load_default_scheduler
from hardpoint.testing.scheduling.simulator import SchedulerSimulator

LOAD = SyntheticLoad(
    requests=40,
    rate=30.0,
    prompt=Lengths(median=40, sigma=0.8),
    output=Lengths(median=10, sigma=0.6),
    hot_prefixes=3,
    hot_tokens=32,
    turns=1.5,
    think_seconds=0.4,
    seed=5,
)


class Kit(SchedulerSimulator):
    """Continues prompts as the fleet's device does."""

    def __init__(self, **settings):
        self.first_tokens = {}
        super().__init__(load_default_scheduler(), **settings)

    def next_token(self, tokens):
        return self.first_tokens.get(tuple(tokens), 0)


def steps_of(fleet, requests):
    """Run requests; return for each step the arrivals before it, and its tokens by request."""
    engine = fleet.engines[0]
    steps, arrived = [], []
    execute, submit = engine.device.execute, engine.submit

    def note(plan):
        steps.append((list(arrived), dict(plan.num_scheduled_tokens)))
        arrived.clear()
        return execute(plan)

    def arrives(request):
        arrived.append(request)
        submit(request)

    engine.device.execute, engine.submit = note, arrives
    fleet.run(requests)
    return steps


@pytest.mark.parametrize("policy", ["fcfs", "shortest_first"])
@pytest.mark.parametrize("blocks", [24, 400])
def test_the_same_steps(open_fleet, policy, blocks):
    """The kit's gets each request before the step that the fleet's engine read it before."""
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 96}
    fleet = open_fleet(
        1, blocks=blocks, scheduler={"policy": policy, **limits}, kv_cache={"watermark": 0.0}
    )
    steps = steps_of(fleet, LOAD.generate())
    kit = Kit(
        policy=policy,
        blocks=blocks,
        block_size=16,
        eviction=None,
        max_model_len=blocks * 16,
        **limits,
    )
    kit.first_tokens = {
        tuple(tokens_of(simulated.prompt)): simulated.output.id + 1 for simulated in LOAD.generate()
    }
    for arrived, tokens in steps:
        for request in arrived:
            with contextlib.suppress(RequestError):  # the fleet's engine refuses it, too
                kit.add(
                    request.request_id,
                    request.prompt_token_ids,
                    request.params.max_tokens,
                    arrival_time=request.arrival_time,  # shortest_first weighs it against lengths
                )
        assert dict(kit.step().num_scheduled_tokens) == tokens
    assert not kit.unfinished
    kit.check()
    preempted = sum(plan.preempted_request_ids != frozenset() for plan in kit.plans)
    assert (preempted > 0) == (blocks == 24)
