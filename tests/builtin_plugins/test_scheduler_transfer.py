"""Keys and values from elsewhere: lookups, reports and waits of the scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from support.builtins.scheduler_harness import Connector, Simulator, next_token, reference

from hardpoint.plugins import FinishReason, RequestError, RequestStatus, WaitingFor

PROMPT = list(range(10))


def connected(matches=None, **settings):
    connector = Connector(**(matches or {}))
    return Simulator(block_size=4, context={"transfers": connector}, **settings), connector


def fill(sim, name, num_tokens):
    request = sim.live(name)
    sim.executor.fill(request, sim.cache.block_ids(request), num_tokens)


def forget(sim, blocks):
    """Overwrite the contents of these blocks."""
    sim.executor.memory.forget(blocks)


def loading(match=(8, True), max_tokens=3, **settings):
    """Return a sim in which "a" waits for `found` tokens."""
    sim, connector = connected({"a": match}, **settings)
    sim.add("a", prompt=PROMPT, max_tokens=max_tokens)
    plan = sim.step()
    assert plan.num_scheduled_tokens == {}
    return sim, connector


# Loads between steps


def test_a_load_between_steps_takes_no_budget_and_no_slot_but_blocks():
    sim, connector = connected({"a": (8, True)}, max_num_seqs=1)
    sim.add("a", prompt=PROMPT)
    sim.add("b", prompt=3)
    plan = sim.step()
    assert plan.num_scheduled_tokens == {"b": 3}
    assert connector.allocated == [("a", 2, 8), ("b", 1, 0)]
    assert sim.why("a").waiting_for is WaitingFor.REMOTE_KV
    assert len(sim.cache.block_ids(sim.live("a"))[0]) == 2
    assert sim.scheduler.stats().num_running == 1


def test_it_reports_that_it_waits_for_remote_kv_in_every_step():
    sim, _ = loading()
    for _ in range(3):
        reason = sim.why("a")
        assert reason.waiting_for is WaitingFor.REMOTE_KV
        assert reason.message == "the KV of 8 tokens is being loaded"
        assert sim.records[-1].waiting == {"a": reason}
        sim.step()


def test_when_the_load_is_done_the_rest_is_computed():
    sim, connector = loading()
    sim.step()
    fill(sim, "a", 8)
    sim.step(kv_loaded=frozenset("a"))
    plan = sim.plan()
    assert plan.num_scheduled_tokens == {"a": 2}
    (entry,) = plan.new_requests
    assert entry.num_computed_tokens == 8
    assert len(entry.block_ids[0]) == 3
    assert not entry.resumed
    assert sim.update(plan)["a"].num_cached_tokens == 8
    assert connector.asked == [("a", 0)]  # once it is loaded, the connector is not asked again
    assert connector.allocated == [("a", 2, 8), ("a", 3, 0)]
    assert sim.run()["a"] == reference(("a", {"prompt": PROMPT, "max_tokens": 3}))["a"]


def test_no_request_finds_the_blocks_before_they_are_filled():
    sim, _ = loading()
    sim.add("b", prompt=PROMPT)
    assert sim.step().new_requests[0].num_computed_tokens == 0
    fill(sim, "a", 8)
    sim.step(kv_loaded=frozenset("a"))
    sim.add("c", prompt=PROMPT)
    assert [entry.num_computed_tokens for entry in sim.step().new_requests] == [8, 8]


def test_local_hits_come_first_then_what_lies_beyond_them():
    sim, connector = connected({"b": (4, False)})
    sim.add("a", prompt=PROMPT[:5], max_tokens=1)
    sim.step()
    sim.add("b", prompt=PROMPT)
    plan = sim.plan()
    assert connector.asked[-1] == ("b", 4)
    assert plan.new_requests[0].num_computed_tokens == 8
    assert plan.num_scheduled_tokens == {"b": 2}
    assert connector.allocated[-1] == ("b", 3, 4)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_hit_leaves_one_token(asynchronous):
    sim, _ = connected({"a": (10, asynchronous)})
    sim.add("a", prompt=PROMPT, max_tokens=2)
    plan = sim.plan()
    if asynchronous:
        fill(sim, "a", 9)
        sim.update(plan, kv_loaded=frozenset("a"))
        plan = sim.plan()
    else:
        fill(sim, "a", 9)
    assert plan.new_requests[0].num_computed_tokens == 9
    assert plan.num_scheduled_tokens == {"a": 1}
    sim.update(plan)
    assert sim.tokens["a"] == [next_token(PROMPT)]


def test_a_request_that_wants_logprobs_of_the_prompt_loads_nothing():
    sim, connector = connected({"a": (8, True)})
    sim.add("a", prompt=PROMPT, params={"prompt_logprobs": 1})
    assert sim.step().num_scheduled_tokens == {"a": 10}
    assert connector.asked == []


def test_nothing_to_load_between_steps_is_no_load():
    sim, connector = connected({"a": (0, True)})
    sim.add("a", prompt=PROMPT)
    assert sim.step().num_scheduled_tokens == {"a": 10}
    assert connector.allocated == [("a", 3, 0)]


def test_a_connector_that_does_not_know_yet_is_asked_again():
    sim, connector = connected({"a": (None, True)})
    sim.add("a", prompt=PROMPT)
    sim.add("b", prompt=3)
    assert list(sim.step().num_scheduled_tokens) == ["b"]
    assert sim.why("a").waiting_for is WaitingFor.REMOTE_KV
    assert sim.why("a").message == "the KV connector has not answered the lookup yet"
    connector.found["a"] = (0, False)
    assert sim.step().num_scheduled_tokens == {"b": 1, "a": 10}


def test_no_blocks_for_a_load_stops_admission():
    sim, connector = connected({"a": (8, True)}, blocks=4)
    sim.add("z", prompt=9, arrival_time=0.0)
    sim.add("a", prompt=PROMPT)
    sim.add("b", prompt=1)
    assert list(sim.step().num_scheduled_tokens) == ["z"]
    assert sim.why("a").waiting_for is WaitingFor.BLOCKS
    assert connector.allocated == [("z", 3, 0)]


def test_a_preempted_request_that_is_loaded_comes_back_as_resumed():
    sim, connector = connected()
    sim.add("a", prompt=PROMPT, max_tokens=5)
    sim.step()
    sim.step()
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    connector.found["a"] = (8, True)
    sim.step()
    fill(sim, "a", 8)
    sim.step(kv_loaded=frozenset("a"))
    plan = sim.step()
    (entry,) = plan.new_requests
    assert entry.resumed
    assert list(entry.output_token_ids) == sim.tokens["a"][:2]
    assert sim.records[-1].resumed == ["a"]
    assert sim.run()["a"] == reference(("a", {"prompt": PROMPT, "max_tokens": 5}))["a"]


def test_positions_of_a_result_count_what_was_cached():
    """Also where blocks may be loaded."""
    sim, _ = connected()
    sim.add("a", prompt=PROMPT, max_tokens=1)
    sim.step()
    sim.add("b", prompt=PROMPT, max_tokens=1)
    plan = sim.plan()
    assert plan.new_requests[0].num_computed_tokens == 8
    rows = np.full((2, 1, 1), 5, np.int32)
    routed = sim.update(plan, routed_experts={"b": rows})["b"].routed_experts
    assert routed.flatten().tolist() == [-1] * 8 + [5] * 2


# Failed loads


def test_a_failed_load_in_the_step_is_recomputed():
    sim, connector = connected({"a": (8, False)})
    sim.add("a", prompt=PROMPT, max_tokens=3)
    plan = sim.plan()
    table = sim.cache.block_ids(sim.live("a"))[0]
    fill(sim, "a", 8)
    outputs = sim.update(plan, invalid_block_ids=frozenset({table[1]}))
    assert outputs == {}  # what was sampled is void
    assert sim.live("a").status is RequestStatus.PREEMPTED
    plan = sim.plan()
    assert plan.new_requests[0].num_computed_tokens == 4  # the first block is good
    assert plan.num_scheduled_tokens == {"a": 6}
    assert len(connector.asked) == 1
    sim.update(plan)
    assert sim.run()["a"] == reference(("a", {"prompt": PROMPT, "max_tokens": 3}))["a"]


def test_a_failed_load_between_steps_keeps_what_is_good():
    sim, connector = loading()
    table = sim.cache.block_ids(sim.live("a"))[0]
    fill(sim, "a", 4)
    sim.step(invalid_block_ids=frozenset({table[1]}))
    assert sim.why("a").waiting_for is WaitingFor.REMOTE_KV
    assert len(sim.cache.block_ids(sim.live("a"))[0]) == 2  # it may still be written to
    sim.step(kv_loaded=frozenset("a"))
    assert sim.step().new_requests[0].num_computed_tokens == 4
    assert len(connector.asked) == 1
    assert sim.run()["a"] == reference(("a", {"prompt": PROMPT, "max_tokens": 3}))["a"]


def test_failure_and_end_of_a_load_may_come_together():
    sim, _ = loading()
    table = sim.cache.block_ids(sim.live("a"))[0]
    sim.step(invalid_block_ids=frozenset(table), kv_loaded=frozenset("a"))
    assert sim.step().num_scheduled_tokens == {"a": 10}


def test_others_that_found_a_block_which_failed_are_recomputed_too():
    sim, _ = connected({"a": (8, False)})
    sim.add("a", prompt=PROMPT, max_tokens=3)
    sim.add("b", prompt=[*PROMPT, 99], max_tokens=3)
    sim.add("c", prompt=3, max_tokens=3)
    plan = sim.plan()
    assert plan.new_requests[1].num_computed_tokens == 8
    table = sim.cache.block_ids(sim.live("a"))[0]
    fill(sim, "a", 8)
    outputs = sim.update(plan, invalid_block_ids=frozenset({table[0]}))
    assert list(outputs) == ["c"]
    forget(sim, table[:1])
    plan = sim.step()
    assert plan.preempted_request_ids == {"a", "b"}
    assert [entry.num_computed_tokens for entry in plan.new_requests] == [0, 8]
    wanted = reference(("b", {"prompt": [*PROMPT, 99], "max_tokens": 3}))
    assert sim.run()["b"] == wanted["b"]


def test_what_was_computed_upon_a_failed_load_is_not_found():
    prompt = list(range(13))
    sim, _ = connected({"a": (8, False)})
    sim.add("a", prompt=prompt, max_tokens=3)
    plan = sim.plan()
    table = sim.cache.block_ids(sim.live("a"))[0]
    fill(sim, "a", 8)
    sim.update(plan, invalid_block_ids=frozenset({table[1]}))
    forget(sim, table[1:])
    sim.run()
    sim.add("b", prompt=prompt, max_tokens=3)
    assert sim.run()["b"] == sim.tokens["a"]


def test_what_an_aborted_request_computed_upon_a_failed_load_is_not_found():
    sim, _ = connected({"a": (4, False)})
    sim.add("a", prompt=PROMPT)
    plan = sim.plan()
    table = sim.cache.block_ids(sim.live("a"))[0]
    fill(sim, "a", 4)
    result = sim.executor.execute(plan)
    sim.abort("a", reason=FinishReason.ABORT)
    sim.update(plan, result, invalid_block_ids=frozenset({table[0]}))
    forget(sim, table)
    sim.add("b", prompt=PROMPT, max_tokens=1)
    assert sim.step().new_requests[0].num_computed_tokens == 0
    sim.add("c", prompt=PROMPT, max_tokens=1)
    sim.run()  # the executor checks what c reads


def test_a_loaded_request_that_waits_loses_blocks_that_turn_out_bad():
    sim, connector = loading(max_num_seqs=1)
    sim.add("z", prompt=2, arrival_time=0.0)
    fill(sim, "a", 8)
    sim.step(kv_loaded=frozenset("a"))
    table = sim.cache.block_ids(sim.live("a"))[0]
    sim.step(invalid_block_ids=frozenset({table[0]}))
    assert sim.cache.block_ids(sim.live("a")) == []
    forget(sim, table)
    sim.abort("z", reason=FinishReason.ABORT)
    assert sim.step().num_scheduled_tokens == {"a": 10}
    assert connector.asked == [("a", 0), ("z", 0)]


# Ends


def test_blocks_of_one_that_is_aborted_while_it_loads_are_kept_until_that_ends():
    sim, _ = loading()
    free = sim.cache.num_free_blocks
    outputs = sim.abort("a", reason=FinishReason.ABORT)
    assert outputs["a"].finish_reason is FinishReason.ABORT
    assert sim.cache.num_free_blocks == free
    assert sim.scheduler.num_unfinished_requests() == 0
    assert sim.scheduler.has_requests()  # steps go on until the connector is done
    sim.step()
    sim.step(kv_loaded=frozenset("a"))
    assert sim.cache.num_free_blocks == 64
    assert not sim.scheduler.has_requests()


def test_blocks_that_are_being_saved_are_kept_until_that_ends():
    sim, connector = connected()
    connector.keep.add("a")
    sim.add("a", prompt=PROMPT, max_tokens=1)
    outputs = sim.update(sim.plan())
    assert outputs["a"].kv_transfer_params == {"from": "a"}
    assert connector.ended == [("a", 3)]
    assert sim.cache.num_free_blocks == 61
    assert sim.step().finished_request_ids == {"a"}
    sim.step(kv_saved=frozenset("a"))
    assert sim.cache.num_free_blocks == 64
    assert not sim.scheduler.has_requests()


@pytest.mark.parametrize("first", ["kv_loaded", "kv_saved"])
def test_blocks_that_are_loaded_and_saved_are_kept_until_both_end(first):
    sim, connector = loading()
    connector.keep.add("a")
    sim.abort("a", reason=FinishReason.ABORT)
    second = {"kv_loaded": "kv_saved", "kv_saved": "kv_loaded"}[first]
    sim.step(**{first: frozenset("a")})
    assert sim.cache.num_free_blocks == 62
    sim.step(**{second: frozenset("a")})
    assert sim.cache.num_free_blocks == 64


def test_the_id_of_one_whose_blocks_are_kept_cannot_be_used_yet():
    sim, connector = connected()
    connector.keep.add("a")
    sim.add("a", max_tokens=1)
    sim.step()
    with pytest.raises(RequestError, match="request_id: 'a' ended, but its KV blocks are still"):
        sim.add("a")
    sim.step(kv_saved=frozenset("a"))
    connector.keep.clear()
    sim.ends.clear()
    sim.add("a", max_tokens=1)
    assert len(sim.run()["a"]) == 1


def test_a_request_that_never_ran_ends_without_blocks():
    sim, connector = connected()
    sim.add("a")
    sim.abort("a", reason=FinishReason.ABORT)
    assert connector.ended == [("a", 0)]


def test_after_a_reset_for_new_weights_nothing_loaded_is_used():
    sim, connector = loading()
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    sim.step(kv_loaded=frozenset("a"))
    assert sim.step().num_scheduled_tokens == {"a": 10}

    sim, connector = loading()
    sim.step(kv_loaded=frozenset("a"))
    connector.found.clear()
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    plan = sim.plan()
    assert plan.num_scheduled_tokens == {"a": 10}
    assert sim.update(plan)["a"].num_cached_tokens == 0


def test_loaded_requests_are_admitted_within_the_limits():
    sim, _ = loading(max_num_seqs=2)
    sim.add("b", prompt=3)
    fill(sim, "a", 8)
    sim.step(kv_loaded=frozenset("a"))
    assert sim.step().num_scheduled_tokens == {"b": 1, "a": 2}


def test_a_loaded_request_that_is_aborted_leaves_nothing_behind():
    sim, _ = loading(max_num_seqs=1)
    sim.add("z", prompt=2, max_tokens=3, arrival_time=0.0)
    sim.step(kv_loaded=frozenset("a"))
    sim.abort("a", reason=FinishReason.ABORT)
    sim.run()
