"""Hooks of step parts: which of them a half has, and what is refused when it is built."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
from support.core.engine_harness import ScriptedPart

from hardpoint.host.boundary.activity import Activity, PluginCalls
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.parts.bound_half import BoundPart, BoundWorkerHalf
from hardpoint.host.boundary.parts.engine_halves import EngineHalves
from hardpoint.host.boundary.parts.hooks import (
    ENGINE_HOOKS,
    FRONTEND_HOOKS,
    WORKER_HOOKS,
    required_members,
)
from hardpoint.host.boundary.parts.worker_parts import WorkerParts
from hardpoint.plugins import (
    AdmissionGate,
    BlockAccess,
    DraftTokens,
    EngineCoreRequest,
    EngineHalf,
    FrontendHalf,
    LayerWrapper,
    LoRARequest,
    ModelRunnerOutput,
    PlanData,
    RequestFilter,
    ResourceCost,
    SamplingParams,
    SchedulerOutput,
    StepObserver,
    WorkerHalf,
    WorkerStep,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.requests.stats import PrefixCacheStats, SchedulerStats
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.plugins.worker_half import KVBlocks

TABLES = {"engine": ENGINE_HOOKS, "worker": WORKER_HOOKS}
SOURCE = Source("part", "acme:part", "acme", "1.0", "plugins.enable")


def members(interface):
    """Return the members that a protocol declares, or a class with defaults has."""
    own = {**vars(interface), **vars(interface).get("__annotations__", {})}
    return {name for name in own if not name.startswith("_")}


def bound(half):
    return BoundPart(ScriptedPart("part"), half, SOURCE, StepFaults())


def of_methods(*names, **attributes):
    """Return an object of a class without bases, which has these methods."""
    own = {name: lambda self, *given: self.calls.append(given) for name in names}
    return type("Half", (), {**own, "calls": [], **attributes})()


class Slots(RequestFilter, ResourceCost):
    """The first example of docs/step-parts.md."""

    def __init__(self, running):
        self.capacity = {"slots": running}

    def uses(self, request):
        return "batch" in request.tags

    def cost(self, request):
        return {"slots": 1}


class TestProtocols:
    @pytest.mark.parametrize("place", TABLES)
    def test_they_have_all_hooks_but_close(self, place):
        table = TABLES[place]
        declared = set().union(*map(members, table.protocols))
        assert declared == {*table.names} - {"close"}

    @pytest.mark.parametrize("place", TABLES)
    def test_the_class_with_defaults_has_the_same_signatures(self, place):
        table = TABLES[place]
        for protocol in table.protocols:
            for name in members(protocol):
                own, default = getattr(protocol, name, None), getattr(table.defaults, name)
                if callable(own):
                    assert inspect.signature(own) == inspect.signature(default), name

    @pytest.mark.parametrize("place", TABLES)
    def test_a_default_of_a_protocol_is_that_of_the_class(self, place):
        table = TABLES[place]
        for protocol in table.protocols:
            for name in members(protocol) - required_members(protocol):
                if not callable(default := getattr(protocol, name)):
                    assert default == getattr(table.defaults, name), name

    def test_a_class_that_lacks_a_required_method_cannot_be_built(self):
        class NoGate(AdmissionGate):
            pass

        with pytest.raises(TypeError, match="abstract method '?gate"):
            NoGate()


class TestImplemented:
    def test_only_its_own_hooks_are_bound_and_no_default(self):
        part = bound(Slots(2))
        implemented = {name for name in ENGINE_HOOKS.names if part.overrides(name)}
        assert implemented == {"uses", "cost"}
        assert (part.capacity, part.every_plan, part.num_draft_tokens) == ({"slots": 2}, False, 0)

    def test_no_base_is_needed(self):
        half = of_methods("gate", "ended")
        part = bound(half)
        assert part.overrides("gate")
        assert not part.overrides("wait")
        part.run("ended", "r")
        assert half.calls == [("r",)]

    def test_what_it_overrides_of_the_class_with_all_hooks(self):
        class Old(EngineHalf):
            def gate(self, request):
                return None

        half = Old()
        part = bound(half)
        assert part.half is half
        assert {name for name in ENGINE_HOOKS.names if part.overrides(name)} == {"gate"}

    def test_an_attribute_is_read_when_it_is_needed(self):
        class Layers(WorkerStep, LayerWrapper):
            def __init__(self):
                self.count = 0

            def begin(self, plan, data):
                self.count += 1

            def around_layers(self, attend):
                return attend

            @property
            def wants_layers(self):
                return self.count > 1

        half = BoundWorkerHalf(
            ScriptedPart("part"), Layers(), PluginCalls(Activity(), "step_parts", SOURCE)
        )
        assert half.is_in_layers
        seen = []
        for _ in range(2):
            half.run("begin", None, b"")
            seen.append(half.half.wants_layers)
        assert seen == [False, True]


class Steps(PlanData, StepObserver):
    """Notes the calls of its hooks."""

    def __init__(self):
        self.calls = []

    def begin(self, plan):
        self.calls.append("begin")
        return b"data"

    def result(self, plan, result):
        self.calls.append("result")
        return {}

    def close(self):
        self.calls.append("close")


def test_a_half_of_protocols_goes_through_a_step():
    half = Steps()
    parts = EngineHalves([bound(half)], 9)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams())
    parts.add(request)
    plan = SchedulerOutput(num_scheduled_tokens={"r": 1})
    assert parts.begin(plan)["part"].data == b"data"
    assert parts.mask(plan) is None
    assert parts.needs_results(plan) == {}
    assert parts.result(plan, ModelRunnerOutput()) == {}
    parts.notify("updated", plan)
    parts.notify("lost", plan)
    assert parts.drafts(plan) == {}
    stats = SchedulerStats(
        num_running=0, num_waiting=0, kv_cache_usage=0.0, prefix_cache=PrefixCacheStats()
    )
    parts.add_stats(stats)
    parts.wait()
    parts.close()
    assert half.calls == ["begin", "result", "close"]


def test_a_worker_half_of_protocols_lacks_every_other_hook():
    half = of_methods("begin")
    parts = WorkerParts(
        [BoundWorkerHalf(ScriptedPart("part"), half, PluginCalls(Activity(), "step_parts", SOURCE))]
    )
    assert parts.memory() == {}
    assert parts.around_model(lambda batch: batch) is None
    assert [parts.packs, parts.encodes, parts.work_when_idle] == [False] * 3
    for method, given in {"sleep": (1,), "wake_up": (), "weights_changed": ()}.items():
        parts.notify(method, *given)
    parts.finished(["r"])
    parts.close()
    assert half.calls == []


class Selected(RequestFilter, PlanData):
    """Declares which requests use it, and calls nothing to find out."""

    for_fields = ("features", "tags", "prompt_embeds", "priority")
    for_parameters = ("structured", "temperature", "stop")

    def __init__(self):
        self.checked = []

    def check(self, request):
        self.checked.append(request.request_id)

    def begin(self, plan):
        return b""


class TestDeclaredFields:
    @pytest.mark.parametrize(
        ("given", "is_selected"),
        [
            ({}, False),
            ({"features": [], "tags": {}, "params": SamplingParams(stop=[])}, False),
            ({"lora": LoRARequest("x", "/x"), "timeout": 1.0}, False),
            ({"tags": {"a": "b"}}, True),
            ({"prompt_embeds": np.zeros((2, 3), np.float32)}, True),
            ({"priority": -1}, True),
            ({"params": SamplingParams(temperature=0.0)}, True),
            ({"params": SamplingParams(structured=StructuredOutputs(json={}))}, True),
        ],
    )
    def test_a_request_that_sets_one_uses_the_part(self, given, is_selected):
        half = Selected()
        parts = EngineHalves([bound(half), bound(Steps())], 9)
        given = {"params": SamplingParams(), **given}
        parts.add(EngineCoreRequest(request_id="r", prompt_token_ids=[1], **given))
        assert half.checked == ["r"] * is_selected
        assert "part" in parts.begin(SchedulerOutput(num_scheduled_tokens={"r": 1}))
        assert len(parts.of("r")) == 1 + is_selected

    def test_nothing_of_the_half_is_called_for_another_request(self):
        class Untouchable:
            for_parameters = ("structured",)

            def check(self, request):
                raise AssertionError

            gate = mask = result = begin = uses = ended = check

        half = Untouchable()
        del Untouchable.uses
        parts = EngineHalves([bound(half)], 9)
        parts.add(EngineCoreRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams()))
        plan = SchedulerOutput(num_scheduled_tokens={"r": 1})
        assert (parts.begin(plan), parts.mask(plan), list(parts.of("r"))) == ({}, None, [])
        assert parts.result(plan, ModelRunnerOutput()) == {}

    def test_names_of_arguments_are_no_fields(self):
        half = Selected()
        parts = EngineHalves([bound(half)], 9)
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1],
            params=SamplingParams(),
            plugin_args={"features": {}, "params.structured": {}},
        )
        parts.add(request)
        assert half.checked == []

    @pytest.mark.parametrize(
        ("declared", "message"),
        [
            (
                {"for_fields": ("feature",)},
                r"has 'feature'; expected optional fields of "
                r"EngineCoreRequest \(did you mean 'features'\?\)",
            ),
            (
                {"for_parameters": ["structure"]},
                r"whose for_parameters has 'structure'; expected "
                r"optional fields of SamplingParams \(did you mean 'structured'\?\)",
            ),
            ({"for_fields": ("structured",)}, "whose for_fields has 'structured'; expected opt"),
            ({"for_fields": ("request_id",)}, "for_fields has 'request_id'; expected optional"),
            ({"for_fields": "features"}, "for_fields is 'features'; expected a tuple of optional"),
            ({"for_parameters": 3}, "for_parameters is 3; expected a tuple of optional fields"),
            ({"for_fields": (3,)}, "for_fields has 3; expected optional fields of EngineCoreReq"),
        ],
    )
    @pytest.mark.parametrize("base", [object, EngineHalf, FrontendHalf])
    def test_another_name_is_refused_with_the_nearest_one(self, declared, message, base):
        half = type("Half", (base,), {**declared, "gate": lambda self, request: None})()
        hooks = FRONTEND_HOOKS if base is FrontendHalf else ENGINE_HOOKS
        assert re.search(message, hooks.defect(half))

    @pytest.mark.parametrize("base", [object, RequestFilter, EngineHalf])
    def test_a_half_that_declares_them_has_no_uses(self, base):
        class Both(base):
            for_fields = ("features",)

            def uses(self, request):
                return True

        assert ENGINE_HOOKS.defect(Both()) == (
            "gave a Both that has for_fields and uses(); expected one of them"
        )

    def test_a_declaration_alone_does_nothing(self):
        half = type("Half", (), {"for_fields": ("features",)})()
        assert "without a hook" in ENGINE_HOOKS.defect(half)


class TestRefused:
    @pytest.mark.parametrize(
        ("half", "message"),
        [
            (of_methods("gates"), r"whose gates is not a hook \(did you mean 'gate'\?\)"),
            (of_methods("gate", "draft"), r"whose draft is not a hook \(did you mean 'drafts'\?\)"),
            (of_methods("gate", "logits"), "whose logits is a hook of a WorkerHalf alone"),
            (of_methods("gate", "cost"), "has cost, and no capacity; expected all of ResourceCost"),
            (of_methods("gate", num_draft_tokens=2), "has num_draft_tokens, and no drafts"),
            (of_methods("close"), "gave a Half without a hook, expected an EngineHalf or None"),
            (of_methods("price"), "the hooks of a half in the engine are add_stats, arrays, begin"),
            (Slots, "expected an EngineHalf or None"),
            ({}, r"gave \{\}, expected an EngineHalf or None"),
        ],
        ids=lambda value: value if isinstance(value, str) else type(value).__name__,
    )
    def test_in_the_engine(self, half, message):
        assert re.search(message, ENGINE_HOOKS.defect(half))

    @pytest.mark.parametrize(
        ("half", "message"),
        [
            (of_methods("logit"), r"whose logit is not a hook \(did you mean 'logits'\?\)"),
            (of_methods("begin", "mask"), "whose mask is a hook of a[n]? EngineHalf alone"),
            (of_methods("start"), "has start, and no release_blocks and no take_blocks"),
        ],
        ids=lambda value: value if isinstance(value, str) else type(value).__name__,
    )
    def test_in_a_worker(self, half, message):
        assert re.search(message, WORKER_HOOKS.defect(half))

    @pytest.mark.parametrize(
        "half",
        [
            Slots(1),
            Steps(),
            of_methods("gate", "_gates", "price"),
            of_methods("result", "results"),  # which is close to a hook that it has
            of_methods("drafts", num_draft_tokens=1),
            EngineHalf(),
            type("Old", (EngineHalf,), {"gates": lambda self: None})(),
        ],
        ids=lambda value: value if isinstance(value, str) else type(value).__name__,
    )
    def test_what_is_taken(self, half):
        assert ENGINE_HOOKS.defect(half) is None

    def test_required_attributes_may_be_set_when_it_is_built(self):
        class Drafts(DraftTokens):
            def __init__(self):
                self.num_draft_tokens = 2

            def drafts(self):
                return {}

        assert ENGINE_HOOKS.defect(Drafts()) is None
        assert bound(Drafts()).num_draft_tokens == 2

    def test_blocks_need_all_of_their_protocol(self):
        class Moves(BlockAccess):
            def start(self, blocks: KVBlocks | None):
                return None

            def release_blocks(self):
                pass

            def take_blocks(self, blocks: KVBlocks):
                pass

        assert WORKER_HOOKS.defect(Moves()) is None
        assert WORKER_HOOKS.defect(WorkerHalf()) is None
