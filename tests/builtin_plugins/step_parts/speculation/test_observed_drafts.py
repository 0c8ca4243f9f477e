"""Drafts that are not verified show when drafts would pay again."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from hardpoint.builtin_plugins.speculators.ngram import NGram
from hardpoint.builtin_plugins.step_parts.speculation.draft_planner import DraftPlanner
from hardpoint.builtin_plugins.step_parts.speculation.drafting import Drafting
from hardpoint.builtin_plugins.step_parts.speculation.messages import DraftData, DraftReport
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    ModelRunnerOutput,
    SamplingParams,
    Speculator,
    StepCost,
)

COST = StepCost(step=10.0, single_query=0.1, draft=3.0, is_trained=True)
PART = "speculation"


def plan_of(step, new=(), drafts=None):
    return SimpleNamespace(
        step=step,
        new_requests=list(new),
        num_scheduled_tokens={"r": 1},
        draft_token_ids=drafts or {},
    )


@pytest.fixture
def part():
    """The engine half, with a request after wrong drafts."""
    components = SimpleNamespace(enabled=lambda _kind: ["ngram"], find=lambda *_: NGram)
    context = SimpleNamespace(components=components, faults=None, step_cost=lambda: COST)
    part = DraftPlanner(PART, EngineConfig(), context)
    source = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(max_tokens=1000)
    )
    request = SimpleNamespace(request_id="r", source=source, output_token_ids=[5], num_tokens=2)
    part.gate(request)
    part.begin(plan_of(1, [SimpleNamespace(source=source)]))
    for step in range(2, 22):
        output = ModelRunnerOutput(sampled_token_ids={"r": [5]})
        part.result(plan_of(step, drafts={"r": [6, 7]}), output)
    return part


def limit_after(part, steps, draft, token):
    """Return the steps until the request has drafts again; None if it has none."""
    for step in range(100, 100 + steps):
        data = msgspec.msgpack.decode(part.begin(plan_of(step)), type=DraftData)
        if "r" in data.limits:
            return step - 100
        assert data.observed == ["r"]
        report = msgspec.msgpack.encode(DraftReport({}, observed={"r": draft}))
        output = ModelRunnerOutput(sampled_token_ids={"r": [token]})
        output.part_reports = {PART: {0: report}}
        part.result(plan_of(step), output)
        assert part.drafts() == {}
    return None


def test_right_drafts_are_noticed_within_20_steps(part):
    steps = limit_after(part, 20, draft=7, token=7)
    assert steps is not None
    assert steps >= 2


def test_wrong_drafts_stay_off(part):
    assert limit_after(part, 26, draft=7, token=8) is None


@pytest.mark.parametrize("is_quick", [True, False])
def test_quick_speculators_draft_a_token_for_observed_requests(is_quick):
    class Counting(Speculator):
        contract = 1

        def propose(self, requests, budget):
            limits.append(([request.limit for request in requests], budget))
            return [[9] * request.limit for request in requests]

    Counting.is_quick = is_quick
    limits = []
    speculator = Counting(SimpleNamespace(name="counting", options=None))
    components = SimpleNamespace(
        enabled=lambda _kind: ["counting"],
        find=lambda _kind, _name: Counting,
        guarded=lambda *_, **__: speculator,
        close=lambda _component: None,
    )
    context = SimpleNamespace(
        components=components,
        describe_fault=str,
        loaded=None,
        device=None,
        vocab_size=100,
        hidden_size=1,
        open_model=None,
        num_layers=0,
        open_head=None,
    )
    drafting = Drafting(EngineConfig(), context)
    requests = [
        SimpleNamespace(
            source=EngineCoreRequest(
                request_id=name, prompt_token_ids=[1], params=SamplingParams()
            ),
            output_token_ids=[],
        )
        for name in ("a", "b")
    ]
    started = {"a": "counting", "b": "counting"}
    data = DraftData({"a": 3}, started=started, budget=10, observed=["b"])
    plan = SimpleNamespace(new_requests=requests, draft_token_ids={})
    drafting.begin(plan, msgspec.msgpack.encode(data))
    drafting.sampled({"a": [2], "b": [2]})
    report = msgspec.msgpack.decode(drafting.report(), type=DraftReport)
    assert report.drafts == {"a": [9, 9, 9]}
    assert report.observed == ({"b": 9} if is_quick else {})
    assert limits == ([([3], 3), ([1], 1)] if is_quick else [([3], 3)])
