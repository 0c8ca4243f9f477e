"""Waiting requests: who is looked at, who is set aside, who is admitted, and with what."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import (
    Grammars,
    HoldsBack,
    Priority,
    Rig,
    adapter,
    admitted,
    feature,
    next_token,
)

from hardpoint.plugins import (
    EngineCoreEventType,
    FinishReason,
    RequestStatus,
    WaitingFor,
)

# The walk


def test_admission_stops_when_as_many_run_as_may():
    rig = Rig(max_num_seqs=2)
    for name in "abc":
        rig.add(name)
    assert admitted(rig.step()) == ["a", "b"]
    assert rig.scheduler.stats().num_running == 2
    reason = rig.why("c")
    assert reason.waiting_for is WaitingFor.SLOT
    assert reason.message == "2 requests are running, the most that may at once"
    assert (reason.needed, reason.available) == (1, 0)
    assert rig.records[-1].admission_stopped == reason


def test_admission_stops_when_the_budget_is_gone():
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", prompt=8)
    rig.add("b")
    assert admitted(rig.step()) == ["a"]
    assert rig.why("b").waiting_for is WaitingFor.BUDGET


def test_the_head_stays_where_it_is_when_admission_stops():
    rig = Rig(blocks=5, block_size=4)
    rig.add("a", prompt=11)
    rig.step()
    rig.add("b", prompt=12)
    rig.add("c", prompt=1)
    assert admitted(rig.step()) == []
    reason = rig.why("b")
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.BLOCKS, 3, 2)
    assert reason.message == "it needs up to 3 KV blocks, 2 are free"
    assert rig.why("c").waiting_for is WaitingFor.BEHIND
    assert (rig.why("c").ahead, rig.why("c").message) == (1, "1 requests are ahead of it")
    assert rig.live("a").status is RequestStatus.RUNNING  # nobody is preempted for one who waits
    rig.abort("a", reason=FinishReason.ABORT)
    assert admitted(rig.step()) == ["b", "c"]


def test_priority_decides_the_order():
    rig = Rig(policy=Priority)
    rig.add("a", priority=2)
    rig.add("b", priority=-1)
    rig.add("c", priority=2, arrival_time=0.0)
    assert admitted(rig.step()) == ["b", "c", "a"]


def test_those_set_aside_keep_their_order_at_the_head():
    rig = Rig(policy=HoldsBack, max_num_seqs=3)
    rig.add("a")
    rig.step()
    rig.add("b", tags={"hold": "not now"})
    rig.add("c", tags={"hold": "not now"})
    rig.add("d")
    rig.add("e")
    rig.add("f")
    assert admitted(rig.step()) == ["d", "e"]  # and then it stopped early
    assert rig.records[-1].admission_stopped.waiting_for is WaitingFor.SLOT
    assert rig.why("f").ahead == 2
    rig.abort("a", "d", "e", reason=FinishReason.ABORT)
    rig.live("b").tags.clear()
    rig.live("c").tags.clear()
    assert admitted(rig.step()) == ["b", "c", "f"]


def test_the_policys_words_are_the_reason():
    rig = Rig(policy=HoldsBack)
    rig.add("a")
    rig.add("b", tags={"hold": "after six"})
    assert admitted(rig.step()) == ["a"]
    assert rig.why("b").waiting_for is WaitingFor.POLICY
    assert rig.why("b").message == "the scheduling policy holds it back: after six"
    assert rig.records[-1].waiting == {"b": rig.why("b")}


def test_a_policy_never_keeps_the_engine_idle():
    rig = Rig(policy=HoldsBack)
    rig.add("a", tags={"hold": "never"})
    rig.add("b", tags={"hold": "never"})
    assert admitted(rig.step()) == ["a"]
    (fault,) = rig.faults
    assert fault.startswith("admit() held back every waiting request while nothing ran, the first")
    assert "'a' (the scheduling policy holds it back: never)" in fault
    assert admitted(rig.step()) == []


def test_one_in_the_queue_with_a_strange_status_is_an_error_that_names_it():
    rig = Rig()
    rig.add("a")
    rig.live("a").status = RequestStatus.RUNNING
    with pytest.raises(RuntimeError, match="'a' is in the queue with status RUNNING"):
        rig.plan()


# Cached tokens and sizing


def test_cached_tokens_are_not_computed_again():
    rig = Rig(block_size=4)
    prompt = list(range(10))
    rig.add("a", prompt=prompt, max_tokens=1)
    rig.step()
    rig.add("b", prompt=[*prompt, 99])
    plan = rig.plan()
    assert plan.num_scheduled_tokens == {"b": 3}
    assert plan.new_requests[0].num_computed_tokens == 8
    assert len(plan.new_requests[0].block_ids[0]) == 3  # cached ones included
    assert rig.update(plan)["b"].num_cached_tokens == 8
    assert rig.step().num_scheduled_tokens == {"b": 1}


def test_a_full_hit_leaves_one_token_to_compute():
    rig = Rig(block_size=4)
    rig.add("a", prompt=[5] * 8, max_tokens=1)
    rig.step()
    rig.add("b", prompt=[5] * 8)
    plan = rig.step()
    assert plan.num_scheduled_tokens == {"b": 4}
    assert rig.tokens["b"] == [next_token([5] * 8)]


def test_a_resumed_request_computes_its_outputs_too():
    rig = Rig(caching=False)
    rig.add("a", prompt=6)
    for _ in range(4):
        rig.step()
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    assert rig.step().num_scheduled_tokens == {"a": 10}


def test_cached_tokens_are_counted_at_the_first_admission_only():
    rig = Rig(block_size=4)
    rig.add("a", prompt=6)
    assert rig.live("a").num_cached_tokens == -1
    outputs = rig.update(rig.plan())
    assert outputs["a"].num_cached_tokens == 0
    for _ in range(4):
        rig.step()
    rig.scheduler.plan_lost(rig.plan())
    plan = rig.plan()
    assert plan.new_requests[0].num_computed_tokens == 8
    assert rig.live("a").num_cached_tokens == 0
    assert rig.update(plan)["a"].num_cached_tokens is None


def test_without_chunks_one_that_is_too_large_for_the_rest_is_set_aside_whole():
    rig = Rig(chunked_prefill=False, max_model_len=20, max_num_batched_tokens=20)
    rig.add("a", prompt=12)
    rig.add("b", prompt=10)
    rig.add("c", prompt=8)
    assert rig.step().num_scheduled_tokens == {"a": 12, "c": 8}
    reason = rig.why("b")
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.BUDGET, 10, 8)
    assert reason.message == "it needs 10 tokens, the step has 8 left"
    assert rig.step().num_scheduled_tokens == {"a": 1, "c": 1, "b": 10}


@pytest.mark.parametrize(("max_overtaken", "gets_in"), [(4, True), (1000, False)])
def test_without_chunks_a_long_prompt_is_passed_so_often_only(max_overtaken, gets_in):
    rig = Rig(
        chunked_prefill=False,
        max_model_len=20,
        max_num_batched_tokens=20,
        blocks=200,
        options={"max_overtaken": max_overtaken},
    )
    rig.add("z", prompt=2, max_tokens=3)
    rig.add("long", prompt=19, max_tokens=1)
    for i in range(20):
        rig.add(f"s{i}", prompt=2, max_tokens=3)
        rig.step()
    assert ("long" in rig.ends) is gets_in


def test_encoder_shortage_stops_admission():
    rig = Rig(encoder_tokens=4)
    rig.add("a", prompt=5, features=[feature("x", 0, 4)])
    rig.add("b", prompt=5, features=[feature("y", 0, 4)])
    rig.add("c", prompt=1)
    assert admitted(rig.step()) == ["a"]
    assert rig.why("b").waiting_for is WaitingFor.ENCODER
    assert rig.why("c").waiting_for is WaitingFor.BEHIND
    assert admitted(rig.step()) == ["b", "c"]


def test_lookahead_only_for_those_that_have_something_computed():
    rig = Rig(block_size=4, num_lookahead_tokens=4)
    rig.add("a", prompt=[1] * 8, max_tokens=1)
    assert len(rig.step().new_requests[0].block_ids[0]) == 2
    rig.add("b", prompt=[1] * 8)
    assert len(rig.step().new_requests[0].block_ids[0]) == 3
    rig.step()
    assert len(rig.cache.block_ids(rig.live("b"))[0]) == 4  # 9 tokens and 4 more


def test_a_share_of_the_blocks_stays_free_beside_others():
    rig = Rig(blocks=10, block_size=4, surroundings={"watermark": 0.25})
    rig.add("a", prompt=16)
    rig.add("b", prompt=13)
    assert admitted(rig.step()) == ["a"]
    reason = rig.why("b")
    assert (
        reason.message
        == "it needs up to 4 KV blocks, 6 are free, of which 3 are kept for running requests"
    )
    assert reason.available == 3
    rig.abort("a", reason=FinishReason.ABORT)
    assert admitted(rig.step()) == ["b"]


def test_alone_a_request_may_take_what_is_kept_for_others():
    rig = Rig(blocks=4, block_size=4, surroundings={"watermark": 0.5})
    rig.add("a", prompt=15)
    assert admitted(rig.step()) == ["a"]


# State on admission


def test_admission_makes_it_run_at_the_end_of_the_list():
    rig = Rig()
    rig.add("a")
    rig.step()
    rig.add("b", arrival_time=0.0)
    rig.step()
    assert rig.live("b").status is RequestStatus.RUNNING
    assert rig.step().cached_requests.request_ids == ["a", "b"]
    assert rig.why("b") is None


def test_new_requests_travel_in_full_once():
    rig = Rig()
    rig.add("a", prompt=[1, 2, 3], tags={"tenant": "x"})
    (entry,) = rig.step().new_requests
    assert entry.source.prompt_token_ids == [1, 2, 3]
    assert entry.source.tags == {"tenant": "x"}
    assert not entry.resumed
    assert list(entry.output_token_ids) == []
    assert rig.step().new_requests == []


def test_events_tell_of_admission_only_with_statistics():
    for wanted in (False, True):
        rig = Rig(surroundings={"log_stats": wanted})
        rig.add("a")
        types = [event.type for event in rig.update(rig.plan())["a"].events]
        queued, scheduled = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED
        assert types == ([queued, scheduled] if wanted else [])


def test_admission_updates_budget_adapters_and_places_as_for_running_ones():
    rig = Rig(max_num_batched_tokens=10, max_loras=1, surroundings={"grammars": Grammars()})
    rig.add("a", prompt=3, lora=adapter(1))
    rig.add("b", prompt=3, lora=adapter(2))
    rig.add("g1", prompt=3)
    plan = rig.step()
    assert plan.num_scheduled_tokens == {"a": 3, "g1": 3}
    assert plan.structured_request_ids == {"g1": 1}
    assert plan.total_num_scheduled_tokens == 6
