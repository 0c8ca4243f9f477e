"""Wait reasons of requests, and the record of a step's decisions."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import Connector, Grammars, HoldsBack, Simulator, feature

from hardpoint.builtin_plugins.policies import Fair
from hardpoint.builtin_plugins.scheduling import scheduler
from hardpoint.plugins import FinishReason, RequestError, WaitingFor


def test_a_request_that_got_tokens_does_not_wait():
    sim = Simulator()
    sim.add("a")
    sim.step()
    assert sim.why("a") is None


def test_an_unknown_request_has_no_reason():
    with pytest.raises(RequestError, match="request_id: 'a' is not a live request"):
        Simulator().why("a")


def test_a_request_that_came_after_the_last_step_waits_for_the_next():
    sim = Simulator(context={"gates": Grammars(compiling={"g"})})
    for name in ("a", "g"):
        sim.add(name)
        reason = sim.why(name)
        assert reason.waiting_for is WaitingFor.NEXT_STEP
        assert reason.message == "no step was planned since it began to wait"


def test_a_request_that_lost_its_blocks_after_a_step_that_gave_it_nothing_waits_for_the_next():
    sim = Simulator(max_num_batched_tokens=4, num_draft_tokens=3)
    sim.add("a", prompt=2)
    sim.add("b", prompt=2)
    sim.step()
    sim.scheduler.update_drafts({"a": [1, 2, 3]})
    sim.step()
    sim.abort("a", reason=FinishReason.ABORT)
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    assert sim.why("b").waiting_for is WaitingFor.NEXT_STEP


def test_requests_ahead_are_counted():
    sim = Simulator(max_num_seqs=1)
    for name in "abcd":
        sim.add(name)
    sim.step()
    assert sim.why("b").waiting_for is WaitingFor.SLOT
    assert [sim.why(name).ahead for name in "cd"] == [1, 2]


def test_the_head_of_another_group_has_the_reason_that_stopped_the_step():
    sim = Simulator(max_num_seqs=1, policy=Fair)
    sim.add("a", tags={"tenant": "x"})
    sim.step()
    sim.add("b", tags={"tenant": "x"})
    sim.add("c", tags={"tenant": "y"})
    sim.step()
    assert [sim.why(name).waiting_for for name in "bc"] == [WaitingFor.SLOT] * 2


def test_a_victim_has_the_beneficiary_in_its_reason():
    sim = Simulator(blocks=2, block_size=4)
    sim.add("a", prompt=3)
    sim.add("b", prompt=3)
    for _ in range(3):
        sim.step()
    reason = sim.why("b")
    assert reason.waiting_for is WaitingFor.BLOCKS
    assert reason.message == "it was preempted: 'a' needed KV blocks, 0 were free"
    assert sim.records[-1].preempted == {"b": "'a' needed KV blocks, 0 were free"}
    assert sim.records[-1].waiting == {"b": reason}


def test_one_that_runs_after_a_victim_of_its_own_waits_for_blocks():
    class Odd(Fair):
        def victim(self, running, load):
            return running[0]

    sim = Simulator(blocks=2, block_size=4, policy=Odd)
    sim.add("a", prompt=4)
    sim.add("b", prompt=2)
    sim.step()
    assert sim.step().num_scheduled_tokens == {}
    assert sim.why("b").waiting_for is WaitingFor.BLOCKS
    assert "'a' needed KV blocks, 0 were free" in sim.why("b").message


def test_every_reason_can_be_had():
    grammars = Grammars(compiling={"g"})
    sim = Simulator(
        asynchronous=True,
        max_num_batched_tokens=30,
        policy=HoldsBack,
        encoder_tokens=4,
        context={"gates": grammars, "transfers": Connector(kv=(3, True))},
    )
    sim.add("results", max_tokens=1)
    sim.plan()
    sim.add("g")
    sim.add("kv")
    sim.add("held", tags={"hold": "no"})
    sim.add("image", prompt=9, features=[feature("x", 0, 4)])
    sim.add("images", prompt=9, features=[feature("y", 0, 4)])
    sim.add("behind")
    plan = sim.plan()
    assert plan.num_scheduled_tokens == {"image": 9}
    assert {name: sim.why(name).waiting_for for name in sim.tokens if sim.why(name)} == {
        "results": WaitingFor.RESULTS,
        "g": WaitingFor.GRAMMAR,
        "kv": WaitingFor.REMOTE_KV,
        "held": WaitingFor.POLICY,
        "images": WaitingFor.ENCODER,
        "behind": WaitingFor.BEHIND,
    }
    record = sim.records[-1]
    assert set(record.waiting) == {"results", "g", "kv", "held", "images"}
    assert record.admission_stopped == record.waiting["images"]


def test_a_record_has_the_decisions_of_a_step():
    sim = Simulator(blocks=4, block_size=4, max_num_batched_tokens=20)
    sim.clock.advance(7)
    sim.add("a", prompt=3)
    sim.add("b", prompt=11)
    sim.step()
    record = sim.records[-1]
    assert (record.step, record.timestamp, record.token_budget) == (1, 7.0, 20)
    assert record.scheduled == {"a": 3, "b": 11}
    assert (record.new, record.resumed, record.preempted) == (["a", "b"], [], {})
    assert (record.num_running, record.num_waiting, record.num_free_blocks) == (2, 0, 0)
    sim.step()
    sim.step()
    record = sim.records[-1]
    assert list(record.preempted) == ["b"]
    assert (record.num_running, record.num_waiting) == (1, 1)
    sim.abort("a", reason=FinishReason.ABORT)
    sim.step()
    record = sim.records[-1]
    assert (record.new, record.resumed, record.finished) == ([], ["b"], ["a"])


def test_a_record_is_made_only_where_somebody_listens(monkeypatch):
    made = []
    make = scheduler.make_record
    monkeypatch.setattr(scheduler, "make_record", lambda *args: made.append(1) or make(*args))
    for listener, expected in ((None, 0), (lambda record: None, 1)):
        made.clear()
        sim = Simulator(context={"record": listener})
        sim.add("a")
        sim.step()
        assert len(made) == expected


def test_records_do_not_depend_on_the_order_of_sets():
    sim = Simulator()
    names = [f"r{i}" for i in range(30)]
    for name in names:
        sim.add(name, max_tokens=1)
    while sim.scheduler.has_requests():
        sim.step()
    finished = [record.finished for record in sim.records if record.finished]
    assert finished == [sorted(group) for group in finished]
    assert sorted(name for group in finished for name in group) == sorted(names)
