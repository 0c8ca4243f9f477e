"""Adapters and grammars: slots that are few, and grammars that are not ready."""

from __future__ import annotations

from support.builtins.scheduler_harness import Connector, Grammars, Simulator, adapter, admitted

from hardpoint.plugins import FinishReason, RequestStatus, WaitingFor

# LoRA


def test_no_more_adapters_than_slots():
    sim = Simulator(max_loras=2)
    for i, name in enumerate("abcd"):
        sim.add(name, lora=adapter(i + 1))
    sim.add("e", lora=adapter(2))
    sim.add("f")
    assert admitted(sim.step()) == ["a", "b", "e", "f"]
    reason = sim.why("c")
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.LORA_SLOT, 1, 0)
    assert (
        reason.message
        == "its adapter 'lora3' is not active, and all adapter slots (2) are taken by others"
    )
    sim.abort("a", reason=FinishReason.ABORT)
    assert admitted(sim.step()) == ["c"]
    assert sim.why("d").waiting_for is WaitingFor.LORA_SLOT


def test_no_limit_on_adapters_by_default():
    sim = Simulator()
    for i in range(9):
        sim.add(str(i), lora=adapter(i + 1))
    assert len(admitted(sim.step())) == 9


def test_running_requests_count_also_where_they_are_not_scheduled():
    sim = Simulator(max_loras=1, asynchronous=True)
    sim.add("a", lora=adapter(1), max_tokens=1)
    sim.plan()
    sim.add("b", lora=adapter(2))
    assert sim.plan().num_scheduled_tokens == {}  # a waits for results, but is on the worker
    assert sim.why("b").waiting_for is WaitingFor.LORA_SLOT


def test_a_preempted_request_gives_its_slot_back():
    sim = Simulator(blocks=2, block_size=4, max_loras=1)
    sim.add("a", prompt=3)
    sim.add("b", prompt=3, lora=adapter(1))
    sim.step()
    sim.step()
    assert sim.step().preempted_request_ids == {"b"}
    sim.add("c", prompt=1, lora=adapter(2), arrival_time=0.0)
    sim.abort("a", reason=FinishReason.ABORT)
    assert admitted(sim.step()) == ["c"]
    assert sim.why("b").waiting_for is WaitingFor.LORA_SLOT


def test_an_adapter_of_one_that_loads_takes_no_slot_before_it_runs():
    connector = Connector(a=(3, True))
    sim = Simulator(max_loras=1, context={"connector": connector})
    sim.add("a", lora=adapter(1))
    sim.add("b", lora=adapter(2))
    assert admitted(sim.step()) == ["b"]
    sim.step(kv_loaded=frozenset("a"))
    assert sim.plan().num_scheduled_tokens == {"b": 1}
    assert sim.why("a").waiting_for is WaitingFor.LORA_SLOT


# Grammars


def test_a_grammar_that_is_being_compiled_lets_others_go_first():
    grammars = Grammars(compiling={"g1"})
    sim = Simulator(context={"gates": grammars})
    sim.add("g1")
    sim.add("a")
    assert sim.live("a").status is RequestStatus.WAITING
    assert admitted(sim.step()) == ["a"]
    assert sim.live("g1").status is RequestStatus.WAITING
    assert sim.why("g1").message == "its grammar is being compiled"
    assert sim.records[-1].waiting["g1"].waiting_for is WaitingFor.GRAMMAR
    sim.add("b")
    stats = sim.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (1, 2, 1)
    grammars.compiling.clear()
    assert admitted(sim.step()) == ["g1", "b"]  # in the same step, and before b
    assert sim.scheduler.stats().num_deferred == 0


def test_a_grammar_that_is_wrong_ends_its_request_with_its_message():
    sim = Simulator(context={"gates": Grammars(wrong={"g1"})})
    sim.add("g1")
    sim.add("a")
    plan = sim.plan()
    assert plan.finished_request_ids == {"g1"}
    outputs = sim.update(plan)
    assert outputs["g1"].finish_reason is FinishReason.ERROR
    assert outputs["g1"].error == "grammar of g1: unexpected ']'"
