"""Adapters and grammars: slots that are few, and grammars that are not ready."""

from __future__ import annotations

from support.builtins.scheduler_harness import Connector, Grammars, Rig, adapter, admitted

from hardpoint.plugins import FinishReason, RequestStatus, WaitingFor

# LoRA


def test_no_more_adapters_than_slots():
    rig = Rig(max_loras=2)
    for i, name in enumerate("abcd"):
        rig.add(name, lora=adapter(i + 1))
    rig.add("e", lora=adapter(2))
    rig.add("f")
    assert admitted(rig.step()) == ["a", "b", "e", "f"]
    reason = rig.why("c")
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.LORA_SLOT, 1, 0)
    assert (
        reason.message == "its adapter 'lora3' is not active, and 2 are, the most that may at once"
    )
    rig.abort("a", reason=FinishReason.ABORT)
    assert admitted(rig.step()) == ["c"]
    assert rig.why("d").waiting_for is WaitingFor.LORA_SLOT


def test_no_limit_on_adapters_by_default():
    rig = Rig()
    for i in range(9):
        rig.add(str(i), lora=adapter(i + 1))
    assert len(admitted(rig.step())) == 9


def test_running_requests_count_also_where_they_are_not_scheduled():
    rig = Rig(max_loras=1, asynchronous=True)
    rig.add("a", lora=adapter(1), max_tokens=1)
    rig.plan()
    rig.add("b", lora=adapter(2))
    assert rig.plan().num_scheduled_tokens == {}  # a waits for results, but is on the worker
    assert rig.why("b").waiting_for is WaitingFor.LORA_SLOT


def test_a_preempted_request_gives_its_slot_back():
    rig = Rig(blocks=2, block_size=4, max_loras=1)
    rig.add("a", prompt=3)
    rig.add("b", prompt=3, lora=adapter(1))
    rig.step()
    rig.step()
    assert rig.step().preempted_request_ids == {"b"}
    rig.add("c", prompt=1, lora=adapter(2), arrival_time=0.0)
    rig.abort("a", reason=FinishReason.ABORT)
    assert admitted(rig.step()) == ["c"]
    assert rig.why("b").waiting_for is WaitingFor.LORA_SLOT


def test_an_adapter_of_one_that_loads_takes_no_slot_before_it_runs():
    connector = Connector(a=(3, True))
    rig = Rig(max_loras=1, surroundings={"connector": connector})
    rig.add("a", lora=adapter(1))
    rig.add("b", lora=adapter(2))
    assert admitted(rig.step()) == ["b"]
    rig.step(kv_loaded=frozenset("a"))
    assert rig.plan().num_scheduled_tokens == {"b": 1}
    assert rig.why("a").waiting_for is WaitingFor.LORA_SLOT


# Grammars


def test_a_grammar_that_is_being_compiled_lets_others_go_first():
    grammars = Grammars(compiling={"g1"})
    rig = Rig(surroundings={"grammars": grammars})
    rig.add("g1")
    rig.add("a")
    assert rig.live("a").status is RequestStatus.WAITING
    assert admitted(rig.step()) == ["a"]
    assert rig.live("g1").status is RequestStatus.WAITING_FOR_GRAMMAR
    assert rig.why("g1").message == "its grammar is being compiled"
    assert rig.records[-1].waiting["g1"].waiting_for is WaitingFor.GRAMMAR
    rig.add("b")
    grammars.compiling.clear()
    assert admitted(rig.step()) == ["g1", "b"]  # in the same step, and before b


def test_a_grammar_that_is_wrong_ends_its_request_with_the_words():
    rig = Rig(surroundings={"grammars": Grammars(wrong={"g1"})})
    rig.add("g1")
    rig.add("a")
    plan = rig.plan()
    assert plan.finished_request_ids == {"g1"}
    outputs = rig.update(plan)
    assert outputs["g1"].finish_reason is FinishReason.ERROR
    assert outputs["g1"].error == "grammar of g1: unexpected ']'"
