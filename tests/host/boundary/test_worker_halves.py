"""Worker halves that need no half in the engine: memory, around the model, the cache, idle work."""

from __future__ import annotations

import pytest
import torch
from support.core.engine_harness import ScriptedPart

from hardpoint.errors import ConfigError, PluginFaultError
from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.parts.bound_half import BoundWorkerHalf
from hardpoint.host.boundary.parts.worker_parts import WorkerParts
from hardpoint.plugins import ForwardBatch, SchedulerOutput, WorkerHalf
from hardpoint.plugins.component import Source
from hardpoint.plugins.requests.plan import PartData
from hardpoint.plugins.worker_half import ForwardStep


def half_of(*, packs=False, only_users=False, **methods):
    """Return a half that has these methods, which get no `self`."""
    own = {name: lambda self, *given, call=call: call(*given) for name, call in methods.items()}
    return type("Half", (WorkerHalf,), {**own, "packs": packs, "only_users": only_users})()


def parts_of(*halves):
    bound = []
    for index, half in enumerate(halves):
        source = Source(f"part{index}", f"acme:Part{index}", "acme", "1.0", "plugins.enable")
        part = ScriptedPart(source.name)
        bound.append(BoundWorkerHalf(part, half, PluginCalls(Activity(), "step_parts", source)))
    return WorkerParts(bound)


def plan_of(*request_ids, **users):
    """Return a plan with data of these parts, each used by some of the requests."""
    data = {part: PartData(b"", ids) for part, ids in users.items()}
    return SchedulerOutput(num_scheduled_tokens=dict.fromkeys(request_ids, 1), part_data=data)


def fails(error=ValueError):
    def call(*given):
        raise error("broken")

    return call


def step_of(count=3, **named):
    ids = torch.arange(count)
    return ForwardStep(lambda: ForwardBatch(ids, ids, attend=None), **named)


def model(batch):
    return torch.stack([batch.token_ids, batch.positions], dim=1)


class TestAroundModel:
    def test_the_first_part_is_the_innermost(self):
        def around(name):
            return half_of(
                around_model=lambda forward: lambda step: calls.append(name) or forward(step)
            )

        calls = []
        forward = parts_of(around("inner"), half_of(), around("outer")).around_model(model)
        assert torch.equal(forward(step_of()), model(step_of().batch))
        assert calls == ["outer", "inner"]

    def test_what_nobody_goes_around_is_called_itself(self):
        same = half_of(around_model=lambda forward: forward)
        assert parts_of(half_of(), same).around_model(model) is None

    def test_a_step_that_is_not_computed_is_not_planned(self):
        kept = torch.zeros(1, 2)
        half = half_of(around_model=lambda forward: lambda step: kept)
        step = ForwardStep(fails())
        assert parts_of(half).around_model(model)(step) is kept

    def test_a_step_is_planned_once(self):
        plans = []
        step = ForwardStep(lambda: plans.append(1) or object())
        assert step.batch is step.batch
        assert plans == [1]

    @pytest.mark.parametrize(
        ("half", "expected"),
        [
            (half_of(around_model=lambda forward: None), "gave None, expected a function"),
            (half_of(around_model=fails()), "failed: ValueError: broken"),
        ],
        ids=["none", "raises"],
    )
    def test_what_is_no_function_is_a_fault(self, half, expected):
        with pytest.raises(PluginFaultError, match=f"'part0'.* its around_model\\(\\) {expected}"):
            parts_of(half).around_model(model)

    @pytest.mark.parametrize("value", [None, torch.zeros(3)], ids=["none", "vector"])
    def test_what_is_no_hidden_states_is_a_fault(self, value):
        forward = parts_of(half_of(around_model=lambda f: lambda step: value)).around_model(model)
        with pytest.raises(PluginFaultError, match=r"'part0'.* in a step, expected hidden states"):
            forward(step_of())


class TestMemory:
    def test_sizes_are_added_by_name(self):
        sizes = {"graphs": 5}, {"graphs": 2, "adapters": 3}, {}
        halves = [half_of(memory=lambda size=size: size) for size in sizes]
        assert parts_of(half_of(), *halves).memory() == {"graphs": 7, "adapters": 3}

    @pytest.mark.parametrize("value", [5, None, {"a": -1}, {"a": 1.5}, {1: 1}])
    def test_what_is_no_size_is_a_fault(self, value):
        with pytest.raises(PluginFaultError, match=r"'part0'.* its memory\(\) gave .* by name"):
            parts_of(half_of(memory=lambda: value)).memory()

    def test_memory_that_lacks_while_it_is_measured_is_no_fault(self):
        with pytest.raises(MemoryError):
            parts_of(half_of(memory=fails(MemoryError))).memory()


class TestCache:
    def test_all_halves_get_and_forget_it(self):
        seen = []
        halves = [
            half_of(
                cache_allocated=lambda cache: seen.append(cache),
                cache_released=lambda: seen.append("released"),
            )
            for _ in range(2)
        ]
        parts = parts_of(*halves, half_of())
        parts.cache_allocated("a cache")
        parts.cache_released()
        assert seen == ["a cache"] * 2 + ["released"] * 2

    def test_it_is_released_by_the_others_of_one_that_fails(self):
        seen = []
        others = [half_of(cache_released=lambda: seen.append(1)) for _ in range(2)]
        parts = parts_of(others[0], half_of(cache_released=fails()), others[1])
        with pytest.raises(PluginFaultError, match=r"'part1'.* its cache_released\(\) failed"):
            parts.cache_released()
        assert seen == [1, 1]


@pytest.mark.parametrize(
    ("answers", "expected", "asked"),
    [
        ([None], None, 1),
        ([False], False, 1),
        ([True, True], True, 1),
        ([None, True], True, 2),
        ([None, False], False, 2),
        ([None, None], None, 2),
    ],
)
def test_idle_halves_work_until_one_has_more(answers, expected, asked):
    calls = []
    halves = [half_of(idle=lambda answer=answer: calls.append(1) or answer) for answer in answers]
    parts = parts_of(half_of(), *halves)
    assert parts.work_when_idle
    assert parts.idle() is expected
    assert len(calls) == asked


@pytest.mark.parametrize("error", [ValueError, ConfigError])
def test_a_half_that_fails_outside_of_a_step_is_named(error):
    parts = parts_of(half_of(idle=fails(error), finished=fails(error)))
    expected = ConfigError if error is ConfigError else PluginFaultError
    with pytest.raises(expected, match="broken"):
        parts.idle()
    with pytest.raises(expected, match="broken"):
        parts.finished({"r"})


def test_a_half_of_its_users_alone_is_notified_of_their_ends_alone():
    own, every, ends = [], [], {"a": {"x", "y"}, "b": {"x", "z"}, "c": {"z"}}
    half = half_of(only_users=True, begin=lambda plan, data: None, finished=own.append)
    parts = parts_of(half, half_of(finished=every.append))
    parts.begin(plan_of("x", "z", part0=["x"]))
    for ended in ends.values():
        parts.finished(ended)
    assert every == [*ends.values()]
    assert own == [{"x"}]


def test_halves_are_asked_once_for_what_they_have():
    parts = parts_of(half_of(idle=lambda: None), half_of(packs=True))
    assert (parts.packs, parts.work_when_idle) == (True, True)
    parts = parts_of(half_of(hidden=lambda hidden, rows: None))
    assert not parts  # no step has begun
    assert (parts.packs, parts.work_when_idle) == (False, False)
    assert parts.idle() is None
