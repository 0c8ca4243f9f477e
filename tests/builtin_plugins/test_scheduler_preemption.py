"""Preemption when blocks run out: the victim, its released blocks, and errors."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import (
    Connector,
    FirstComeFirstServed,
    HoldsBack,
    Priority,
    Simulator,
    feature,
    make_policy,
    reference,
)

from hardpoint.plugins import (
    EngineCoreEventType,
    FinishReason,
    RequestStatus,
    SchedulingPolicy,
    WaitingFor,
)


class PreemptsTheFirst(FirstComeFirstServed):
    """Chooses the request that stands first in the running list."""

    def victim(self, running, load):
        return running[0]


def crowd(policy=FirstComeFirstServed, names="abc", **settings):
    """Return a sim with requests that fill the pool to the last token of their only blocks."""
    sim = Simulator(blocks=len(names), block_size=4, policy=policy, **settings)
    for name in names:
        sim.add(name, prompt=3)
    sim.step()
    sim.step()
    assert sim.cache.num_free_blocks == 0
    return sim


def test_fcfs_preempts_the_latest_admitted_until_there_is_room():
    sim = crowd()
    plan = sim.step()
    assert plan.num_scheduled_tokens == {"a": 1}
    assert plan.preempted_request_ids == {"b", "c"}
    victim = sim.live("c")
    assert victim.status is RequestStatus.PREEMPTED
    assert victim.num_computed_tokens == 0
    assert victim.num_preemptions == 1
    assert sim.cache.block_ids(victim) == []
    assert sim.scheduler.stats().num_preemptions == 2


def test_several_victims_come_back_at_the_head_in_their_order():
    sim = crowd(names="abcd")
    sim.add("z", prompt=3)
    assert sim.step().preempted_request_ids == {"c", "d"}
    assert list(sim.records[-1].preempted) == ["d", "c"]
    sim.abort("a", "b", reason=FinishReason.ABORT)
    assert [entry.source.request_id for entry in sim.step().new_requests] == ["c", "d"]
    assert sim.why("z").waiting_for is WaitingFor.BLOCKS


def test_of_equal_keys_a_preempted_request_goes_first():
    class Careless(HoldsBack):
        def key(self, request):
            return 0

    sim = Simulator(blocks=4, block_size=4, policy=Careless)
    sim.add("a", prompt=3)
    sim.add("b", prompt=3, tags={"hold": "no"})
    sim.add("c", prompt=11)
    sim.step()
    assert sim.why("b").waiting_for is WaitingFor.POLICY
    sim.step()
    assert sim.step().preempted_request_ids == {"c"}
    assert sim.why("b").ahead == 1


def test_priority_preempts_the_largest_number_and_of_equals_the_latest_arrival():
    sim = Simulator(blocks=3, block_size=4, policy=Priority)
    sim.add("a", prompt=3, priority=1, arrival_time=5.0)
    sim.add("b", prompt=3, priority=1, arrival_time=6.0)
    sim.add("c", prompt=3, priority=0, arrival_time=9.0)
    sim.step()
    sim.step()
    plan = sim.step()
    assert plan.preempted_request_ids == {"a", "b"}
    assert plan.num_scheduled_tokens == {"c": 1}
    assert list(sim.records[-1].preempted) == ["b", "a"]


def test_a_victim_that_was_scheduled_in_this_step_is_taken_back_completely():
    sim = Simulator(
        blocks=4,
        block_size=4,
        policy=PreemptsTheFirst,
        num_draft_tokens=3,
        max_num_batched_tokens=7,
    )
    sim.add("a", prompt=2)
    sim.add("b", prompt=4)
    sim.add("c", prompt=12)
    assert sim.step().num_scheduled_tokens == {"a": 2, "b": 4, "c": 1}
    sim.scheduler.update_drafts({"a": [5, 6, 7]})
    plan = sim.step()  # a gets 4 tokens and the last block, then b needs one
    assert plan.preempted_request_ids == {"a"}
    assert plan.num_scheduled_tokens == {"b": 1, "c": 6}
    assert plan.total_num_scheduled_tokens == 7
    assert plan.draft_token_ids == {}
    assert plan.cached_requests.request_ids == ["b", "c"]
    assert sorted(plan.cached_requests.new_block_ids) == ["b", "c"]
    assert sim.live("a").draft_token_ids == []


def test_a_policy_is_not_charged_tokens_that_were_taken_back():
    class Counts(PreemptsTheFirst):
        def __init__(self, context):
            super().__init__(context)
            self.reported = []

        def scheduled(self, request, tokens):
            self.reported.append((request.request_id, tokens))

    sim = Simulator(blocks=2, block_size=4, policy=Counts)
    sim.add("a", prompt=2)
    sim.add("b", prompt=4)
    sim.step()
    sim.policy.reported.clear()
    assert sim.step().preempted_request_ids == {"a"}
    assert sim.policy.reported == [("b", 1)]


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_to_be_encoded_for_a_victim_is_taken_back(shared):
    sim = Simulator(
        blocks=5 if shared else 4,
        block_size=4,
        policy=PreemptsTheFirst,
        encoder_tokens=4,
        long_prefill_token_threshold=4,
    )
    image = feature("x", 8, 4)
    sim.add("a", prompt=12, features=[image])
    if shared:
        sim.add("b", prompt=12, features=[image])
    else:
        sim.add("b", prompt=3)
    sim.step()
    sim.step()
    plan = sim.plan()
    assert plan.preempted_request_ids == {"a"}
    assert plan.encoder_inputs == ({"b": [0]} if shared else {})
    assert sim.context_fields["encoder_cache"].num_free_tokens == (0 if shared else 4)
    sim.update(plan)
    sim.abort("b", reason=FinishReason.ABORT)
    encoded = [sim.step().encoder_inputs for _ in range(3)]
    assert encoded == ([{}] * 3 if shared else [{"a": [0]}, {}, {}])


def test_a_request_after_a_victim_is_not_skipped():
    sim = Simulator(blocks=4, block_size=4, policy=PreemptsTheFirst)
    sim.add("a", prompt=2)
    sim.add("b", prompt=3)
    sim.add("c", prompt=2)
    sim.add("d", prompt=2)
    sim.step()
    sim.step()
    plan = sim.step()
    assert plan.preempted_request_ids == {"a"}
    assert list(plan.num_scheduled_tokens) == ["b", "c", "d"]


def test_a_request_that_preempts_itself_ends_the_pass():
    sim = Simulator(blocks=3, block_size=4, policy=Priority)
    sim.add("a", prompt=3, priority=5)
    sim.step()
    sim.add("b", prompt=2, priority=0)
    sim.add("c", prompt=2, priority=0)
    sim.step()
    plan = sim.step()
    assert plan.preempted_request_ids == {"a"}
    assert plan.num_scheduled_tokens == {}
    reason = sim.why("b")
    assert reason.waiting_for is WaitingFor.BLOCKS
    assert "'a' needed KV blocks, 0 were free" in reason.message
    assert list(sim.step().num_scheduled_tokens) == ["b", "c"]


def test_no_request_is_admitted_in_a_step_that_preempts():
    sim = Simulator(blocks=4, block_size=4)
    sim.add("a", prompt=3)
    sim.add("b", prompt=11)
    sim.step()
    sim.step()
    sim.add("c", prompt=1)
    plan = sim.step()
    assert plan.preempted_request_ids == {"b"}
    assert plan.new_requests == []
    assert sim.cache.num_free_blocks > 0
    assert sim.records[-1].admission_stopped.waiting_for is WaitingFor.BLOCKS
    assert sim.why("c").ahead == 1


def test_a_request_that_is_first_in_the_queue_of_such_a_step_is_given_the_reason():
    sim = Simulator(blocks=4, block_size=4, policy=Priority)
    sim.add("a", prompt=3, priority=1)
    sim.add("b", prompt=11, priority=2)
    sim.step()
    sim.step()
    sim.add("c", prompt=1, priority=0)
    sim.step()
    assert sim.why("c").waiting_for is WaitingFor.BLOCKS
    assert sim.why("c").message == (
        "no request is admitted while running requests lack KV blocks: "
        "'a' needed KV blocks, 0 were free"
    )


def test_events_report_a_preemption_only_with_statistics():
    for wanted in (False, True):
        sim = crowd(names="ab", context={"log_stats": wanted})
        sim.step()
        types = [event.type for event in sim.live("b").events]
        assert types == ([EngineCoreEventType.PREEMPTED] if wanted else [])


def test_a_victim_drops_drafts_and_embeddings():
    sim = Simulator(blocks=3, block_size=4, encoder_tokens=4, num_draft_tokens=2)
    sim.add("a", prompt=3)
    sim.add("b", prompt=7, features=[feature("x", 5, 2)])
    sim.step()
    sim.step()
    sim.scheduler.update_drafts({"b": [1]})
    sim.step()
    sim.step()
    victim = sim.live("b")
    assert victim.num_preemptions == 1
    assert victim.draft_token_ids == []
    assert victim.num_output_placeholders == 0
    assert sim.context_fields["encoder_cache"].num_free_tokens == 4


def test_a_resumed_request_comes_in_full_with_its_outputs():
    sim = crowd(names="ab")
    sim.step()
    outputs = list(sim.tokens["b"])
    sim.abort("a", reason=FinishReason.ABORT)
    (entry,) = sim.step().new_requests
    assert entry.source.request_id == "b"
    assert entry.resumed
    assert list(entry.output_token_ids) == outputs
    assert len(entry.block_ids[0]) == 2
    assert sim.records[-1].resumed == ["b"]
    assert sim.records[-1].new == []


def test_preemption_changes_no_token():
    adds = [(name, {"prompt": [i] * (3 + i), "max_tokens": 12}) for i, name in enumerate("abcd")]
    for settings in ({}, {"caching": False}, {"policy": Priority}, {"policy": PreemptsTheFirst}):
        sim = Simulator(blocks=6, block_size=4, **settings)
        for i, (name, fields) in enumerate(adds):
            sim.add(name, priority=-i, **fields)
        assert sim.run() == reference(*adds)
        assert sim.scheduler.stats().num_preemptions > 0
        assert sim.cache.num_free_blocks == 6


# Too large for the whole cache


def test_a_request_that_outgrows_the_whole_pool_ends_with_the_numbers():
    sim = Simulator(blocks=2, block_size=4)
    sim.add("a", prompt=6, max_tokens=50)
    tokens = sim.run()["a"]
    assert len(tokens) == 3
    assert tokens == reference(("a", {"prompt": 6, "max_tokens": 3}))["a"]
    assert sim.ends["a"].finish_reason is FinishReason.ERROR
    assert sim.ends["a"].error == (
        "the KV cache is too small: 9 tokens need 3 blocks of 4 tokens, the cache has 2"
    )
    assert sim.records[-1].waiting == {}


def test_the_others_run_on_when_one_outgrows_the_pool():
    sim = Simulator(blocks=3, block_size=4)
    sim.add("a", prompt=6, max_tokens=50)
    sim.add("b", prompt=3, max_tokens=6)
    sim.run()
    assert sim.ends["a"].finish_reason is FinishReason.ERROR
    assert sim.ends["b"].finish_reason is FinishReason.LENGTH
    assert (
        sim.tokens["b"]
        == reference(("x", {}), ("b", {"prompt": [2000, 2001, 2002], "max_tokens": 6}))["b"]
    )


@pytest.mark.parametrize("caching", [True, False])
def test_lookahead_that_no_longer_fits_is_an_error_and_no_endless_loop(caching):
    sim = Simulator(blocks=4, block_size=4, num_lookahead_tokens=4, caching=caching)
    sim.add("a", prompt=10, max_tokens=50)
    sim.run(60)
    assert sim.ends["a"].error == (
        "the KV cache is too small: 13 tokens and 4 of lookahead need 5 blocks of 4 tokens, "
        "the cache has 4"
    )


def test_lookahead_stops_at_the_longest_length():
    sim = Simulator(blocks=4, block_size=4, num_lookahead_tokens=4, max_model_len=16)
    sim.add("a", prompt=10, max_tokens=None)
    assert len(sim.run(60)["a"]) == 6
    assert sim.ends["a"].finish_reason is FinishReason.LENGTH


def test_one_that_became_too_long_while_others_ran_does_not_wait_for_ever():
    sim = Simulator(blocks=4, block_size=4, num_lookahead_tokens=8)
    sim.add("a", prompt=3, max_tokens=6)
    sim.add("b", prompt=6, max_tokens=50)
    sim.run(100)
    assert sim.ends["a"].finish_reason is FinishReason.LENGTH
    assert sim.ends["b"].finish_reason is FinishReason.ERROR


def test_loaded_requests_that_hold_all_blocks_give_way():
    connector = Connector(b=(7, True), c=(7, True))
    sim = Simulator(blocks=5, block_size=4, context={"transfers": connector})
    sim.add("b", prompt=8, max_tokens=2, priority=1)
    sim.add("c", prompt=8, max_tokens=2)
    plan = sim.plan()
    assert plan.num_scheduled_tokens == {}
    assert sim.cache.num_free_blocks == 1
    for name in "bc":
        request = sim.live(name)
        sim.executor.fill(request, sim.cache.block_ids(request), 7)
    sim.add("a", prompt=12, max_tokens=2, arrival_time=0.0)
    sim.update(plan, kv_loaded=frozenset("bc"))
    connector.found.clear()
    sim.step()
    assert sim.cache.block_ids(sim.live("b")) != []
    assert sim.cache.block_ids(sim.live("c")) == []  # the latest to come gives way
    assert len(sim.run(30)) == 3
    assert {end.finish_reason for end in sim.ends.values()} == {FinishReason.LENGTH}


def test_a_victim_that_does_not_run_cannot_happen_to_a_guarded_policy():
    class Odd(SchedulingPolicy):
        contract = 1

        def key(self, request):
            return 0

    sim = crowd(make_policy(Odd), names="ab")
    assert sim.step().preempted_request_ids == {"b"}  # the default of the contract: the latest


def test_one_that_would_just_fit_alone_is_no_error():
    sim = Simulator(blocks=2, block_size=4, policy=Priority)
    sim.add("a", prompt=3, priority=5, max_tokens=4)
    sim.step()
    sim.add("b", prompt=2, max_tokens=2)
    sim.step()
    assert sim.step().preempted_request_ids == {"a"}
    sim.run()
    assert sim.ends["a"].finish_reason is FinishReason.LENGTH


def test_what_a_victim_shares_with_others_is_encoded_for_them():
    sim = Simulator(
        blocks=7,
        block_size=4,
        policy=PreemptsTheFirst,
        encoder_tokens=4,
        long_prefill_token_threshold=4,
    )
    for name in "ab":
        sim.add(name, prompt=12, features=[feature("x", 8, 4)])
    sim.add("c", prompt=3)
    sim.step()
    sim.step()
    plan = sim.plan()
    assert plan.preempted_request_ids == {"a"}
    assert list(plan.num_scheduled_tokens) == ["b", "c"]
    assert plan.encoder_inputs == {"b": [0]}
    assert list(plan.freed_encoder_inputs) == []
    assert sim.context_fields["encoder_cache"].num_free_tokens == 0
