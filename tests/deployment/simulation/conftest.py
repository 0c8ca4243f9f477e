"""Fleets and loads that several test files use."""

from __future__ import annotations

import pytest

from hardpoint.plugins import StepCost
from hardpoint.simulation import Fleet, Segment, SimulatedRequest

COST = StepCost(step=5.0, single_query=0.1, prompt=0.2, prompt_token=0.05, is_trained=True)


@pytest.fixture
def cost():
    return COST


@pytest.fixture
def open_fleet():
    """Returns fleets, which are closed at the end."""
    opened = []

    def build(
        engines=2, balancer="least_cost", *, blocks=256, step_cost=COST, is_fixed=False, **tables
    ):
        cache = {"num_blocks": blocks, **tables.pop("kv_cache", {})}
        config = {"parallel": {"data": engines, "balancer": balancer}, "kv_cache": cache, **tables}
        opened.append(Fleet(config, step_cost=step_cost, is_fixed=is_fixed))
        return opened[-1]

    yield build
    for fleet in opened:
        fleet.close()


@pytest.fixture
def request_at():
    """Returns requests of two segments; others may share the first."""

    def build(at, number, *, shared=0, shared_length=64, length=16, output=4, **fields):
        prompt = (Segment(shared, shared_length), Segment(1000 + 2 * number, length))
        return SimulatedRequest(
            at=at, prompt=prompt, output=Segment(1001 + 2 * number, output), **fields
        )

    return build
