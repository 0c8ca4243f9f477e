"""Images and the like: encoder budget, encoder cache, and reports to workers."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import Connector, Priority, Simulator, feature

from hardpoint.plugins import FinishReason, RequestError, WaitingFor
from hardpoint.toolkit.encoder_cache import EncoderCacheManager


def room(sim):
    return sim.context_fields["encoder_cache"].num_free_tokens


def test_features_are_chosen_by_index_and_held():
    sim = Simulator(encoder_tokens=10)
    sim.add("a", prompt=20, features=[feature("x", 2, 4), feature("y", 9, 5)])
    plan = sim.plan()
    assert plan.num_scheduled_tokens == {"a": 20}
    assert plan.encoder_inputs == {"a": [0, 1]}
    assert room(sim) == 1


def test_only_features_that_the_step_reaches_are_encoded():
    sim = Simulator(encoder_tokens=10, long_prefill_token_threshold=8)
    features = [feature("x", 0, 4), feature("y", 8, 4)]
    sim.add("a", prompt=16, features=features)
    assert [sim.step().encoder_inputs for _ in range(3)] == [{"a": [0]}, {"a": [1]}, {}]


def test_a_feature_that_a_chunk_cuts_through_is_encoded_once():
    sim = Simulator(encoder_tokens=10, long_prefill_token_threshold=4)
    sim.add("a", prompt=12, features=[feature("x", 2, 8)])
    assert [sim.step().encoder_inputs for _ in range(3)] == [{"a": [0]}, {}, {}]


def test_the_need_is_cut_before_a_feature_that_the_budget_does_not_allow():
    sim = Simulator(encoder_tokens=6)
    sim.add("a", prompt=20, features=[feature("x", 2, 4), feature("y", 10, 5)])
    first = sim.step()
    assert first.num_scheduled_tokens == {"a": 10}
    assert first.encoder_inputs == {"a": [0]}
    second = sim.step()
    assert second.num_scheduled_tokens == {"a": 10}
    assert second.encoder_inputs == {"a": [1]}


def test_without_chunks_the_need_is_not_cut():
    sim = Simulator(encoder_tokens=6, chunked_prefill=False, max_model_len=64)
    sim.add("a", prompt=9, features=[feature("x", 0, 4)])
    sim.add("b", prompt=9, features=[feature("y", 2, 4)])
    assert sim.step().num_scheduled_tokens == {"a": 9}
    assert sim.why("b").waiting_for is WaitingFor.ENCODER
    assert sim.step().num_scheduled_tokens == {"a": 1, "b": 9}


def test_the_budget_holds_also_where_the_cache_has_room():
    cache = EncoderCacheManager(20)
    sim = Simulator(max_encoder_tokens=6, context={"encoder_cache": cache})
    sim.add("a", prompt=20, features=[feature("x", 0, 4), feature("y", 8, 4)])
    assert [sim.step().encoder_inputs for _ in range(2)] == [{"a": [0]}, {"a": [1]}]


def test_the_cache_holds_also_where_the_budget_has_room():
    cache = EncoderCacheManager(6)
    sim = Simulator(max_encoder_tokens=20, context={"encoder_cache": cache})
    sim.add("a", prompt=20, features=[feature("x", 0, 4), feature("y", 8, 4)])
    assert [sim.step().encoder_inputs for _ in range(2)] == [{"a": [0]}, {"a": [1]}]


def test_the_budget_is_shared_by_running_and_admitted_requests():
    sim = Simulator(encoder_tokens=6, long_prefill_token_threshold=4)
    sim.add("a", prompt=8, features=[feature("x", 4, 4)])
    sim.step()
    sim.add("b", prompt=4, features=[feature("y", 0, 3)])
    plan = sim.step()
    assert plan.encoder_inputs == {"a": [0]}
    assert sim.why("b").message == (
        "its next feature takes 3 encoder tokens; the step has 2 left, or the encoder cache is full"
    )
    assert sim.step().encoder_inputs == {"b": [0]}


def test_a_request_without_blocks_uses_no_encoder_budget():
    sim = Simulator(encoder_tokens=4, blocks=3, block_size=4)
    sim.add("a", prompt=4)
    sim.step()
    sim.add("b", prompt=11, features=[feature("x", 0, 4)])
    plan = sim.plan()
    assert plan.encoder_inputs == {}
    assert room(sim) == 4
    sim.update(plan)
    sim.abort("a", reason=FinishReason.ABORT)
    assert sim.step().encoder_inputs == {"b": [0]}


def test_a_running_request_that_gives_way_itself_uses_no_encoder_budget():
    sim = Simulator(
        encoder_tokens=4, blocks=3, block_size=4, policy=Priority, long_prefill_token_threshold=4
    )
    sim.add("a", prompt=8, priority=9, features=[feature("x", 4, 4)])
    sim.add("b", prompt=4, priority=10)
    sim.add("c", prompt=4, priority=11)
    sim.step()
    sim.live("b").priority = sim.live("c").priority = 0
    plan = sim.plan()
    assert plan.preempted_request_ids == {"a"}
    assert plan.encoder_inputs == {}
    assert room(sim) == 4


def test_equal_features_are_encoded_once():
    sim = Simulator(encoder_tokens=4)
    sim.add("a", prompt=12, features=[feature("x", 0, 4), feature("x", 6, 4)])
    sim.add("b", prompt=6, features=[feature("x", 1, 4)])
    plan = sim.plan()
    assert plan.num_scheduled_tokens == {"a": 12, "b": 6}
    assert plan.encoder_inputs["a"] == [0, 1]
    assert room(sim) == 0  # room for one
    sim.update(plan)
    sim.add("c", prompt=6, features=[feature("x", 1, 4)])
    assert sim.step().encoder_inputs == {}  # it is still there


def test_a_feature_is_let_go_when_its_positions_are_computed():
    sim = Simulator(encoder_tokens=8, long_prefill_token_threshold=4)
    sim.add("a", prompt=12, features=[feature("x", 0, 4), feature("y", 4, 4)])
    plan = sim.plan()
    assert room(sim) == 4
    sim.update(plan)
    assert room(sim) == 8


def test_a_feature_that_comes_again_later_does_not_keep_others_out_until_then():
    sim = Simulator(encoder_tokens=4)
    features = [feature("x", 0, 4), feature("y", 4, 4), feature("x", 8, 4)]
    sim.add("a", prompt=12, features=features)
    plans = [sim.step() for _ in range(3)]
    assert [plan.encoder_inputs for plan in plans] == [{"a": [0]}, {"a": [1]}, {"a": [2]}]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 4}] * 3


def test_a_feature_is_held_for_each_place_where_it_is_seen():
    sim = Simulator(encoder_tokens=8, max_num_batched_tokens=10)
    sim.add("a", prompt=16, features=[feature("x", 0, 4), feature("x", 8, 4)])
    plan = sim.step()
    assert plan.encoder_inputs == {"a": [0, 1]}
    assert room(sim) == 4  # the second place is not all computed
    sim.step()
    assert room(sim) == 8


def test_freed_embeddings_are_reported_once():
    sim = Simulator(encoder_tokens=4)
    sim.add("a", prompt=6, features=[feature("x", 0, 4)])
    sim.step()
    sim.add("b", prompt=6, features=[feature("y", 0, 4)])
    plan = sim.step()  # y needs the room of x
    assert list(plan.freed_encoder_inputs) == ["x"]
    assert plan.encoder_inputs == {"b": [0]}
    assert list(sim.step().freed_encoder_inputs) == []


def test_freed_embeddings_of_a_lost_plan_are_reported_again():
    sim = Simulator(encoder_tokens=4)
    sim.add("a", prompt=6, features=[feature("x", 0, 4)])
    sim.step()
    sim.add("b", prompt=6, features=[feature("y", 0, 4)])
    sim.lose(sim.plan())
    plan = sim.step()
    assert "x" in plan.freed_encoder_inputs
    assert plan.encoder_inputs["b"] == [0]  # and what it should have encoded is encoded


def test_an_ended_request_lets_its_features_go():
    sim = Simulator(encoder_tokens=4, long_prefill_token_threshold=2)
    sim.add("a", prompt=6, features=[feature("x", 0, 4)])
    sim.step()
    assert room(sim) == 0
    sim.abort("a", reason=FinishReason.ABORT)
    assert room(sim) == 4


def test_text_needs_no_encoder():
    sim = Simulator()
    sim.add("a")
    plan = sim.step()
    assert plan.encoder_inputs == {}
    assert list(plan.freed_encoder_inputs) == []


# Features whose tokens see each other


def chunks(sim):
    """Return the tokens of "a" in each step of its prompt."""
    sizes = []
    while sum(sizes) < 20:
        sizes.append(sim.step().num_scheduled_tokens.get("a", 0))
    return sizes


def test_a_chunk_ends_before_a_whole_feature_or_has_all_of_it():
    sim = Simulator(encoder_tokens=20, max_num_batched_tokens=6)
    features = [feature("x", 3, 4, whole=True), feature("y", 8, 5, whole=True)]
    sim.add("a", prompt=20, features=features)
    assert chunks(sim) == [3, 5, 6, 6]


def test_a_limit_of_chunks_gives_way_to_a_whole_feature():
    sim = Simulator(encoder_tokens=20, long_prefill_token_threshold=3)
    sim.add("a", prompt=20, features=[feature("x", 4, 9, whole=True)])
    assert chunks(sim) == [3, 1, 9, 3, 3, 1]


def test_a_whole_feature_waits_until_a_step_has_room_for_it():
    sim = Simulator(encoder_tokens=20, max_num_batched_tokens=6)
    sim.add("b", prompt=1, max_tokens=3)
    sim.add("a", prompt=20, features=[feature("x", 0, 6, whole=True)])
    assert sim.step().num_scheduled_tokens == {"b": 1}
    assert sim.why("a").waiting_for is WaitingFor.BUDGET
    for _ in range(2):
        assert sim.step().num_scheduled_tokens == {"b": 1}
    assert sim.step().num_scheduled_tokens == {"a": 6}


def test_a_whole_feature_that_no_step_has_room_for_is_refused():
    sim = Simulator(encoder_tokens=20, max_num_batched_tokens=6)
    with pytest.raises(RequestError, match="at most 6 tokens, of one step .*, got 7"):
        sim.add("a", prompt=20, features=[feature("x", 0, 7, whole=True)])


@pytest.mark.parametrize(("offset", "external"), [(8, 8), (5, 4), (2, 0), (4, 4)])
def test_no_load_ends_inside_a_whole_feature(offset, external):
    connector = Connector(a=(8, False))
    context = {"encoder_cache": EncoderCacheManager(20), "transfers": connector}
    sim = Simulator(block_size=4, max_encoder_tokens=20, context=context)
    sim.add("a", prompt=20, features=[feature("x", offset, 9, whole=True)])
    plan = sim.plan()
    assert plan.num_scheduled_tokens == {"a": 20 - external}
    assert plan.new_requests[0].num_computed_tokens == external


def test_no_load_ends_inside_the_feature_before_one_that_is_left_out():
    # Its end at 6 would leave out "y", and the block before that ends inside "x".
    connector = Connector(a=(8, False))
    context = {"encoder_cache": EncoderCacheManager(20), "transfers": connector}
    sim = Simulator(block_size=4, max_encoder_tokens=20, context=context)
    features = [feature("x", 2, 4, whole=True), feature("y", 6, 5, whole=True)]
    sim.add("a", prompt=20, features=features)
    assert sim.plan().new_requests[0].num_computed_tokens == 0
