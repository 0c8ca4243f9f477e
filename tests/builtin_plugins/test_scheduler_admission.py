"""Waiting requests: order, deferral and admission."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import (
    Grammars,
    HoldsBack,
    Priority,
    Simulator,
    adapter,
    admitted,
    feature,
    next_token,
)
from support.plugins.policies import build

from hardpoint.builtin_plugins.policies import Fair
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.plugins import (
    EngineCoreEventType,
    FinishReason,
    RequestStatus,
    WaitingFor,
)
from hardpoint.testing.scheduling.groups import GroupRequest, GroupSimulator

# The walk


def test_admission_stops_when_as_many_run_as_may():
    sim = Simulator(max_num_seqs=2)
    for name in "abc":
        sim.add(name)
    assert admitted(sim.step()) == ["a", "b"]
    assert sim.scheduler.stats().num_running == 2
    reason = sim.why("c")
    assert reason.waiting_for is WaitingFor.SLOT
    assert reason.message == "2 requests are running, the maximum (max_num_seqs)"
    assert (reason.needed, reason.available) == (1, 0)
    assert sim.records[-1].admission_stopped == reason


def test_admission_stops_when_the_budget_is_gone():
    sim = Simulator(max_num_batched_tokens=8)
    sim.add("a", prompt=8)
    sim.add("b")
    assert admitted(sim.step()) == ["a"]
    assert sim.why("b").waiting_for is WaitingFor.BUDGET


def test_the_head_stays_where_it_is_when_admission_stops():
    sim = Simulator(blocks=5, block_size=4)
    sim.add("a", prompt=11)
    sim.step()
    sim.add("b", prompt=12)
    sim.add("c", prompt=1)
    assert admitted(sim.step()) == []
    reason = sim.why("b")
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.BLOCKS, 3, 2)
    assert reason.message == "it needs up to 3 KV blocks, 2 are free"
    assert sim.why("c").waiting_for is WaitingFor.BEHIND
    assert (sim.why("c").ahead, sim.why("c").message) == (1, "1 request is ahead of it")
    assert sim.live("a").status is RequestStatus.RUNNING  # no preemption for a waiting request
    sim.abort("a", reason=FinishReason.ABORT)
    assert admitted(sim.step()) == ["b", "c"]


def test_priority_decides_the_order():
    sim = Simulator(policy=Priority)
    sim.add("a", priority=2)
    sim.add("b", priority=-1)
    sim.add("c", priority=2, arrival_time=0.0)
    assert admitted(sim.step()) == ["b", "c", "a"]


def test_those_set_aside_keep_their_order_at_the_head():
    sim = Simulator(policy=HoldsBack, max_num_seqs=3)
    sim.add("a")
    sim.step()
    sim.add("b", tags={"hold": "not now"})
    sim.add("c", tags={"hold": "not now"})
    sim.add("d")
    sim.add("e")
    sim.add("f")
    assert admitted(sim.step()) == ["d", "e"]  # and then it stopped early
    assert sim.records[-1].admission_stopped.waiting_for is WaitingFor.SLOT
    assert sim.why("f").ahead == 2
    sim.abort("a", "d", "e", reason=FinishReason.ABORT)
    sim.live("b").tags.clear()
    sim.live("c").tags.clear()
    assert admitted(sim.step()) == ["b", "c", "f"]


def test_the_policys_message_is_the_reason():
    sim = Simulator(policy=HoldsBack)
    sim.add("a")
    sim.add("b", tags={"hold": "after six"})
    assert admitted(sim.step()) == ["a"]
    assert sim.why("b").waiting_for is WaitingFor.POLICY
    assert sim.why("b").message == "the scheduling policy holds it back: after six"
    assert sim.records[-1].waiting == {"b": sim.why("b")}


def test_a_policy_never_keeps_the_engine_idle():
    sim = Simulator(policy=HoldsBack)
    sim.add("a", tags={"hold": "never"})
    sim.add("b", tags={"hold": "never"})
    assert admitted(sim.step()) == ["a"]
    (fault,) = sim.faults
    assert fault.startswith("admit() held back every waiting request while nothing ran, the first")
    assert "'a' (the scheduling policy holds it back: never)" in fault
    assert admitted(sim.step()) == []


def test_one_in_the_queue_with_a_strange_status_is_an_error_that_names_it():
    sim = Simulator()
    sim.add("a")
    sim.live("a").status = RequestStatus.RUNNING
    with pytest.raises(RuntimeError, match="'a' is in the queue with status RUNNING"):
        sim.plan()


# Cached tokens and sizing


def test_cached_tokens_are_not_computed_again():
    sim = Simulator(block_size=4)
    prompt = list(range(10))
    sim.add("a", prompt=prompt, max_tokens=1)
    sim.step()
    sim.add("b", prompt=[*prompt, 99])
    plan = sim.plan()
    assert plan.num_scheduled_tokens == {"b": 3}
    assert plan.new_requests[0].num_computed_tokens == 8
    assert len(plan.new_requests[0].block_ids[0]) == 3  # cached ones included
    assert sim.update(plan)["b"].num_cached_tokens == 8
    assert sim.step().num_scheduled_tokens == {"b": 1}


def test_a_full_hit_leaves_one_token_to_compute():
    sim = Simulator(block_size=4)
    sim.add("a", prompt=[5] * 8, max_tokens=1)
    sim.step()
    sim.add("b", prompt=[5] * 8)
    plan = sim.step()
    assert plan.num_scheduled_tokens == {"b": 4}
    assert sim.tokens["b"] == [next_token([5] * 8)]


def test_a_resumed_request_computes_its_outputs_too():
    sim = Simulator(caching=False)
    sim.add("a", prompt=6)
    for _ in range(4):
        sim.step()
    sim.scheduler.reset_prefix_cache(recompute_running=True)
    assert sim.step().num_scheduled_tokens == {"a": 10}


def test_cached_tokens_are_counted_at_the_first_admission_only():
    sim = Simulator(block_size=4)
    sim.add("a", prompt=6)
    assert sim.live("a").num_cached_tokens == -1
    outputs = sim.update(sim.plan())
    assert outputs["a"].num_cached_tokens == 0
    for _ in range(4):
        sim.step()
    sim.lose(sim.plan())
    plan = sim.plan()
    assert plan.new_requests[0].num_computed_tokens == 8
    assert sim.live("a").num_cached_tokens == 0
    assert sim.update(plan)["a"].num_cached_tokens is None


def test_without_chunks_one_that_is_too_large_for_the_rest_is_set_aside_whole():
    sim = Simulator(chunked_prefill=False, max_model_len=20, max_num_batched_tokens=20)
    sim.add("a", prompt=12)
    sim.add("b", prompt=10)
    sim.add("c", prompt=8)
    assert sim.step().num_scheduled_tokens == {"a": 12, "c": 8}
    reason = sim.why("b")
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.BUDGET, 10, 8)
    assert reason.message == "it needs 10 tokens, the step has 8 left"
    assert sim.step().num_scheduled_tokens == {"a": 1, "c": 1, "b": 10}


@pytest.mark.parametrize(("max_overtaken", "gets_in"), [(4, True), (1000, False)])
def test_without_chunks_a_long_prompt_is_passed_so_often_only(max_overtaken, gets_in):
    sim = Simulator(
        chunked_prefill=False,
        max_model_len=20,
        max_num_batched_tokens=20,
        blocks=200,
        options={"max_overtaken": max_overtaken},
    )
    sim.add("z", prompt=2, max_tokens=3)
    sim.add("long", prompt=19, max_tokens=1)
    for i in range(20):
        sim.add(f"s{i}", prompt=2, max_tokens=3)
        sim.step()
    assert ("long" in sim.ends) is gets_in


def test_encoder_shortage_stops_admission():
    sim = Simulator(encoder_tokens=4)
    sim.add("a", prompt=5, features=[feature("x", 0, 4)])
    sim.add("b", prompt=5, features=[feature("y", 0, 4)])
    sim.add("c", prompt=1)
    assert admitted(sim.step()) == ["a"]
    assert sim.why("b").waiting_for is WaitingFor.ENCODER
    assert sim.why("c").waiting_for is WaitingFor.BEHIND
    assert admitted(sim.step()) == ["b", "c"]


def test_lookahead_only_for_those_that_have_something_computed():
    sim = Simulator(block_size=4, num_lookahead_tokens=4)
    sim.add("a", prompt=[1] * 8, max_tokens=1)
    assert len(sim.step().new_requests[0].block_ids[0]) == 2
    sim.add("b", prompt=[1] * 8)
    assert len(sim.step().new_requests[0].block_ids[0]) == 3
    sim.step()
    assert len(sim.cache.block_ids(sim.live("b"))[0]) == 4  # 9 tokens and 4 more


def test_a_share_of_the_blocks_stays_free_for_running_requests():
    sim = Simulator(blocks=10, block_size=4, context={"watermark": 0.25})
    sim.add("a", prompt=16)
    sim.add("b", prompt=13)
    assert admitted(sim.step()) == ["a"]
    reason = sim.why("b")
    assert (
        reason.message
        == "it needs up to 4 KV blocks, 6 are free, 3 of them reserved for running requests"
    )
    assert reason.available == 3
    sim.abort("a", reason=FinishReason.ABORT)
    assert admitted(sim.step()) == ["b"]


def test_alone_a_request_may_take_what_is_kept_for_others():
    sim = Simulator(blocks=4, block_size=4, context={"watermark": 0.5})
    sim.add("a", prompt=15)
    assert admitted(sim.step()) == ["a"]


# State on admission


def test_admission_makes_it_run_at_the_end_of_the_list():
    sim = Simulator()
    sim.add("a")
    sim.step()
    sim.add("b", arrival_time=0.0)
    sim.step()
    assert sim.live("b").status is RequestStatus.RUNNING
    assert sim.step().cached_requests.request_ids == ["a", "b"]
    assert sim.why("b") is None


def test_new_requests_travel_in_full_once():
    sim = Simulator()
    sim.add("a", prompt=[1, 2, 3], tags={"tenant": "x"})
    (entry,) = sim.step().new_requests
    assert entry.source.prompt_token_ids == [1, 2, 3]
    assert entry.source.tags == {"tenant": "x"}
    assert not entry.resumed
    assert list(entry.output_token_ids) == []
    assert sim.step().new_requests == []


def test_events_report_admission_only_with_statistics():
    for wanted in (False, True):
        sim = Simulator(context={"log_stats": wanted})
        sim.add("a")
        types = [event.type for event in sim.update(sim.plan())["a"].events]
        queued, scheduled = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED
        assert types == ([queued, scheduled] if wanted else [])


def test_admission_updates_budget_and_places_as_for_running_ones():
    sim = Simulator(max_num_batched_tokens=10, policy=HoldsBack, context={"gates": Grammars()})
    sim.add("a", prompt=3, lora=adapter(1))
    sim.add("b", prompt=3, tags={"hold": "no"})
    sim.add("g1", prompt=3)
    plan = sim.step()
    assert plan.num_scheduled_tokens == {"a": 3, "g1": 3}
    assert plan.total_num_scheduled_tokens == 6


# Groups


@pytest.mark.parametrize(
    ("windows", "blocks", "lookahead"), [((None,), 8, 0), ((None,), 8, 2), ((None, 5), 17, 0)]
)
def test_a_group_gets_no_prefix_that_its_first_blocks_evict(windows, blocks, lookahead):
    sim = GroupSimulator(
        DefaultScheduler,
        blocks=blocks,
        block_size=4,
        windows=windows,
        max_num_batched_tokens=32,
        num_lookahead_tokens=lookahead,
    )
    cached, fills = GroupRequest(9, (), 1, texts=(0,)), GroupRequest(24, (), 1, texts=(1,))
    for request in (cached, fills, GroupRequest(3, (8, 9), 3, texts=(2, 0, 0))):
        sim.add(request)
        sim.run()
    (plan,) = (plan for plan in sim.plans if len(plan.new_requests) == 3)
    assert plan.num_scheduled_tokens == {"r2": 3, "r2/m/0": 4, "r2/m/1": 1}


@pytest.mark.parametrize(
    ("before", "blocks"),
    [((), 8), ((GroupRequest(9, (), 1, texts=(0,)),), 9)],
    ids=["no room for new blocks", "no room beside its prefix"],
)
def test_a_group_that_waits_for_blocks_counts_no_lookups(before, blocks):
    sim = GroupSimulator(DefaultScheduler, blocks=blocks, block_size=4, max_num_batched_tokens=32)
    for request in before:
        sim.add(request)
        sim.run()
    lookups = sim.scheduler.stats().prefix_cache.requests
    sim.add(GroupRequest(14, (), 12, texts=(3,)))
    sim.add(GroupRequest(9, (9,), 2, texts=(1, 0)))
    sim.run()
    waits = [record.waiting for record in sim.records if record.waiting]
    assert {wait.waiting_for for reasons in waits for wait in reasons.values()} == {
        WaitingFor.BLOCKS
    }
    assert len(waits) > 8
    assert sim.scheduler.stats().prefix_cache.requests - lookups == 3


class Charging(Fair):
    """Records calls of `scheduled`, and the charges of the last request that ended."""

    def __init__(self, context):
        super().__init__(context)
        self.calls, self.charges = [], 0.0

    def scheduled(self, request, tokens):
        self.calls.append((request.num_computed_tokens, tokens))
        super().scheduled(request, tokens)

    def finished(self, request):
        self.charges = self.group_key(self.group(request), 0.0)
        super().finished(request)


@pytest.mark.parametrize("budget", [256, 64])
@pytest.mark.parametrize(
    ("prompt", "members"), [(110, ()), (10, (100,)), (100, (10,)), (1, (49, 60))]
)
def test_fair_charges_groups_with_as_many_tokens_alike(prompt, members, budget):
    policy = build(Charging)
    settings = {"blocks": 200, "max_num_batched_tokens": budget, "policy": policy}
    sim = GroupSimulator(DefaultScheduler, **settings)
    sim.add(GroupRequest(prompt, members, 5))
    sim.run()
    assert policy.charges == 110 + 5 * 2
    policy.calls.clear()
    sim.plans.clear()
    sim.add(GroupRequest(prompt, members, 5, texts=tuple(range(1 + len(members)))))
    sim.run()  # with cached prefixes
    assert len(policy.calls) == sum(bool(plan.num_scheduled_tokens) for plan in sim.plans)
    starts, tokens = zip(*policy.calls, strict=True)
    assert starts[0] == (prompt - 1) // 4 * 4
    assert starts == tuple(starts[0] + sum(tokens[:step]) for step in range(len(tokens)))
