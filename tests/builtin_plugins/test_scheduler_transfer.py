"""Keys and values from elsewhere: what the scheduler asks, tells and waits for."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import Connector, Rig, adapter, next_token, reference

from hardpoint.plugins import FinishReason, RequestError, RequestStatus, WaitingFor

PROMPT = list(range(10))


def connected(found=None, **settings):
    connector = Connector(**(found or {}))
    return Rig(block_size=4, surroundings={"connector": connector}, **settings), connector


def fill(rig, name, num_tokens):
    request = rig.live(name)
    rig.executor.fill(request, rig.cache.block_ids(request), num_tokens)


def forget(rig, blocks):
    """Make what these blocks hold rubbish."""
    memory = rig.executor.memory
    rig.executor.memory = {slot: held for slot, held in memory.items() if slot[0] not in blocks}


def loading(found=(8, True), max_tokens=3, **settings):
    """Return a rig in which "a" waits for `found` tokens."""
    rig, connector = connected({"a": found}, **settings)
    rig.add("a", prompt=PROMPT, max_tokens=max_tokens)
    plan = rig.step()
    assert plan.num_scheduled_tokens == {}
    return rig, connector


# Loads beside the steps


def test_a_load_beside_the_steps_takes_no_budget_and_no_slot_but_blocks():
    rig, _ = connected({"a": (8, True)}, max_num_seqs=1)
    rig.add("a", prompt=PROMPT)
    rig.add("b", prompt=3)
    plan = rig.step()
    assert plan.num_scheduled_tokens == {"b": 3}
    assert plan.kv_connector_metadata["news"] == [("a", 2, 8), ("b", 1, 0)]
    assert rig.live("a").status is RequestStatus.WAITING_FOR_REMOTE_KV
    assert len(rig.cache.block_ids(rig.live("a"))[0]) == 2
    assert rig.scheduler.stats().num_running == 1


def test_it_says_that_it_waits_for_remote_kv_in_every_step():
    rig, _ = loading()
    for _ in range(3):
        reason = rig.why("a")
        assert reason.waiting_for is WaitingFor.REMOTE_KV
        assert reason.message == "the KV of 8 tokens is being loaded"
        assert rig.records[-1].waiting == {"a": reason}
        rig.step()


def test_when_the_load_is_done_the_rest_is_computed():
    rig, connector = loading()
    rig.step()
    fill(rig, "a", 8)
    rig.step(kv_loaded=frozenset("a"))
    plan = rig.plan()
    assert plan.num_scheduled_tokens == {"a": 2}
    (entry,) = plan.new_requests
    assert entry.num_computed_tokens == 8
    assert len(entry.block_ids[0]) == 3
    assert not entry.resumed
    assert rig.update(plan)["a"].num_cached_tokens == 8
    assert connector.asked == [("a", 0)]  # once it is loaded, nobody is asked again
    assert connector.allocated == [("a", 2, 8), ("a", 3, 0)]
    assert rig.run()["a"] == reference(("a", {"prompt": PROMPT, "max_tokens": 3}))["a"]


def test_nobody_finds_the_blocks_before_they_are_filled():
    rig, _ = loading()
    rig.add("b", prompt=PROMPT)
    assert rig.step().new_requests[0].num_computed_tokens == 0
    fill(rig, "a", 8)
    rig.step(kv_loaded=frozenset("a"))
    rig.add("c", prompt=PROMPT)
    assert [entry.num_computed_tokens for entry in rig.step().new_requests] == [8, 8]


def test_local_hits_come_first_then_what_lies_beyond_them():
    rig, connector = connected({"b": (4, False)})
    rig.add("a", prompt=PROMPT[:5], max_tokens=1)
    rig.step()
    rig.add("b", prompt=PROMPT)
    plan = rig.plan()
    assert connector.asked[-1] == ("b", 4)
    assert plan.new_requests[0].num_computed_tokens == 8
    assert plan.num_scheduled_tokens == {"b": 2}
    assert connector.allocated[-1] == ("b", 3, 4)


@pytest.mark.parametrize("beside", [True, False])
def test_a_full_hit_leaves_one_token(beside):
    rig, _ = connected({"a": (10, beside)})
    rig.add("a", prompt=PROMPT, max_tokens=2)
    plan = rig.plan()
    if beside:
        fill(rig, "a", 9)
        rig.update(plan, kv_loaded=frozenset("a"))
        plan = rig.plan()
    else:
        fill(rig, "a", 9)
    assert plan.new_requests[0].num_computed_tokens == 9
    assert plan.num_scheduled_tokens == {"a": 1}
    rig.update(plan)
    assert rig.tokens["a"] == [next_token(PROMPT)]


def test_who_wants_logprobs_of_the_prompt_loads_nothing():
    rig, connector = connected({"a": (8, True)})
    rig.add("a", prompt=PROMPT, params={"prompt_logprobs": 1})
    assert rig.step().num_scheduled_tokens == {"a": 10}
    assert connector.asked == []


def test_nothing_to_load_beside_the_steps_is_no_load():
    rig, connector = connected({"a": (0, True)})
    rig.add("a", prompt=PROMPT)
    assert rig.step().num_scheduled_tokens == {"a": 10}
    assert connector.allocated == [("a", 3, 0)]


def test_a_connector_that_does_not_know_yet_is_asked_again():
    rig, connector = connected({"a": (None, True)})
    rig.add("a", prompt=PROMPT)
    rig.add("b", prompt=3)
    assert list(rig.step().num_scheduled_tokens) == ["b"]
    assert rig.why("a").waiting_for is WaitingFor.REMOTE_KV
    assert rig.why("a").message == "the KV connector does not know yet what it can load"
    connector.found["a"] = (0, False)
    assert rig.step().num_scheduled_tokens == {"b": 1, "a": 10}


def test_no_blocks_for_a_load_stops_admission():
    rig, connector = connected({"a": (8, True)}, blocks=4)
    rig.add("z", prompt=9, arrival_time=0.0)
    rig.add("a", prompt=PROMPT)
    rig.add("b", prompt=1)
    assert list(rig.step().num_scheduled_tokens) == ["z"]
    assert rig.why("a").waiting_for is WaitingFor.BLOCKS
    assert connector.allocated == [("z", 3, 0)]


def test_a_preempted_request_that_is_loaded_comes_back_as_resumed():
    rig, connector = connected()
    rig.add("a", prompt=PROMPT, max_tokens=5)
    rig.step()
    rig.step()
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    connector.found["a"] = (8, True)
    rig.step()
    fill(rig, "a", 8)
    rig.step(kv_loaded=frozenset("a"))
    plan = rig.step()
    (entry,) = plan.new_requests
    assert entry.resumed
    assert list(entry.output_token_ids) == rig.tokens["a"][:2]
    assert rig.records[-1].resumed == ["a"]
    assert rig.run()["a"] == reference(("a", {"prompt": PROMPT, "max_tokens": 5}))["a"]


# Metadata


def test_each_plan_carries_what_the_connector_made_of_it():
    rig, _ = connected()
    rig.add("a")
    plans = [rig.step() for _ in range(2)]
    assert [plan.kv_connector_metadata["step"] for plan in plans] == [1, 2]
    assert [len(plan.kv_connector_metadata["news"]) for plan in plans] == [1, 0]


def test_without_a_connector_there_is_no_metadata():
    rig = Rig()
    rig.add("a")
    assert rig.plan().kv_connector_metadata is None


# Failed loads


def test_a_failed_load_in_the_step_is_recomputed():
    rig, connector = connected({"a": (8, False)})
    rig.add("a", prompt=PROMPT, max_tokens=3)
    plan = rig.plan()
    table = rig.cache.block_ids(rig.live("a"))[0]
    fill(rig, "a", 8)
    outputs = rig.update(plan, invalid_block_ids=frozenset({table[1]}))
    assert outputs == {}  # what was sampled is void
    assert rig.live("a").status is RequestStatus.PREEMPTED
    plan = rig.plan()
    assert plan.new_requests[0].num_computed_tokens == 4  # the first block is good
    assert plan.num_scheduled_tokens == {"a": 6}
    assert len(connector.asked) == 1
    rig.update(plan)
    assert rig.run()["a"] == reference(("a", {"prompt": PROMPT, "max_tokens": 3}))["a"]


def test_a_failed_load_beside_the_steps_keeps_what_is_good():
    rig, connector = loading()
    table = rig.cache.block_ids(rig.live("a"))[0]
    fill(rig, "a", 4)
    rig.step(invalid_block_ids=frozenset({table[1]}))
    assert rig.live("a").status is RequestStatus.WAITING_FOR_REMOTE_KV
    assert len(rig.cache.block_ids(rig.live("a"))[0]) == 2  # it may still be written to
    rig.step(kv_loaded=frozenset("a"))
    assert rig.step().new_requests[0].num_computed_tokens == 4
    assert len(connector.asked) == 1
    assert rig.run()["a"] == reference(("a", {"prompt": PROMPT, "max_tokens": 3}))["a"]


def test_failure_and_end_of_a_load_may_come_together():
    rig, _ = loading()
    table = rig.cache.block_ids(rig.live("a"))[0]
    rig.step(invalid_block_ids=frozenset(table), kv_loaded=frozenset("a"))
    assert rig.step().num_scheduled_tokens == {"a": 10}


def test_others_that_found_a_block_which_failed_are_recomputed_too():
    rig, _ = connected({"a": (8, False)})
    rig.add("a", prompt=PROMPT, max_tokens=3)
    rig.add("b", prompt=[*PROMPT, 99], max_tokens=3)
    rig.add("c", prompt=3, max_tokens=3)
    plan = rig.plan()
    assert plan.new_requests[1].num_computed_tokens == 8
    table = rig.cache.block_ids(rig.live("a"))[0]
    fill(rig, "a", 8)
    outputs = rig.update(plan, invalid_block_ids=frozenset({table[0]}))
    assert list(outputs) == ["c"]
    forget(rig, table[:1])
    plan = rig.step()
    assert plan.preempted_request_ids == {"a", "b"}
    assert [entry.num_computed_tokens for entry in plan.new_requests] == [0, 8]
    wanted = reference(("b", {"prompt": [*PROMPT, 99], "max_tokens": 3}))
    assert rig.run()["b"] == wanted["b"]


def test_what_was_computed_upon_a_failed_load_is_found_by_nobody():
    prompt = list(range(13))
    rig, _ = connected({"a": (8, False)})
    rig.add("a", prompt=prompt, max_tokens=3)
    plan = rig.plan()
    table = rig.cache.block_ids(rig.live("a"))[0]
    fill(rig, "a", 8)
    rig.update(plan, invalid_block_ids=frozenset({table[1]}))
    forget(rig, table[1:])
    rig.run()
    rig.add("b", prompt=prompt, max_tokens=3)
    assert rig.run()["b"] == rig.tokens["a"]


def test_what_an_aborted_request_computed_upon_a_failed_load_is_found_by_nobody():
    rig, _ = connected({"a": (4, False)})
    rig.add("a", prompt=PROMPT)
    plan = rig.plan()
    table = rig.cache.block_ids(rig.live("a"))[0]
    fill(rig, "a", 4)
    result = rig.executor.execute(plan)
    rig.abort("a", reason=FinishReason.ABORT)
    rig.update(plan, result, invalid_block_ids=frozenset({table[0]}))
    forget(rig, table)
    rig.add("b", prompt=PROMPT, max_tokens=1)
    assert rig.step().new_requests[0].num_computed_tokens == 0
    rig.add("c", prompt=PROMPT, max_tokens=1)
    rig.run()  # the executor checks what c reads


def test_a_loaded_request_that_waits_loses_blocks_that_turn_out_bad():
    rig, connector = loading(max_num_seqs=1)
    rig.add("z", prompt=2, arrival_time=0.0)
    fill(rig, "a", 8)
    rig.step(kv_loaded=frozenset("a"))
    table = rig.cache.block_ids(rig.live("a"))[0]
    rig.step(invalid_block_ids=frozenset({table[0]}))
    assert rig.cache.block_ids(rig.live("a")) == []
    forget(rig, table)
    rig.abort("z", reason=FinishReason.ABORT)
    assert rig.step().num_scheduled_tokens == {"a": 10}
    assert connector.asked == [("a", 0), ("z", 0)]


# Ends


def test_blocks_of_one_that_is_aborted_while_it_loads_are_kept_until_that_ends():
    rig, _ = loading()
    free = rig.cache.num_free_blocks
    outputs = rig.abort("a", reason=FinishReason.ABORT)
    assert outputs["a"].finish_reason is FinishReason.ABORT
    assert rig.cache.num_free_blocks == free
    assert rig.scheduler.num_unfinished_requests() == 0
    assert rig.scheduler.has_requests()  # steps go on until the connector is done
    rig.step()
    rig.step(kv_loaded=frozenset("a"))
    assert rig.cache.num_free_blocks == 64
    assert not rig.scheduler.has_requests()


def test_blocks_that_are_being_saved_are_kept_until_that_ends():
    rig, connector = connected()
    connector.keep.add("a")
    rig.add("a", prompt=PROMPT, max_tokens=1)
    outputs = rig.update(rig.plan())
    assert outputs["a"].kv_transfer_params == {"from": "a"}
    assert connector.ended == [("a", 3)]
    assert rig.cache.num_free_blocks == 61
    assert rig.step().finished_request_ids == {"a"}
    rig.step(kv_saved=frozenset("a"))
    assert rig.cache.num_free_blocks == 64
    assert not rig.scheduler.has_requests()


@pytest.mark.parametrize("first", ["kv_loaded", "kv_saved"])
def test_blocks_that_are_loaded_and_saved_are_kept_until_both_end(first):
    rig, connector = loading()
    connector.keep.add("a")
    rig.abort("a", reason=FinishReason.ABORT)
    second = {"kv_loaded": "kv_saved", "kv_saved": "kv_loaded"}[first]
    rig.step(**{first: frozenset("a")})
    assert rig.cache.num_free_blocks == 62
    rig.step(**{second: frozenset("a")})
    assert rig.cache.num_free_blocks == 64


def test_the_id_of_one_whose_blocks_are_kept_cannot_be_used_yet():
    rig, connector = connected()
    connector.keep.add("a")
    rig.add("a", max_tokens=1)
    rig.step()
    with pytest.raises(RequestError, match="request_id: 'a' ended, but its KV blocks are still"):
        rig.add("a")
    rig.step(kv_saved=frozenset("a"))
    connector.keep.clear()
    rig.ends.clear()
    rig.add("a", max_tokens=1)
    assert len(rig.run()["a"]) == 1


def test_a_request_that_never_ran_ends_without_blocks():
    rig, connector = connected()
    rig.add("a")
    rig.abort("a", reason=FinishReason.ABORT)
    assert connector.ended == [("a", 0)]


def test_after_a_reset_for_new_weights_nothing_loaded_is_used():
    rig, connector = loading()
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    rig.step(kv_loaded=frozenset("a"))
    assert rig.step().num_scheduled_tokens == {"a": 10}

    rig, connector = loading()
    rig.step(kv_loaded=frozenset("a"))
    connector.found.clear()
    rig.scheduler.reset_prefix_cache(recompute_running=True)
    plan = rig.plan()
    assert plan.num_scheduled_tokens == {"a": 10}
    assert rig.update(plan)["a"].num_cached_tokens == 0


def test_loaded_requests_are_admitted_within_the_limits():
    rig, _ = loading(max_loras=1)
    rig.add("b", prompt=3, lora=adapter(1))
    fill(rig, "a", 8)
    rig.step(kv_loaded=frozenset("a"))
    assert rig.step().num_scheduled_tokens == {"b": 1, "a": 2}


def test_a_loaded_request_that_is_aborted_leaves_nothing_behind():
    rig, _ = loading(max_num_seqs=1)
    rig.add("z", prompt=2, max_tokens=3, arrival_time=0.0)
    rig.step(kv_loaded=frozenset("a"))
    rig.abort("a", reason=FinishReason.ABORT)
    rig.run()
