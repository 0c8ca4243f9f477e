"""Gates of step parts in an engine: each is passed once, and costs are asked for once."""

from __future__ import annotations

import pytest

from hardpoint import SamplingParams
from hardpoint.plugins import EngineHalf, StepPart
from hardpoint.testing import scripted_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
CALLS: list[tuple[str, str, str]] = []
HELD: set[str] = set()


class Half(EngineHalf):
    """Notes calls, and holds back the requests in HELD, if it is the second one."""

    capacity = {"places": 1}

    def __init__(self, name):
        self.name = name

    def gate(self, request):
        CALLS.append((self.name, "gate", request.request_id))
        return "it is held" if self.name == "second" and request.request_id in HELD else None

    def cost(self, request):
        CALLS.append((self.name, "cost", request.request_id))
        return {"places": 1}


class First(StepPart):
    contract = 1

    def engine_half(self, context):
        del context
        return Half("first")


class Second(StepPart):
    contract = 1

    def engine_half(self, context):
        del context
        return Half("second")


@pytest.fixture
def engine(scripted):
    CALLS.clear()
    HELD.clear()
    parts = [{"use": f"{__name__}:{name}", "name": name.lower()} for name in ("First", "Second")]
    config = {"plugins": {"enable": parts}, "engine": {"random_request_ids": False}}
    engine = scripted_engine(scripted, config)
    yield engine
    engine.close()


def run(engine):
    """Run all requests to their ends; return why each ended."""
    reasons = {}
    for _ in range(400):
        for output in engine.step():
            if output.finished:
                reasons[output.request_id] = output.outputs[0].finish_reason
        if not engine.has_unfinished_requests():
            break
    return reasons


def count(part, method, request_id):
    return CALLS.count((part, method, request_id))


def test_a_gate_that_is_passed_is_not_asked_again(engine):
    HELD.add("a")
    engine.add_request("a", "hello", GREEDY)
    for _ in range(5):
        engine.step()
    assert count("first", "gate", "a") == 1  # it may hold something for the request by now
    assert count("second", "gate", "a") >= 5
    assert count("first", "cost", "a") == 0
    HELD.clear()
    assert run(engine) == {"a": "length"}
    assert count("first", "gate", "a") == count("first", "cost", "a") == 1


def test_costs_are_asked_for_once_however_long_a_request_waits_or_is_preempted(engine):
    engine.add_request("a", "hello", LONG)
    engine.add_request("b", "hello", GREEDY)  # for which there is no place
    for _ in range(3):
        engine.step()
    engine.call_utility("reset_prefix_cache", True)  # preempts the one that runs
    assert run(engine) == {"a": "length", "b": "length"}
    for request_id in "ab":
        assert count("first", "cost", request_id) == count("second", "cost", request_id) == 1


def test_another_request_of_the_same_id_passes_them_itself(engine):
    engine.add_request("a", "hello", LONG)
    engine.step()
    engine.abort_requests("a")
    engine.add_request("a", "hello", GREEDY)  # before a plan has reported the end
    assert run(engine)["a"] == "length"
    assert count("first", "gate", "a") == count("first", "cost", "a") == 2


def test_none_is_asked_while_the_engine_sleeps(engine):
    engine.add_request("a", "hello", LONG)
    engine.step()
    engine.call_utility("sleep", 2, "keep")
    engine.add_request("b", "hello", GREEDY)
    engine.abort_requests("a")  # so that there is a step
    engine.step()
    assert count("first", "gate", "b") == 0
    engine.call_utility("wake_up", None)
    assert run(engine)["b"] == "length"
    assert count("first", "gate", "b") == 1
