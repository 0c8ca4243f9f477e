"""The waiting queue: passing others is bounded, and waiting costs nothing."""

from __future__ import annotations

from support.builtins.scheduler_harness import HoldsBack, Simulator, adapter, admitted

from hardpoint.builtin_plugins.scheduling.waiting_queue import WaitingQueue
from hardpoint.plugins import EngineCoreRequest, SamplingParams, WaitingFor

# Overtaking is bounded


def overtaken(sim):
    """Count the steps in which somebody is admitted before "b", which waits for a LoRA slot."""
    sim.add("a", lora=adapter(1), max_tokens=100)
    sim.add("b", lora=adapter(2))
    steps = 0
    for i in range(40):
        sim.add(f"c{i}", prompt=1, max_tokens=1)
        sim.add(f"d{i}", prompt=1, max_tokens=1)
        new = admitted(sim.step())
        steps += any(name[0] in "cd" for name in new)
    return steps


def test_one_that_is_set_aside_is_passed_in_so_many_steps_only():
    sim = Simulator(max_loras=1, options={"max_overtaken": 3}, blocks=200)
    assert overtaken(sim) == 3
    assert sim.live("b").num_overtaken == 3
    assert sim.records[-1].admission_stopped.waiting_for is WaitingFor.LORA_SLOT
    assert sim.why("c20").waiting_for is WaitingFor.BEHIND


def test_no_request_is_passed_where_none_may():
    assert overtaken(Simulator(max_loras=1, options={"max_overtaken": 0}, blocks=200)) == 0


def test_being_set_aside_without_being_passed_does_not_count():
    sim = Simulator(max_loras=1, options={"max_overtaken": 3})
    sim.add("a", lora=adapter(1))
    sim.add("b", lora=adapter(2))
    for _ in range(9):
        sim.step()
    assert sim.live("b").num_overtaken == 0


def test_a_step_sets_so_many_aside_only():
    sim = Simulator(max_loras=1, options={"max_set_aside": 2})
    sim.add("a", lora=adapter(1))
    for name in "bcd":
        sim.add(name, lora=adapter(2))
    sim.add("e")
    assert admitted(sim.step()) == ["a"]
    assert list(sim.records[-1].waiting) == ["b", "c"]
    assert (sim.why("d").waiting_for, sim.why("d").ahead) == (WaitingFor.BEHIND, 2)


# What waits costs nothing


class Counts(HoldsBack):
    """Counts its calls."""

    def __init__(self, context):
        super().__init__(context)
        self.calls = 0

    def key(self, request):
        self.calls += 1
        return super().key(request)

    def admit(self, request, load):
        self.calls += 1
        return super().admit(request, load)


def work_of_steps(waiting, monkeypatch):
    """Return the calls of the policy, of the queue and of the cache in four steps."""
    sim = Simulator(policy=Counts, max_num_seqs=2)
    params = SamplingParams(max_tokens=2)
    for i in range(waiting):
        request = EngineCoreRequest(request_id=str(i), prompt_token_ids=[1], params=params)
        sim.tokens[str(i)] = []
        sim.scheduler.add_request(request)
    touched = []
    for name in ("heap_of", "_is_current", "push", "remove", "restore"):
        method = getattr(WaitingQueue, name)
        monkeypatch.setattr(
            WaitingQueue, name, lambda *args, f=method: touched.append(1) or f(*args)
        )
    lookups, calls = sim.cache.stats().requests, sim.policy.calls
    for _ in range(4):
        sim.step()
    monkeypatch.undo()
    return sim.policy.calls - calls, len(touched), sim.cache.stats().requests - lookups


def test_a_hundred_thousand_waiting_requests_add_no_work_to_a_step(monkeypatch):
    few = work_of_steps(10, monkeypatch)
    assert few[0] == few[2] == 4  # two requests were admitted twice
    assert work_of_steps(100_000, monkeypatch) == few
