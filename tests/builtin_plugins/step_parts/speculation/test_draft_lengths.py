"""How many drafts pay for their rows."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from hardpoint.builtin_plugins.step_parts.speculation.draft_planner import (
    AcceptanceRate,
    DraftPlanner,
    RequestRate,
    draft_lengths,
)
from hardpoint.builtin_plugins.step_parts.speculation.messages import DraftData
from hardpoint.errors import RequestError
from hardpoint.plugins import EngineConfig, EngineCoreRequest, SamplingParams, Speculator, StepCost
from hardpoint.plugins.requests import ResumedOutputs

COST = StepCost(step=10.0, single_query=0.1, draft=1.0, is_trained=True)


def lengths(rate, cost=COST, requests=1, limit=8):
    limits = {str(number): limit for number in range(requests)}
    rates = dict.fromkeys(limits, rate)
    return set(draft_lengths(limits, rates, cost, requests, context=0).values())


@pytest.mark.parametrize(
    "cost",
    [
        StepCost(),
        StepCost(draft=1.0),
        StepCost(step=10, is_trained=True),
        StepCost(draft=1.0, is_trained=True),  # a fit may give drafts the whole time of a step
    ],
)
def test_without_a_known_cost_there_are_as_many_as_allowed(cost):
    assert lengths(0.1, cost) == {8}


@pytest.mark.parametrize(
    ("rate", "expected"), [(0.05, {0}), (0.3, {1}), (0.5, {2}), (0.9, {8}), (1.0, {8})]
)
def test_a_draft_is_verified_if_it_gives_more_tokens_in_less_time(rate, expected):
    assert lengths(rate) == expected


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("requests", [1, 4, 32])
def test_no_other_length_gives_more_tokens_per_second(rate, requests):
    def pace(length):
        tokens = requests * sum(rate**i for i in range(length + 1))
        drafts = requests * length
        return tokens / COST.milliseconds(single_queries=requests, drafts=drafts)

    (chosen,) = lengths(rate, requests=requests)
    assert pace(chosen) >= 0.97 * max(pace(length) for length in range(9))


def test_many_requests_leave_no_time_for_drafts():
    assert max(lengths(0.5, requests=64)) < max(lengths(0.5, requests=1))


def test_the_rate_of_a_request_follows_its_drafts():
    everyone, of_request = AcceptanceRate(), RequestRate()
    assert of_request.estimate(everyone) == 0.5
    for _ in range(20):
        everyone.add(4, 1)
    assert 0.4 < of_request.estimate(everyone) < 0.6
    for _ in range(20):
        of_request.add(4, 4)
    assert of_request.estimate(everyone) > 0.85
    for _ in range(20):
        of_request.add(4, 0)
    assert of_request.estimate(everyone) < 0.3


def planner(step_cost=StepCost):
    components = SimpleNamespace(
        enabled=lambda _kind: ["ngram"], find=lambda _kind, _name: Speculator
    )
    context = SimpleNamespace(components=components, faults=None, step_cost=step_cost)
    return DraftPlanner("speculation", EngineConfig(), context)


def resumed(figures):
    source = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        params=SamplingParams(),
        resumed=ResumedOutputs([5], part_figures={"speculation": figures}),
    )
    return SimpleNamespace(request_id="r", source=source)


@pytest.mark.parametrize(
    "figures",
    [
        {"num_drafts": "x"},
        {"num_verified_drafts": -1},
        {"num_accepted_by_position": [1, -1]},
        {"num_accepted_by_position": [1] * 1001},
        {"num_accepted_by_position": 5},
    ],
)
def test_figures_of_another_engine_end_their_request_alone(figures):
    """Another error would be a fault of the part, which engines count."""
    with pytest.raises(RequestError, match=r"resumed\.part_figures\.speculation: "):
        planner().gate(resumed(figures))


def test_figures_of_another_engine_are_counted_on():
    part = planner()
    part.gate(resumed({"num_drafts": 7, "num_verified_drafts": 3, "num_accepted_by_position": [2]}))
    assert part.figures("r")["num_drafts"] == 7


def test_a_fault_leaves_new_requests_to_be_started_later():
    costs = iter([None, COST])  # the first one is a fault
    part = planner(lambda: next(costs))
    source = EngineCoreRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams())
    part.gate(SimpleNamespace(request_id="r", source=source, output_token_ids=[5], num_tokens=2))
    new = [SimpleNamespace(source=source)]
    plan = SimpleNamespace(
        step=1, new_requests=new, num_scheduled_tokens={"r": 1}, draft_token_ids={}
    )
    with pytest.raises(AttributeError):
        part.begin(plan)
    data = msgspec.msgpack.decode(part.begin(plan), type=DraftData)
    assert data.started == {"r": "ngram"}
    assert data.limits.keys() == {"r"}
