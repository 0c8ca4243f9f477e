"""Running requests: how many tokens each gets, and its entry in the plan."""

from __future__ import annotations

from support.builtins.scheduler_harness import Grammars, Priority, Simulator, feature, next_token

from hardpoint.plugins import ModelRunnerOutput, RequestStatus, WaitingFor

# Number of tokens


def test_the_long_prefill_threshold_cuts_only_what_is_above_it():
    for threshold, first in ((10, 10), (20, 20), (21, 20), (0, 20)):
        sim = Simulator(long_prefill_token_threshold=threshold)
        sim.add("a", prompt=20)
        assert sim.step().num_scheduled_tokens == {"a": first}


def test_the_threshold_cuts_running_requests_too():
    sim = Simulator(long_prefill_token_threshold=8)
    sim.add("a", prompt=20)
    assert [sim.step().num_scheduled_tokens["a"] for _ in range(3)] == [8, 8, 4]


def test_what_is_needed_is_cut_to_the_remaining_budget():
    sim = Simulator(max_num_batched_tokens=10)
    sim.add("a", prompt=7)
    sim.add("b", prompt=30)
    plans = [sim.step() for _ in range(2)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 7, "b": 3}, {"a": 1, "b": 9}]
    assert [plan.total_num_scheduled_tokens for plan in plans] == [10, 10]


def test_a_running_request_without_budget_is_reported():
    sim = Simulator(max_num_batched_tokens=6, num_draft_tokens=5)
    sim.add("a", prompt=2)
    sim.add("b", prompt=2)
    sim.step()
    sim.scheduler.update_drafts({"a": [1, 2, 3, 4, 5]})
    assert sim.step().num_scheduled_tokens == {"a": 6}
    reason = sim.why("b")
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.BUDGET, 1, 0)
    assert sim.step().num_scheduled_tokens == {"a": 1, "b": 1}


def test_drafts_do_not_reach_beyond_the_last_position():
    sim = Simulator(max_model_len=8, num_draft_tokens=5)
    sim.add("a", prompt=4, max_tokens=None)
    sim.step()
    sim.scheduler.update_drafts({"a": [1, 2, 3, 4, 5]})
    plan = sim.step()  # position 4 is computed, 5 and 6 are drafts, 7 is only sampled
    assert plan.num_scheduled_tokens == {"a": 3}
    assert plan.draft_token_ids == {"a": [1, 2]}
    assert len(sim.run()["a"]) == 4


def test_a_request_beyond_the_cap_gets_nothing_instead_of_less_than_nothing():
    sim = Simulator(max_model_len=6, asynchronous=True)
    sim.add("a", prompt=4, max_tokens=None)
    sim.add("b", prompt=4, max_tokens=None)
    plans = [sim.plan() for _ in range(5)]
    assert [plan.num_scheduled_tokens.get("a", 0) for plan in plans] == [4, 1, 0, 0, 0]
    assert plans[-1].total_num_scheduled_tokens == 0


def test_one_that_waits_for_results_does_not_stop_those_after_it():
    sim = Simulator(asynchronous=True)
    sim.add("a", max_tokens=1)
    sim.add("b", max_tokens=9)
    sim.plan()
    assert sim.plan().num_scheduled_tokens == {"b": 1}
    reason = sim.why("a")
    assert reason.waiting_for is WaitingFor.RESULTS
    assert reason.message == "1 of its tokens is in steps without results yet"


def test_one_that_the_encoder_has_no_room_for_does_not_stop_those_after_it():
    sim = Simulator(encoder_tokens=4, max_num_batched_tokens=8)
    sim.add("a", prompt=20, features=[feature("x", 4, 4), feature("y", 8, 4)])
    sim.add("b", prompt=2)
    assert sim.step().num_scheduled_tokens == {"a": 8}
    sim.context_fields["encoder_cache"].can_allocate = lambda *_: False
    assert sim.step().num_scheduled_tokens == {"b": 2}
    reason = sim.why("a")
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.ENCODER, 4, 4)


def test_the_cache_is_called_where_a_block_begins_or_ends():
    sim = Simulator(block_size=4)
    sim.add("a", prompt=6)
    sim.step()
    called = []
    extend = sim.cache.extend
    sim.cache.extend = lambda request, *more: (
        called.append(request.num_computed_tokens) or extend(request, *more)
    )
    for _ in range(7):
        sim.step()
        request = sim.scheduler.live_request("a")
        computed = request.num_computed_tokens
        assert [len(table) for table in sim.cache.block_ids(request)] == [-(-computed // 4)]
        assert sum(map(len, sim.cache.pool.index)) == computed // 4
    assert called == [7, 8, 11, 12]


def test_the_pass_ends_when_the_budget_does():
    sim = Simulator(max_num_batched_tokens=2, block_size=1)
    sim.add("a", prompt=1)
    sim.add("b", prompt=1)
    sim.step()
    sim.add("c", prompt=1)
    request_ids = []
    extend = sim.cache.extend
    sim.cache.extend = lambda request, *more: (
        request_ids.append(request.request_id) or extend(request, *more)
    )
    assert list(sim.step().num_scheduled_tokens) == ["a", "b"]
    assert request_ids == ["a", "b"]
    assert sim.why("c").waiting_for is WaitingFor.BUDGET


# Bookkeeping


def test_a_running_request_is_given_its_new_blocks_only():
    sim = Simulator(block_size=4)
    sim.add("a", prompt=3)
    first = sim.step().new_requests[0].block_ids
    assert [len(table) for table in first] == [1]
    assert sim.step().cached_requests.new_block_ids == {}
    (new,) = sim.step().cached_requests.new_block_ids["a"]
    assert sim.cache.block_ids(sim.live("a")) == [[*first[0], *new]]


def test_a_running_request_travels_as_a_difference():
    sim = Simulator()
    sim.add("a", prompt=6)
    sim.step()
    plan = sim.step()
    assert plan.new_requests == []
    assert plan.cached_requests.request_ids == ["a"]
    assert plan.cached_requests.num_computed_tokens == [6]


def test_drafts_are_part_of_the_tokens():
    sim = Simulator(num_draft_tokens=3)
    sim.add("a")
    sim.add("b")
    sim.step()
    sim.scheduler.update_drafts({"a": [7, 8, 9], "unknown": [1]})
    plan = sim.step()
    assert plan.num_scheduled_tokens == {"a": 4, "b": 1}
    assert plan.draft_token_ids == {"a": [7, 8, 9]}


def test_what_the_budget_cuts_off_the_drafts_is_lost():
    sim = Simulator(num_draft_tokens=4, max_num_batched_tokens=4)
    sim.add("a")
    sim.step()
    sim.scheduler.update_drafts({"a": [7, 8, 9, 10]})
    assert sim.step().draft_token_ids == {"a": [7, 8, 9]}
    assert sim.step().draft_token_ids == {}


def test_a_request_whose_drafts_all_fall_to_the_budget_has_no_entry():
    sim = Simulator(num_draft_tokens=2, max_num_batched_tokens=4)
    sim.add("a", prompt=1)
    sim.add("b", prompt=1)
    sim.step()
    sim.scheduler.update_drafts({"a": [7, 8], "b": [9, 10]})
    plan = sim.step()
    assert plan.num_scheduled_tokens == {"a": 3, "b": 1}
    assert plan.draft_token_ids == {"a": [7, 8]}
    assert sim.live("b").draft_token_ids == []


def test_the_plan_is_in_order_after_one_that_stood_before_was_preempted():
    sim = Simulator(blocks=4, context={"gates": Grammars()}, policy=Priority)
    sim.add("a", prompt=5, priority=9)
    sim.step()
    sim.add("g1", prompt=3, priority=0)
    sim.add("g2", prompt=3, priority=1)
    sim.step()
    sim.step()
    plan = sim.step()  # a has its token when g1 needs a block
    assert plan.preempted_request_ids == {"a"}
    assert list(plan.num_scheduled_tokens) == ["g1", "g2"]


def test_only_what_is_scheduled_counts_as_computed_before_the_results_are_in():
    sim = Simulator(max_num_batched_tokens=6)
    sim.add("a", prompt=10)
    plan = sim.plan()
    assert sim.live("a").num_computed_tokens == 6
    sim.update(plan)
    assert sim.live("a").num_computed_tokens == 6
    assert sim.live("a").status is RequestStatus.RUNNING


def test_a_step_without_results_for_a_chunk_reports_nothing():
    sim = Simulator(max_num_batched_tokens=6)
    sim.add("a", prompt=10)
    assert sim.update(sim.plan(), ModelRunnerOutput()) == {}


def test_the_tokens_do_not_depend_on_how_they_are_cut():
    tokens = []
    for settings in (
        {},
        {"max_num_batched_tokens": 5},
        {"long_prefill_token_threshold": 3},
        {"block_size": 2, "blocks": 200},
        {"caching": False},
        {"asynchronous": True},
    ):
        sim = Simulator(**settings)
        sim.add("a", prompt=[1] * 13, max_tokens=7)
        sim.add("b", prompt=[1] * 9, max_tokens=5)
        tokens.append(sim.run(depth=int(sim.limits.asynchronous)))
    assert all(other == tokens[0] for other in tokens)
    assert tokens[0]["a"][0] == next_token([1] * 13)
