"""Waiting requests: who is looked at, who is set aside, who is admitted, and with what."""

from __future__ import annotations

import pytest
from scheduler_harness import (
    Connector,
    FirstComeFirstServed,
    Grammars,
    Priority,
    Rig,
    adapter,
    feature,
    make_policy,
    next_token,
)

from hardpoint.plugins import (
    EngineCoreEventType,
    FinishReason,
    RequestStatus,
    WaitingFor,
)


def admitted(plan):
    return [entry.source.request_id for entry in plan.new_requests]


class HoldsBack(FirstComeFirstServed):
    """Holds back the requests whose tag "hold" says why."""

    def admit(self, request, load):
        return request.tags.get("hold")


# The walk


def test_admission_stops_when_as_many_run_as_may():
    rig = Rig(max_num_seqs=2)
    for name in "abc":
        rig.add(name)
    assert admitted(rig.step()) == ["a", "b"]
    assert rig.scheduler.stats().num_running == 2
    reason = rig.why("c")
    assert reason.waiting_for is WaitingFor.SLOT
    assert reason.message == "2 requests run, no more may"
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
    assert (rig.why("c").ahead, rig.why("c").message) == (1, "1 requests stand before it")
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


# Overtaking is bounded


def overtaken(rig):
    """Count the steps in which somebody is admitted before "b", which waits for a LoRA slot."""
    rig.add("a", lora=adapter(1), max_tokens=100)
    rig.add("b", lora=adapter(2))
    steps = 0
    for i in range(40):
        rig.add(f"c{i}", prompt=1, max_tokens=1)
        rig.add(f"d{i}", prompt=1, max_tokens=1)
        new = admitted(rig.step())
        steps += any(name[0] in "cd" for name in new)
    return steps


def test_one_that_is_set_aside_is_passed_in_so_many_steps_only():
    rig = Rig(max_loras=1, options={"max_overtaken": 3}, blocks=200)
    assert overtaken(rig) == 3
    assert rig.live("b").num_overtaken == 3
    assert rig.records[-1].admission_stopped.waiting_for is WaitingFor.LORA_SLOT
    assert rig.why("c20").waiting_for is WaitingFor.BEHIND


def test_nobody_is_passed_where_none_may():
    assert overtaken(Rig(max_loras=1, options={"max_overtaken": 0}, blocks=200)) == 0


def test_being_set_aside_without_being_passed_does_not_count():
    rig = Rig(max_loras=1, options={"max_overtaken": 3})
    rig.add("a", lora=adapter(1))
    rig.add("b", lora=adapter(2))
    for _ in range(9):
        rig.step()
    assert rig.live("b").num_overtaken == 0


def test_a_step_sets_so_many_aside_only():
    rig = Rig(max_loras=1, options={"max_set_aside": 2})
    rig.add("a", lora=adapter(1))
    for name in "bcd":
        rig.add(name, lora=adapter(2))
    rig.add("e")
    assert admitted(rig.step()) == ["a"]
    assert list(rig.records[-1].waiting) == ["b", "c"]
    assert (rig.why("d").waiting_for, rig.why("d").ahead) == (WaitingFor.BEHIND, 2)


# Grammars


def test_a_grammar_that_is_being_compiled_lets_others_go_first():
    grammars = Grammars(compiling={"g1"})
    rig = Rig(surroundings={"grammars": grammars})
    rig.add("g1")
    rig.add("a")
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
    assert reason.message == "it needs up to 4 KV blocks, 6 are free, of which 3 are kept for running requests"
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
    assert reason.message == "its adapter 'lora3' is not active, and 2 are, no more may"
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


# What waits costs nothing


def test_a_hundred_thousand_waiting_requests_add_no_work_to_a_step():
    class Counts(HoldsBack):
        calls = 0

        def key(self, request):
            Counts.calls += 1
            return super().key(request)

        def admit(self, request, load):
            Counts.calls += 1
            return super().admit(request, load)

    work = []
    for waiting in (10, 100_000):
        rig = Rig(policy=make_policy(Counts), max_num_seqs=2, blocks=500)
        for i in range(waiting):
            rig.add(str(i), prompt=[1], max_tokens=2)
        lookups, Counts.calls = rig.cache.stats().requests, 0
        queue = rig.scheduler._books.waiting
        touched = []
        heap_of, alive = queue.heap_of, queue._alive
        queue.heap_of = lambda group, f=heap_of: touched.append(1) or f(group)
        queue._alive = lambda entry, f=alive: touched.append(1) or f(entry)
        for _ in range(4):
            rig.step()
        work.append((Counts.calls, len(touched), rig.cache.stats().requests - lookups))
    assert work[0] == work[1]
    assert work[0][0] == 4  # two requests were admitted twice
