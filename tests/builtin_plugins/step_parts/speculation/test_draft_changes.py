"""Drafts after an abrupt change of a text: a simulation with a quick speculator."""

from __future__ import annotations

import random
from types import SimpleNamespace

import msgspec
import pytest

from hardpoint.builtin_plugins.speculators.ngram import NGram
from hardpoint.builtin_plugins.step_parts.speculation.draft_planner import DraftPlanner, RequestRate
from hardpoint.builtin_plugins.step_parts.speculation.messages import DraftData, DraftReport
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    ModelRunnerOutput,
    SamplingParams,
    StepCost,
)

PART, MOST, BEFORE, SEEDS = "speculation", 5, 60, 30
CHANGES = [(0.02, 0.97), (0.97, 0.02), (0.05, 0.9), (0.9, 0.05), (0.3, 0.8), (0.05, 0.05)]


def accepted(draw, rate, length):
    """Return how many of the drafts are right before the first wrong one."""
    return next((index for index in range(length) if draw.random() >= rate), length)


def simulated(seed, rates, cost, num_requests, num_steps):
    """Yield milliseconds and tokens of each step; the rate changes after `BEFORE` steps."""
    draw = random.Random(seed)
    components = SimpleNamespace(enabled=lambda _kind: ["ngram"], find=lambda *_: NGram)
    context = SimpleNamespace(components=components, faults=None, step_cost=lambda: cost)
    part = DraftPlanner(PART, EngineConfig(), context)
    new = []
    for index in range(num_requests):
        params = SamplingParams(max_tokens=100_000)
        source = EngineCoreRequest(request_id=str(index), prompt_token_ids=[1], params=params)
        output = {"output_token_ids": [5], "num_tokens": 2}
        part.gate(SimpleNamespace(request_id=str(index), source=source, **output))
        new.append(SimpleNamespace(source=source))
    names = dict.fromkeys((entry.source.request_id for entry in new), 1)
    drafts = {}
    for step in range(1, num_steps):
        fields = {"step": step + 64 * seed + seed % 64, "draft_token_ids": drafts}
        plan = SimpleNamespace(new_requests=new, num_scheduled_tokens=names, **fields)
        new = []
        sent = part.begin(plan)
        data = DraftData({}) if sent is None else msgspec.msgpack.decode(sent, type=DraftData)
        rate = rates[step > BEFORE]
        tokens = {}
        for name in names:
            num_right = accepted(draw, rate, len(drafts.get(name, ())))
            hit = 7 if draw.random() < rate else 8  # of a draft that is only compared
            tokens[name] = [9] * num_right + [hit]
        report = DraftReport(
            {name: [7] * limit for name, limit in data.limits.items()},
            observed=dict.fromkeys(data.observed, 7),
        )
        result = ModelRunnerOutput(sampled_token_ids=tokens)
        result.part_reports = {PART: {0: msgspec.msgpack.encode(report)}}
        part.result(plan, result)
        num_drafts = sum(map(len, drafts.values()))
        time = cost.milliseconds(single_queries=num_requests, drafts=num_drafts)
        yield time, sum(map(len, tokens.values()))
        drafts = {name: list(ids) for name, ids in part.drafts().items()}


def best_pace(rate, cost, num_requests):
    """Return tokens per millisecond with all drafts or with none, whichever is more."""
    tokens = sum(rate**index for index in range(MOST + 1))
    with_all = cost.milliseconds(single_queries=num_requests, drafts=MOST * num_requests)
    without = cost.milliseconds(single_queries=num_requests)
    return num_requests * max(tokens / with_all, 1 / without)


@pytest.mark.parametrize("draft", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("rates", CHANGES)
def test_20_steps_after_a_change_the_pace_is_that_of_the_better(rates, num_requests, draft):
    cost = StepCost(step=10.0, single_query=0.1, draft=draft, is_trained=True)
    steps = []
    for seed in range(SEEDS if num_requests == 1 else SEEDS // 5):
        steps.append(list(simulated(seed, rates, cost, num_requests, BEFORE + 61))[BEFORE:])
    for first, last, least in ((0, 20, 0.7), (20, 60, 0.95)):
        times, counts = zip(*(step for run in steps for step in run[first:last]), strict=True)
        pace = sum(counts) / sum(times)
        assert pace >= least * best_pace(rates[1], cost, num_requests), f"steps {first} to {last}"


def test_drafts_that_are_compared_in_each_step_need_no_further_trial():
    cost = StepCost(step=10.0, single_query=0.1, draft=3.0, is_trained=True)
    run = list(simulated(0, (0.0, 0.0), cost, 8, 300))
    assert {round(time, 1) for time, _ in run[40:]} == {10.8}


def test_a_rate_starts_again_after_outcomes_that_it_makes_unlikely():
    rate = RequestRate()
    for _ in range(40):
        rate.add(1, 0)
    rate.add(1, 1)
    assert rate.mean < 0.25
    rate.add(1, 1)
    assert (rate.accepted, rate.tried, rate.is_own) == (2.0, 2.0, True)
    rate.add(4, 4)
    rate.add(4, 1)
    assert 0.7 < rate.mean < 0.9, "one wrong draft is no change"
    rate.add(4, 0)
    rate.add(4, 0)
    rate.add(4, 0)
    assert rate.mean < 0.3
