"""Running requests: how many tokens each gets, and what the plan says of it."""

from __future__ import annotations

from support.builtins.scheduler_harness import Grammars, Priority, Rig, feature, next_token

from hardpoint.plugins import ModelRunnerOutput, RequestStatus, WaitingFor

# Number of tokens


def test_the_long_prefill_threshold_cuts_only_what_is_above_it():
    for threshold, first in ((10, 10), (20, 20), (21, 20), (0, 20)):
        rig = Rig(long_prefill_token_threshold=threshold)
        rig.add("a", prompt=20)
        assert rig.step().num_scheduled_tokens == {"a": first}


def test_the_threshold_cuts_running_requests_too():
    rig = Rig(long_prefill_token_threshold=8)
    rig.add("a", prompt=20)
    assert [rig.step().num_scheduled_tokens["a"] for _ in range(3)] == [8, 8, 4]


def test_what_is_needed_is_cut_to_the_remaining_budget():
    rig = Rig(max_num_batched_tokens=10)
    rig.add("a", prompt=7)
    rig.add("b", prompt=30)
    plans = [rig.step() for _ in range(2)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 7, "b": 3}, {"a": 1, "b": 9}]
    assert [plan.total_num_scheduled_tokens for plan in plans] == [10, 10]


def test_a_running_request_without_budget_says_so():
    rig = Rig(max_num_batched_tokens=6, num_draft_tokens=5)
    rig.add("a", prompt=2)
    rig.add("b", prompt=2)
    rig.step()
    rig.scheduler.update_drafts({"a": [1, 2, 3, 4, 5]})
    assert rig.step().num_scheduled_tokens == {"a": 6}
    reason = rig.why("b")
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.BUDGET, 1, 0)
    assert rig.step().num_scheduled_tokens == {"a": 1, "b": 1}


def test_drafts_do_not_reach_beyond_the_last_position():
    rig = Rig(max_model_len=8, num_draft_tokens=5)
    rig.add("a", prompt=4, max_tokens=None)
    rig.step()
    rig.scheduler.update_drafts({"a": [1, 2, 3, 4, 5]})
    plan = rig.step()  # position 4 is computed, 5 and 6 are drafts, 7 is only sampled
    assert plan.num_scheduled_tokens == {"a": 3}
    assert plan.draft_token_ids == {"a": [1, 2]}
    assert len(rig.run()["a"]) == 4


def test_a_request_beyond_the_cap_gets_nothing_instead_of_less_than_nothing():
    rig = Rig(max_model_len=6, asynchronous=True)
    rig.add("a", prompt=4, max_tokens=None)
    rig.add("b", prompt=4, max_tokens=None)
    plans = [rig.plan() for _ in range(5)]
    assert [plan.num_scheduled_tokens.get("a", 0) for plan in plans] == [4, 1, 0, 0, 0]
    assert plans[-1].total_num_scheduled_tokens == 0


def test_one_that_waits_for_results_does_not_stop_those_behind_it():
    rig = Rig(asynchronous=True)
    rig.add("a", max_tokens=1)
    rig.add("b", max_tokens=9)
    rig.plan()
    assert rig.plan().num_scheduled_tokens == {"b": 1}
    reason = rig.why("a")
    assert reason.waiting_for is WaitingFor.RESULTS
    assert reason.message == "1 of its tokens are in steps whose results have not arrived"


def test_one_that_the_encoder_has_no_room_for_does_not_stop_those_behind_it():
    rig = Rig(encoder_tokens=4, max_num_batched_tokens=8)
    rig.add("a", prompt=20, features=[feature("x", 4, 4), feature("y", 8, 4)])
    rig.add("b", prompt=2)
    assert rig.step().num_scheduled_tokens == {"a": 8}
    rig.around["encoder_cache"].can_allocate = lambda *_: False
    assert rig.step().num_scheduled_tokens == {"b": 2}
    reason = rig.why("a")
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.ENCODER, 4, 4)


def test_the_pass_ends_when_the_budget_does():
    rig = Rig(max_num_batched_tokens=2)
    rig.add("a", prompt=1)
    rig.add("b", prompt=1)
    rig.step()
    rig.add("c", prompt=1)
    asked = []
    extend = rig.cache.extend
    rig.cache.extend = lambda request, *more: (
        asked.append(request.request_id) or extend(request, *more)
    )
    assert list(rig.step().num_scheduled_tokens) == ["a", "b"]
    assert asked == ["a", "b"]
    assert rig.why("c").waiting_for is WaitingFor.BUDGET


# Bookkeeping


def test_a_running_request_is_told_its_new_blocks_only():
    rig = Rig(block_size=4)
    rig.add("a", prompt=3)
    first = rig.step().new_requests[0].block_ids
    assert [len(table) for table in first] == [1]
    assert rig.step().cached_requests.new_block_ids == {}
    (new,) = rig.step().cached_requests.new_block_ids["a"]
    assert rig.cache.block_ids(rig.live("a")) == [[*first[0], *new]]


def test_a_running_request_travels_as_a_difference():
    rig = Rig()
    rig.add("a", prompt=6)
    rig.step()
    plan = rig.step()
    assert plan.new_requests == []
    assert plan.cached_requests.request_ids == ["a"]
    assert plan.cached_requests.num_computed_tokens == [6]


def test_drafts_are_part_of_the_tokens():
    rig = Rig(num_draft_tokens=3)
    rig.add("a")
    rig.add("b")
    rig.step()
    rig.scheduler.update_drafts({"a": [7, 8, 9], "nobody": [1]})
    plan = rig.step()
    assert plan.num_scheduled_tokens == {"a": 4, "b": 1}
    assert plan.draft_token_ids == {"a": [7, 8, 9]}


def test_what_the_budget_cuts_off_the_drafts_is_lost():
    rig = Rig(num_draft_tokens=4, max_num_batched_tokens=4)
    rig.add("a")
    rig.step()
    rig.scheduler.update_drafts({"a": [7, 8, 9, 10]})
    assert rig.step().draft_token_ids == {"a": [7, 8, 9]}
    assert rig.step().draft_token_ids == {}


def test_a_request_whose_drafts_all_fall_to_the_budget_has_no_entry():
    rig = Rig(num_draft_tokens=2, max_num_batched_tokens=4)
    rig.add("a", prompt=1)
    rig.add("b", prompt=1)
    rig.step()
    rig.scheduler.update_drafts({"a": [7, 8], "b": [9, 10]})
    plan = rig.step()
    assert plan.num_scheduled_tokens == {"a": 3, "b": 1}
    assert plan.draft_token_ids == {"a": [7, 8]}
    assert rig.live("b").draft_token_ids == []


def test_structured_requests_have_their_place_among_the_scheduled():
    rig = Rig(surroundings={"grammars": Grammars()}, max_num_batched_tokens=10)
    rig.add("a", prompt=2)
    rig.add("g1", prompt=2)
    rig.step()
    rig.add("g2", prompt=30)
    plan = rig.step()
    assert list(plan.num_scheduled_tokens) == ["a", "g1", "g2"]
    assert plan.structured_request_ids == {"g1": 1, "g2": 2}
    assert rig.step().structured_request_ids == {"g1": 1, "g2": 2}  # g2 is still a prompt


def test_places_hold_after_one_that_stood_before_was_preempted():
    rig = Rig(blocks=4, surroundings={"grammars": Grammars()}, policy=Priority)
    rig.add("a", prompt=5, priority=9)
    rig.step()
    rig.add("g1", prompt=3, priority=0)
    rig.add("g2", prompt=3, priority=1)
    rig.step()
    rig.step()
    plan = rig.step()  # a has its token when g1 needs a block
    assert plan.preempted_request_ids == {"a"}
    assert list(plan.num_scheduled_tokens) == ["g1", "g2"]
    assert plan.structured_request_ids == {"g1": 0, "g2": 1}


def test_only_what_is_scheduled_counts_as_computed_before_the_results_are_in():
    rig = Rig(max_num_batched_tokens=6)
    rig.add("a", prompt=10)
    plan = rig.plan()
    assert rig.live("a").num_computed_tokens == 6
    rig.update(plan)
    assert rig.live("a").num_computed_tokens == 6
    assert rig.live("a").status is RequestStatus.RUNNING


def test_a_step_without_results_for_a_chunk_says_nothing_of_it():
    rig = Rig(max_num_batched_tokens=6)
    rig.add("a", prompt=10)
    assert rig.update(rig.plan(), ModelRunnerOutput()) == {}


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
        rig = Rig(**settings)
        rig.add("a", prompt=[1] * 13, max_tokens=7)
        rig.add("b", prompt=[1] * 9, max_tokens=5)
        tokens.append(rig.run(depth=int(rig.limits.asynchronous)))
    assert all(other == tokens[0] for other in tokens)
    assert tokens[0]["a"][0] == next_token([1] * 13)
