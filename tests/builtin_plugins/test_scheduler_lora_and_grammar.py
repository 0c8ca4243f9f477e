"""Adapters, which nothing limits, and grammars that are not ready."""

from __future__ import annotations

from support.builtins.scheduler_harness import Grammars, Simulator, adapter, admitted

from hardpoint.plugins import FinishReason, RequestStatus, WaitingFor

# LoRA


def test_no_limit_on_adapters():
    sim = Simulator()
    for i in range(9):
        sim.add(str(i), lora=adapter(i + 1))
    assert len(admitted(sim.step())) == 9


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
