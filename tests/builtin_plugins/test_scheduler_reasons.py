"""Why a request waits, and the record of what a step decided."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import Connector, Grammars, Rig, adapter, feature

from hardpoint.builtin_plugins.policies import Fair
from hardpoint.builtin_plugins.scheduling import scheduler
from hardpoint.plugins import FinishReason, RequestError, WaitingFor


def test_who_got_tokens_does_not_wait():
    rig = Rig()
    rig.add("a")
    rig.step()
    assert rig.why("a") is None


def test_who_is_not_there_has_no_reason():
    with pytest.raises(RequestError, match="request_id: 'a' is not a live request"):
        Rig().why("a")


def test_who_came_after_the_last_step_waits_for_the_next():
    rig = Rig(surroundings={"grammars": Grammars(compiling={"g"})})
    for name in ("a", "g"):
        rig.add(name)
        reason = rig.why(name)
        assert reason.waiting_for is WaitingFor.NEXT_STEP
        assert reason.message == "no step was planned since it began to wait"


def test_who_lost_its_blocks_after_a_step_that_gave_it_nothing_waits_for_the_next():
    rig = Rig(max_num_batched_tokens=4, num_draft_tokens=3)
    rig.add("a", prompt=2)
    rig.add("b", prompt=2)
    rig.step()
    rig.scheduler.update_drafts({"a": [1, 2, 3]})
    rig.step()
    rig.abort("a", reason=FinishReason.ABORT)
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    assert rig.why("b").waiting_for is WaitingFor.NEXT_STEP


def test_those_behind_are_counted():
    rig = Rig(max_num_seqs=1)
    for name in "abcd":
        rig.add(name)
    rig.step()
    assert rig.why("b").waiting_for is WaitingFor.SLOT
    assert [rig.why(name).ahead for name in "cd"] == [1, 2]


def test_the_head_of_another_group_is_told_what_stopped_the_step():
    rig = Rig(max_num_seqs=1, policy=Fair)
    rig.add("a", tags={"tenant": "x"})
    rig.step()
    rig.add("b", tags={"tenant": "x"})
    rig.add("c", tags={"tenant": "y"})
    rig.step()
    assert [rig.why(name).waiting_for for name in "bc"] == [WaitingFor.SLOT] * 2


def test_a_victim_is_told_for_whom():
    rig = Rig(blocks=2, block_size=4)
    rig.add("a", prompt=3)
    rig.add("b", prompt=3)
    for _ in range(3):
        rig.step()
    reason = rig.why("b")
    assert reason.waiting_for is WaitingFor.BLOCKS
    assert reason.message == "it was preempted: 'a' needed KV blocks, 0 were free"
    assert rig.records[-1].preempted == {"b": "'a' needed KV blocks, 0 were free"}
    assert rig.records[-1].waiting == {"b": reason}


def test_one_that_runs_behind_a_victim_of_its_own_is_told_of_the_blocks():
    class Odd(Fair):
        def victim(self, running, load):
            return running[0]

    rig = Rig(blocks=2, block_size=4, policy=Odd)
    rig.add("a", prompt=4)
    rig.add("b", prompt=2)
    rig.step()
    assert rig.step().num_scheduled_tokens == {}
    assert rig.why("b").waiting_for is WaitingFor.BLOCKS
    assert "'a' needed KV blocks, 0 were free" in rig.why("b").message


def test_every_reason_can_be_had():
    grammars = Grammars(compiling={"g"})
    rig = Rig(
        asynchronous=True,
        max_num_batched_tokens=30,
        max_loras=1,
        encoder_tokens=4,
        surroundings={"grammars": grammars, "connector": Connector(kv=(3, True))},
    )
    rig.add("results", max_tokens=1, lora=adapter(1))
    rig.plan()
    rig.add("g")
    rig.add("kv")
    rig.add("lora", lora=adapter(2))
    rig.add("image", prompt=9, features=[feature("x", 0, 4)])
    rig.add("images", prompt=9, features=[feature("y", 0, 4)])
    rig.add("behind")
    plan = rig.plan()
    assert plan.num_scheduled_tokens == {"image": 9}
    assert {name: rig.why(name).waiting_for for name in rig.tokens if rig.why(name)} == {
        "results": WaitingFor.RESULTS,
        "g": WaitingFor.GRAMMAR,
        "kv": WaitingFor.REMOTE_KV,
        "lora": WaitingFor.LORA_SLOT,
        "images": WaitingFor.ENCODER,
        "behind": WaitingFor.BEHIND,
    }
    record = rig.records[-1]
    assert set(record.waiting) == {"results", "g", "kv", "lora", "images"}
    assert record.admission_stopped == record.waiting["images"]


def test_a_record_says_what_a_step_decided():
    rig = Rig(blocks=4, block_size=4, max_num_batched_tokens=20)
    rig.clock.advance(7)
    rig.add("a", prompt=3)
    rig.add("b", prompt=11)
    rig.step()
    record = rig.records[-1]
    assert (record.step, record.timestamp, record.token_budget) == (1, 7.0, 20)
    assert record.scheduled == {"a": 3, "b": 11}
    assert (record.new, record.resumed, record.preempted) == (["a", "b"], [], {})
    assert (record.num_running, record.num_waiting, record.num_free_blocks) == (2, 0, 0)
    rig.step()
    rig.step()
    record = rig.records[-1]
    assert list(record.preempted) == ["b"]
    assert (record.num_running, record.num_waiting) == (1, 1)
    rig.abort("a", reason=FinishReason.ABORT)
    rig.step()
    record = rig.records[-1]
    assert (record.new, record.resumed, record.finished) == ([], ["b"], ["a"])


def test_a_record_is_made_only_where_somebody_listens(monkeypatch):
    made = []
    make = scheduler.make_record
    monkeypatch.setattr(scheduler, "make_record", lambda *args: made.append(1) or make(*args))
    for listener, expected in ((None, 0), (lambda record: None, 1)):
        made.clear()
        rig = Rig(surroundings={"record": listener})
        rig.add("a")
        rig.step()
        assert len(made) == expected


def test_records_do_not_depend_on_the_order_of_sets():
    rig = Rig()
    names = [f"r{i}" for i in range(30)]
    for name in names:
        rig.add(name, max_tokens=1)
    while rig.scheduler.has_requests():
        rig.step()
    finished = [record.finished for record in rig.records if record.finished]
    assert finished == [sorted(group) for group in finished]
    assert sorted(name for group in finished for name in group) == sorted(names)
