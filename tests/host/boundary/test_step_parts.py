"""Step parts bound to the engine: order, masks of several, faults by scope, resources, ids."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.core.engine_harness import ScriptedPart

from hardpoint.errors import PluginConflictError, PluginFaultError, RequestError
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.parts.bound_half import BoundPart
from hardpoint.host.boundary.parts.engine_halves import EngineHalves
from hardpoint.host.registry.ordering import ordered_parts
from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineHalf,
    GrammarBitmask,
    ModelRunnerOutput,
    Request,
    RequestFault,
    SamplingParams,
    SchedulerOutput,
    StepPart,
    WaitingFor,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.requests import MultiModalFeature, PartArray
from hardpoint.plugins.requests.plan import NewRequest, PartData


class Scripted(EngineHalf):
    """Notes its calls; returns or raises what its class names."""

    def __init__(self, **answers):
        self.answers, self.calls, self.closed = answers, [], 0

    def _answer(self, method, *given):
        self.calls.append((method, *given))
        found = self.answers.get(method)
        if isinstance(found, BaseException):
            raise found
        return found(*given) if callable(found) else found


METHODS = [
    name for name, value in vars(EngineHalf).items() if not name.startswith("_") and callable(value)
]
VOCAB_SIZE = 9


def half_of(capacity=None, num_draft_tokens=0, **answers):
    """Return a half that overrides the methods of `answers`, and notes their calls."""

    def method(name):
        return lambda self, *given: self._answer(name, *given)

    own = {name: method(name) for name in METHODS if name in answers}
    read = {"capacity": capacity or {}, "num_draft_tokens": num_draft_tokens}
    return type("Half", (Scripted,), own | read)(**answers)


def parts_of(*halves, scope="request", faults=None, named_only=False):
    faults = faults or StepFaults()
    bound = []
    for index, half in enumerate(halves):
        name = f"part{index}"
        part = ScriptedPart(name, scope, named_only=named_only)
        source = Source(name, f"acme:{name}", "acme", "1.0", "plugins.enable")
        bound.append(BoundPart(part, half, source, faults))
    return EngineHalves(bound, VOCAB_SIZE)


def new(request_id="r"):
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=[1, 2], params=SamplingParams()
    )


def plan_of(*names, finished=(), preempted=(), drafts=None):
    return SchedulerOutput(
        num_scheduled_tokens=dict.fromkeys(names, 1),
        finished_request_ids=frozenset(finished),
        preempted_request_ids=frozenset(preempted),
        draft_token_ids=drafts or {},
    )


def mask_of(**rows):
    return GrammarBitmask(list(rows), np.array([[row] for row in rows.values()], dtype=np.int32))


def faults_of(parts, *names):
    return parts.result(plan_of(*names), ModelRunnerOutput())


def names_of(calls):
    return [call[0] for call in calls]


# Order


def part_class(**attributes):
    return type("Ordered", (StepPart,), attributes)


def test_before_and_after_order_parts_and_else_they_stay_as_enabled():
    parts = {
        "c": part_class(after=["a"]),
        "b": part_class(),
        "a": part_class(before=["b"], after=["a", "missing"]),
    }
    assert ordered_parts(parts) == ["a", "c", "b"]


def test_a_cycle_of_before_and_after_is_a_conflict():
    parts = {"a": part_class(before=["b"]), "b": part_class(before=["a"])}
    with pytest.raises(PluginConflictError, match=r"^step_parts: .* make a cycle: . -> . -> .$"):
        ordered_parts(parts)


# Calls


def test_a_part_that_is_named_only_is_used_by_requests_that_give_arguments():
    half = half_of(uses=lambda request: request.request_id != "refused", begin=b"data")
    parts = parts_of(half, named_only=True)
    given = {"a": {}, "b": {"step_parts/part0": {}}, "c": {"part0": {}}, "refused": {}}
    for name, plugin_args in given.items():
        request = new(name)
        request.plugin_args = plugin_args
        parts.add(request)
    assert [call[1].request_id for call in half.calls if call[0] == "uses"] == ["b"]
    assert parts.begin(plan_of(*given))["part0"].request_ids == ["b"]


def test_only_overridden_methods_of_parts_with_live_requests_are_called():
    user = half_of(uses=True, begin=b"data", ended=None)
    other = half_of(uses=False, begin=b"data", lost=None, wait=None)
    parts = parts_of(user, other)
    assert parts.begin(plan_of()) == {}
    parts.add(new())
    assert list(parts.begin(plan_of("r"))) == ["part0"]
    parts.notify("lost", plan_of("r"))
    parts.wait()
    assert parts.begin(plan_of(finished=["r"])) == {}
    assert names_of(user.calls) == ["uses", "begin", "ended"]
    assert names_of(other.calls) == ["uses"]


def test_ended_and_preempted_come_before_begin():
    half = half_of(begin=None, ended=None, preempted=None)
    parts = parts_of(half)
    for name in "abc":
        parts.add(new(name))
    parts.begin(plan_of("c", finished=["a"], preempted=["b", "not its own"]))
    assert names_of(half.calls) == ["ended", "preempted", "begin"]
    assert half.calls[:2] == [("ended", "a"), ("preempted", "b")]


# Masks


def test_the_masks_of_two_parts_are_combined():
    parts = parts_of(half_of(mask=mask_of(a=0b0111, b=1)), half_of(mask=mask_of(a=0b1110)))
    parts.add(new("a"))
    parts.add(new("b"))
    found = parts.mask(plan_of("a", "b"))
    assert found.request_ids == ["a", "b"]
    assert found.bitmask.tolist() == [[0b0110], [1]]


def test_nothing_left_ends_the_request_by_a_fault_that_names_both():
    parts = parts_of(half_of(mask=mask_of(a=1, b=1)), half_of(mask=mask_of(a=2, b=3)))
    parts.add(new("a"))
    parts.add(new("b"))
    found = parts.mask(plan_of("a", "b"))
    assert found.bitmask.tolist() == [[-1], [1]]
    (fault,) = faults_of(parts, "a", "b").values()
    assert "'part0'" in fault.message
    assert "'part1'" in fault.message
    assert fault.message.endswith("no token is allowed by both")
    assert faults_of(parts, "a", "b") == {}


def test_nothing_left_by_one_part_names_that_one():
    parts = parts_of(half_of(mask=mask_of(a=0)), half_of(mask=mask_of(b=1)))
    parts.add(new("a"))
    parts.add(new("b"))
    parts.mask(plan_of("a", "b"))
    message = faults_of(parts, "a", "b")["a"].message
    assert message.endswith(": no token is allowed")
    assert "'part1'" not in message


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1], "its mask() gave [1], expected a GrammarBitmask"),
        (mask_of(a=1, foreign=1), "its mask() has rows of 'foreign', which do not use it"),
        (GrammarBitmask(["a"], np.ones((2, 1), np.int32)), "has 2 rows for 1 request ids"),
        (GrammarBitmask(["a"], np.ones((1, 1))), "no int32 array of two dimensions"),
        (GrammarBitmask(["a", "a"], np.ones((2, 1), np.int32)), "has 2 rows of 'a', expected 1"),
    ],
)
def test_a_mask_that_does_not_fit_the_plan_is_a_fault_of_its_part(mask, message):
    parts = parts_of(half_of(mask=mask))
    parts.add(new("a"))
    assert parts.mask(plan_of("a")) is None
    assert message in faults_of(parts, "a")["a"].message


# Drafts


def drafting(answer, most=2, **answers):
    return half_of(num_draft_tokens=most, drafts=answer, **answers)


def test_drafts_are_those_of_the_first_part_that_has_some():
    first = drafting({"a": [1, 2], "b": []})
    parts = parts_of(
        first, half_of(drafts=KeyError("never called")), drafting({"a": [3], "b": [4]})
    )
    assert parts.num_draft_tokens == 2
    assert parts.drafts(plan_of()) == {}
    assert first.calls == []
    parts.add(new("a"))
    parts.add(new("b"))
    assert parts.drafts(plan_of("a")) == {"a": [1, 2], "b": [4]}
    assert parts.drafting.startswith("plugin 'part0'")
    assert "'part1'" not in parts.drafting


def test_parts_may_change_the_lists_that_they_gave():
    given = [1]
    parts = parts_of(drafting({"r": given}))
    parts.add(new())
    found = parts.drafts(plan_of("r"))
    given.append(2)
    assert found == {"r": [1]}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"foreign": [1]}, "its drafts() gave drafts of 'foreign', which does not use it"),
        ({"r": [1, 2, 3]}, "its drafts() gave 3 drafts of 'r', expected at most 2"),
        ({"r": [9]}, "its drafts() gave the draft 9 of 'r', expected token ids in 0..8"),
        ({"r": [-1]}, "its drafts() gave the draft -1 of 'r', expected token ids in 0..8"),
        ({"r": [1.0]}, "its drafts() gave the draft 1.0 of 'r', expected token ids in 0..8"),
        ({"r": "12"}, "its drafts() gave '12' for 'r', expected token ids"),
        ({"r": 1}, "its drafts() gave 1 for 'r', expected token ids"),
        (None, "its drafts() gave None, expected token ids by request id"),
        (KeyError("x"), "its drafts() failed: KeyError: 'x'"),
    ],
)
def test_wrong_drafts_are_a_fault_of_their_part(answer, message):
    parts = parts_of(drafting(answer), drafting({"r": [4]}))
    parts.add(new())
    assert parts.drafts(plan_of("r")) == {"r": [4]}
    (fault,) = faults_of(parts, "r").values()
    assert fault.plugin == "part0"
    assert message in fault.message


def test_each_part_limits_the_drafts_of_its_requests():
    limits = {"uses": lambda request: request.request_id != "c"}
    first = half_of(limit_drafts=lambda drafts: {"a": 2}, **limits)
    second = half_of(limit_drafts=lambda drafts: dict.fromkeys(drafts, 1), **limits)
    parts = parts_of(first, drafting({name: [1, 2, 3] for name in "abc"}, most=3), second)
    for name in "abc":
        parts.add(new(name))
    assert parts.drafts(plan_of(*"abc")) == {"a": [1], "b": [1], "c": [1, 2, 3]}
    assert first.calls[-1] == ("limit_drafts", {"a": [1, 2, 3], "b": [1, 2, 3]})
    assert second.calls[-1] == ("limit_drafts", {"a": [1, 2], "b": [1, 2, 3]})


def test_a_request_whose_drafts_are_all_refused_has_none():
    parts = parts_of(drafting({"r": [1, 2]}), half_of(limit_drafts={"r": 0}))
    parts.add(new())
    assert parts.drafts(plan_of("r")) == {}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"foreign": 1}, "gave a limit of 'foreign', which has no drafts that it was given"),
        ({"r": 3}, "gave 3 for 'r', expected 0 to 2 drafts"),
        ({"r": -1}, "gave -1 for 'r', expected 0 to 2 drafts"),
        ({"r": [1]}, "gave [1] for 'r', expected 0 to 2 drafts"),
        (None, "gave None, expected a number of drafts by request id"),
        (KeyError("x"), "failed: KeyError: 'x'"),
    ],
)
def test_wrong_limits_of_drafts_are_a_fault_of_their_part(answer, message):
    parts = parts_of(half_of(limit_drafts=answer), drafting({"r": [4, 5]}))
    parts.add(new())
    assert parts.drafts(plan_of("r")) == {"r": [4, 5]}
    (fault,) = faults_of(parts, "r").values()
    assert fault.plugin == "part0"
    assert f"its limit_drafts() {message}" in fault.message


# Figures


def including(*names, request_id="r"):
    params = SamplingParams(include=list(names))
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=[1, 2], params=params)


def outputs_of(*names):
    found = [EngineCoreOutput(request_id=name, new_token_ids=[1]) for name in names]
    return {0: EngineCoreOutputs(outputs=found)}


def test_outputs_have_the_figures_of_the_parts_that_their_requests_include():
    parts = parts_of(
        half_of(figures=lambda name: {"of": 1, "list": [2, 3]}), half_of(figures=KeyError("never"))
    )
    parts.add(including("part0", "part0"))
    parts.add(new("other"))
    outputs = outputs_of("r", "other")
    parts.add_figures(plan_of("r", "other"), outputs)
    asked, other = outputs[0].outputs
    assert asked.part_figures == {"part0": {"of": 1, "list": [2, 3]}}
    assert other.part_figures is None
    parts.begin(plan_of(finished=["r"]))
    outputs = outputs_of("r")
    parts.add_figures(plan_of("r"), outputs)
    assert outputs[0].outputs[0].part_figures is None


def test_an_active_part_completes_the_outputs_of_all_requests():
    def publish(outputs):
        for output in outputs[0].outputs:
            output.new_token_ids.append(7)

    half, idle = half_of(publish=publish), half_of(publish=KeyError("never"))
    idle.is_active = False
    parts = parts_of(half, idle)
    parts.add(new())
    assert [part.half for part in parts.of("r")] == [half]
    outputs = outputs_of("r", "other")
    parts.publish(plan_of("r"), outputs)
    assert [output.new_token_ids for output in outputs[0].outputs] == [[1, 7], [1, 7]]
    half.is_active = False
    parts.add(new("later"))
    assert not parts.of("later")
    outputs = outputs_of("r", "later")
    parts.publish(plan_of("r", "later"), outputs)
    assert [output.new_token_ids for output in outputs[0].outputs] == [[1], [1]]


def test_a_part_that_cannot_complete_outputs_is_at_fault():
    parts = parts_of(half_of(publish=KeyError("x")))
    parts.add(new())
    parts.publish(plan_of("r", "other"), outputs_of("r", "other"))
    (fault,) = faults_of(parts, "r", "other").values()
    assert "its publish() failed: KeyError: 'x'" in fault.message


def test_arrays_of_a_request_keep_their_form():
    rows = iter([np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 3))])
    half = half_of(figures={}, arrays=lambda name: {"x": PartArray(np.array([0]), next(rows))})
    parts = parts_of(half)
    parts.add(including("part0"))
    given = []
    for _ in range(3):
        outputs = outputs_of("r")
        parts.add_figures(plan_of("r"), outputs)
        given.append(outputs[0].outputs[0].part_arrays)
    assert [list(one["part0"]) for one in given[:2]] == [["x"], ["x"]]
    assert given[2] is None
    (fault,) = faults_of(parts, "r").values()
    assert fault.message.endswith(
        "its arrays() gave rows of float64 [3] as 'x', expected float64 [2], as it gave before"
    )


@pytest.mark.parametrize(("tokens", "positions"), [([7, 8, 9], 4), ([7, 8], 3), ([7], 2), ([], 1)])
def test_arrays_end_with_the_output(tokens, positions):
    """Three tokens were sampled, two of them accepted drafts; the output may end before."""
    array = PartArray(np.arange(4), np.arange(8.0).reshape(4, 2))
    parts = parts_of(half_of(figures={}, arrays={"x": array}))
    parts.add(including("part0"))
    plan = SchedulerOutput(
        new_requests=[NewRequest(including("part0"), [], [[1]], 0)],
        num_scheduled_tokens={"r": 4},
        draft_token_ids={"r": [7, 8]},
    )
    assert not parts.result(plan, ModelRunnerOutput(sampled_token_ids={"r": [7, 8, 9]}))
    outputs = outputs_of("r")
    outputs[0].outputs[0].new_token_ids = tokens
    parts.add_figures(plan, outputs)
    (shown,) = outputs[0].outputs[0].part_arrays["part0"]["x"]
    assert shown.positions.tolist() == list(range(positions))
    assert shown.values.tolist() == array.values[:positions].tolist()
    assert not faults_of(parts, "r")


@pytest.mark.parametrize(
    ("halves", "expected"),
    [
        ([{"figures": {}}], "'part0'"),
        ([{"figures": {}, "uses": False}], "none, as no part has any of it"),
        ([{}], "none, as no part has any of it"),
        ([], "none, as no part has any of it"),
    ],
)
def test_figures_that_no_part_has_are_refused(halves, expected):
    parts = parts_of(*(half_of(**answers) for answers in halves))
    with pytest.raises(RequestError, match=f"^include: expected {expected}, got 'parts'$"):
        parts.add(including("parts"))
    assert not parts.of("r")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"a": b"x"}, "gave {'a': b'x'}, expected numbers, lists of numbers, or texts, by name"),
        ({1: 1}, "gave {1: 1}, expected numbers, lists of numbers, or texts, by name"),
        ({"a": [None]}, "expected numbers, lists of numbers, or texts, by name"),
        (None, "gave None, expected numbers, lists of numbers, or texts, by name"),
        (KeyError("x"), "failed: KeyError: 'x'"),
    ],
)
def test_wrong_figures_are_a_fault_of_their_part(answer, message):
    parts = parts_of(half_of(figures=answer), half_of(figures={"b": 2}))
    parts.add(including("part0", "part1"))
    outputs = outputs_of("r")
    parts.add_figures(plan_of("r"), outputs)
    assert outputs[0].outputs[0].part_figures == {"part1": {"b": 2}}
    (fault,) = faults_of(parts, "r").values()
    assert fault.plugin == "part0"
    assert "its figures() " in fault.message
    assert message in fault.message


def test_wrong_drafts_of_scope_step_are_left_out():
    faults = StepFaults()
    parts = parts_of(drafting({"r": [9]}), scope="step", faults=faults)
    parts.add(new())
    assert parts.drafts(plan_of("r")) == {}
    assert faults_of(parts, "r") == {}
    assert faults.report()["part0"].count == 1


# Faults


BROKEN = {
    "begin": lambda parts: parts.begin(plan_of("r")),
    "needs_results": lambda parts: parts.needs_results(plan_of("r")),
    "mask": lambda parts: parts.mask(plan_of("r")),
    "lost": lambda parts: parts.notify("lost", plan_of("r")),
    "preempted": lambda parts: parts.begin(plan_of("r", preempted=["r"])),
}


@pytest.mark.parametrize("method", BROKEN)
def test_a_fault_of_scope_request_ends_the_users_in_the_plan(method):
    parts = parts_of(half_of(**{method: KeyError("x"), "uses": lambda r: r.request_id != "o"}))
    for name in ("r", "o", "waits"):
        parts.add(new(name))
    BROKEN[method](parts)
    found = faults_of(parts, "r", "o")
    assert list(found) == ["r"]
    assert found["r"].plugin == "part0"
    assert f"its {method}() failed: KeyError: 'x'" in found["r"].message
    assert faults_of(parts, "r", "o", "waits") == {}


@pytest.mark.parametrize("method", BROKEN)
def test_a_fault_of_scope_step_is_counted_and_the_step_goes_on(method):
    faults = StepFaults()
    parts = parts_of(half_of(**{method: KeyError("x")}), scope="step", faults=faults)
    parts.add(new())
    BROKEN[method](parts)
    assert faults_of(parts, "r") == {}
    assert faults.report()["part0"].count == 1


@pytest.mark.parametrize("method", BROKEN)
def test_a_fault_of_scope_engine_ends_the_engine(method):
    parts = parts_of(half_of(**{method: KeyError("x")}), scope="engine")
    parts.add(new())
    with pytest.raises(PluginFaultError, match=rf"'part0'.*its {method}\(\) failed: KeyError"):
        BROKEN[method](parts)


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("begin", "text", "its begin() gave 'text', expected bytes"),
        ("needs_results", 5, "its needs_results() gave 5, expected request ids"),
        ("needs_results", "r", "its needs_results() gave 'r', expected request ids"),
    ],
)
def test_a_wrong_answer_is_a_fault(method, answer, message):
    parts = parts_of(half_of(**{method: answer}))
    parts.add(new())
    BROKEN[method](parts)
    assert message in faults_of(parts, "r")["r"].message


@pytest.mark.parametrize(
    "answer", [{"foreign": RequestFault("no")}, {"r": "no"}, ["r"]], ids=["other", "text", "list"]
)
def test_a_result_that_names_others_or_no_faults_is_a_fault(answer):
    parts = parts_of(half_of(result=answer))
    parts.add(new())
    assert "its result() gave " in faults_of(parts, "r")["r"].message


def test_a_result_may_name_what_ended_after_its_plan_was_made():
    """A plan that was under way has the request; the next ones do not."""
    parts = parts_of(half_of(result=lambda plan, result: {"r": RequestFault("no")}))
    plans = [msgspec.structs.replace(plan_of("r", "other"), step=step) for step in (1, 2)]
    plans.append(msgspec.structs.replace(plan_of("other", finished=["r"]), step=3))
    for name in ("r", "other"):
        parts.add(new(name))
    for plan in plans[:2]:
        parts.begin(plan)
    assert parts.result(plans[0], ModelRunnerOutput()).keys() == {"r"}
    parts.begin(plans[2])
    assert parts.result(plans[1], ModelRunnerOutput()) == {}
    found = parts.result(plans[2], ModelRunnerOutput())
    assert found.keys() == {"other"}
    assert "its result() gave " in found["other"].message


def test_a_mask_may_have_rows_of_what_ended_after_its_plan_was_made():
    parts = parts_of(half_of(mask=lambda plan: mask_of(r=1, other=1)))
    for name in ("r", "other"):
        parts.add(new(name))
    plans = [msgspec.structs.replace(plan_of("r", "other"), step=1)]
    plans.append(msgspec.structs.replace(plan_of("other", finished=["r"]), step=2))
    for plan in plans:
        parts.begin(plan)
    assert parts.mask(plans[0]) is not None
    assert parts.result(plans[0], ModelRunnerOutput()) == {}
    assert parts.result(plans[1], ModelRunnerOutput()) == {}
    assert parts.mask(plans[1]) is None
    assert "which do not use it" in parts.result(plans[1], ModelRunnerOutput())["other"].message


def test_a_fault_of_the_worker_half_ends_its_requests():
    parts = parts_of(half_of())
    parts.add(new())
    found = parts.result(plan_of("r"), ModelRunnerOutput(part_faults={"part0": "rank 1: no"}))
    assert found["r"].message.endswith("rank 1: no")


def test_a_fault_in_the_layers_ends_those_that_use_the_part_in_plans_under_way():
    parts = parts_of(half_of(uses=lambda request: request.request_id != "other"))
    for name in ("r", "later", "other", "waits"):
        parts.add(new(name))
    failed = ModelRunnerOutput(part_faults={"part0": "no"}, is_cache_uncertain=True)
    assert parts.result(plan_of("r"), failed, ["r", "later", "other"]).keys() == {"r"}
    following = plan_of("later", "other", "waits")
    assert parts.result(following, ModelRunnerOutput()).keys() == {"later"}


# Gates and resources


def test_a_text_of_a_gate_becomes_the_reason_why_a_request_waits():
    parts = parts_of(half_of(gate="its adapter is being read"))
    parts.add(new())
    assert parts.gates.holds(Request(new()))
    reason = parts.gates.wait_reason(Request(new()))
    assert (reason.waiting_for, reason.message) == (
        WaitingFor.PART,
        "part0: its adapter is being read",
    )


@pytest.mark.parametrize("answer", [ValueError("no"), 5])
def test_a_broken_gate_refuses_the_request_or_is_left_out(answer):
    for scope in ("request", "step"):
        parts = parts_of(half_of(gate=answer), scope=scope)
        parts.add(new())
        if scope == "step":
            assert parts.gates.wait_reason(Request(new())) is None
            continue
        with pytest.raises(RequestError, match=r"its gate\(\) (failed: ValueError: no|gave 5)"):
            parts.gates.wait_reason(Request(new()))


def test_a_request_waits_while_a_resource_has_no_room():
    parts = parts_of(half_of(capacity={"slots": 3}, cost={"slots": 2}))
    first, second = Request(new("a")), Request(new("b"))
    for request in (first, second):
        parts.add(request.source)
        assert parts.gates.wait_reason(request) is None
        assert parts.gates.lacks(request) is None
    parts.gates.acquire(first)
    reason = parts.gates.lacks(second)
    assert (reason.needed, reason.available) == (2, 1)
    assert reason.message == "part0: needs 2 of slots, 1 of 3 are free"
    for _ in range(2):  # releasing again changes nothing
        parts.gates.release(first)
    assert parts.gates.lacks(second) is None
    parts.gates.acquire(second)
    assert parts.gates.lacks(first) is not None


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ({"slots": 4}, "it needs 4 of slots, expected at most 3"),
        ({"seats": 1}, "it needs 1 of seats, expected at most 0"),
        ([1], r"its cost\(\) gave \[1\], expected an amount of each resource"),
        ({"slots": -1}, "expected an amount of each resource"),
        (KeyError("x"), r"its cost\(\) failed: KeyError"),
    ],
)
def test_a_request_that_can_never_have_its_resources_is_refused(cost, message):
    parts = parts_of(half_of(capacity={"slots": 3}, cost=cost))
    parts.add(new())
    request = Request(new())
    assert parts.gates.holds(request)
    with pytest.raises(RequestError, match=message):
        parts.gates.wait_reason(request)


# Ids


def test_a_request_refused_by_a_later_part_is_known_to_none():
    first = half_of(check=None, refused=None, begin=b"")
    second = half_of(check=RequestError("no"), refused=None)
    parts = parts_of(first, second)
    with pytest.raises(RequestError, match="^no$"):
        parts.add(new())
    assert names_of(first.calls) == ["check", "refused"]
    assert not parts.of("r")
    assert parts.begin(plan_of("r")) == {}


def test_only_checks_of_parts_see_the_data_of_features():
    seen, data = [], np.zeros((1, 2), np.uint8)
    features = [MultiModalFeature("x", 0, 1, data=data)]
    parts = parts_of(half_of(check=lambda one: seen.append(one.features)), half_of(gate=None))
    refusing = parts_of(half_of(check=RequestError("not this one")))
    request = new()
    request.features = features
    with pytest.raises(RequestError, match="not this one"):
        refusing.add(request)
    assert request.features is features
    added = parts.add(request)
    assert [one.data for one in seen[0]] == [data]
    assert added.features == [MultiModalFeature("x", 0, 1)]
    assert request.features is features


def test_a_request_refused_after_its_check_is_forgotten():
    half = half_of(check=None, refused=None, ended=None)
    parts = parts_of(half)
    parts.add(new())
    parts.refused("r")
    parts.begin(plan_of(finished=["r"]))
    assert names_of(half.calls) == ["check", "refused"]


class Live:
    """A scheduler that shows the ids of live requests."""

    def __init__(self, *names):
        self.names = set(names)

    def live_request(self, request_id):
        return request_id if request_id in self.names else None


def again(scheduler):
    """Return parts with a live request "r", and another one before it that no plan reported."""
    half = half_of(uses=True, ended=None)
    parts = parts_of(half)
    if scheduler is not None:
        parts.follow(scheduler)
    parts.add(new())
    parts.add(new())  # the first one has ended
    assert names_of(half.calls) == ["uses", "ended", "uses"]
    half.calls.clear()
    return parts, half


class ShowsNone:
    def live_request(self, request_id):
        raise NotImplementedError


@pytest.mark.parametrize("scheduler", [None, ShowsNone(), Live("r")])
def test_an_id_used_again_at_once_is_not_ended_by_the_report_of_the_first(scheduler):
    parts, half = again(scheduler)
    parts.begin(plan_of("r", finished=["r"]))
    assert half.calls == []
    assert len(parts.of("r")) == 1
    if isinstance(scheduler, Live):
        scheduler.names.clear()
    parts.begin(plan_of(finished=["r"]))
    assert names_of(half.calls) == ["ended"]


def test_nor_by_a_second_report_after_the_plan_was_lost():
    scheduler = Live("r")
    parts, half = again(scheduler)
    parts.begin(plan_of("r", finished=["r"]))
    parts.notify("lost", plan_of("r", finished=["r"]))
    parts.begin(plan_of("r", finished=["r"]))
    assert half.calls == []
    scheduler.names.clear()
    parts.begin(plan_of(finished=["r"]))
    assert names_of(half.calls) == ["ended"]


def test_both_requests_of_an_id_may_end_before_a_plan_reports_them():
    parts, half = again(Live())
    parts.begin(plan_of(finished=["r"]))
    assert names_of(half.calls) == ["ended"]
    assert not parts.of("r")


# Blocks that a part loads and saves


def test_two_parts_that_load_blocks_are_refused_and_both_named():
    answers = {"get_num_new_matched_tokens": (4, True)}
    with pytest.raises(PluginConflictError, match=r"'part0'.* and .*'part1'.* both load blocks"):
        parts_of(half_of(**answers), half_of(**answers))


def test_a_scheduler_asks_the_part_that_loads_blocks():
    half = half_of(get_num_new_matched_tokens=(4, True), request_finished=(True, {"a": 1}))
    parts = parts_of(half_of(), half)
    parts.add(new("r"))
    request = Request(new("r"), 0)
    assert parts.transfers.get_num_new_matched_tokens(request, 0) == (4, True)
    assert parts.transfers.request_finished(request, [[1]]) == (True, {"a": 1})
    assert names_of(half.calls) == ["get_num_new_matched_tokens", "request_finished"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (KeyError("x"), "its get_num_new_matched_tokens() failed: KeyError: 'x'"),
        ((-1, True), "gave (-1, True), expected tokens >= 0 or None, and whether between steps"),
        (5, "gave 5, expected tokens >= 0 or None, and whether between steps"),
        ((True, False), "gave (True, False), expected tokens >= 0"),
    ],
)
def test_a_fault_of_a_lookup_loads_nothing_and_ends_the_request(answer, message):
    parts = parts_of(half_of(get_num_new_matched_tokens=answer))
    parts.add(new("r"))
    assert parts.transfers.get_num_new_matched_tokens(Request(new("r"), 0), 0) == (0, False)
    (fault,) = parts.result(plan_of("r"), ModelRunnerOutput()).values()
    assert message in fault.message


def test_a_part_for_every_plan_is_called_without_users():
    half = half_of(begin=b"", result={})
    type(half).every_plan = True
    parts = parts_of(half)
    assert parts.begin(plan_of("r"))["part0"] == PartData(b"", None)
    parts.result(plan_of("r"), ModelRunnerOutput())
    assert names_of(half.calls) == ["begin", "result"]


def test_calls_reach_the_part_that_answers_them():
    answering = half_of(call=lambda method, arguments: [method, dict(arguments)])
    parts = parts_of(answering, half_of())
    assert parts.calls.to_part("part0", "list", {"kind": 1}) == ["list", {"kind": 1}]
    with pytest.raises(RequestError, match="part: expected one of part0, got 'part1'"):
        parts.calls.to_part("part1", "list", {})
    with pytest.raises(RequestError, match="none: no enabled part answers calls, got 'part0'"):
        parts_of(half_of()).calls.to_part("part0", "list", {})


def test_calls_that_fail_name_part_and_method():
    parts = parts_of(half_of(call=KeyError("seat")), half_of(call=RequestError("no")))
    with pytest.raises(PluginFaultError, match="part0.*: its call.. of 'list' failed: KeyError"):
        parts.calls.to_part("part0", "list", {})
    with pytest.raises(RequestError, match="^no$"):
        parts.calls.to_part("part1", "list", {})
