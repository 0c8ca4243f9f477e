"""Images and the like: encoder budget, encoder cache, and what workers are told."""

from __future__ import annotations

from support.builtins.scheduler_harness import Priority, Rig, feature

from hardpoint.core.engine.encoder_cache import EncoderCacheManager
from hardpoint.plugins import FinishReason, WaitingFor


def room(rig):
    return rig.around["encoder_cache"].num_free_tokens


def test_features_are_chosen_by_index_and_held():
    rig = Rig(encoder_tokens=10)
    rig.add("a", prompt=20, features=[feature("x", 2, 4), feature("y", 9, 5)])
    plan = rig.plan()
    assert plan.num_scheduled_tokens == {"a": 20}
    assert plan.encoder_inputs == {"a": [0, 1]}
    assert room(rig) == 1


def test_only_features_that_the_step_reaches_are_encoded():
    rig = Rig(encoder_tokens=10, long_prefill_token_threshold=8)
    features = [feature("x", 0, 4), feature("y", 8, 4)]
    rig.add("a", prompt=16, features=features)
    assert [rig.step().encoder_inputs for _ in range(3)] == [{"a": [0]}, {"a": [1]}, {}]


def test_a_feature_that_a_chunk_cuts_through_is_encoded_once():
    rig = Rig(encoder_tokens=10, long_prefill_token_threshold=4)
    rig.add("a", prompt=12, features=[feature("x", 2, 8)])
    assert [rig.step().encoder_inputs for _ in range(3)] == [{"a": [0]}, {}, {}]


def test_the_need_is_cut_before_a_feature_that_the_budget_does_not_allow():
    rig = Rig(encoder_tokens=6)
    rig.add("a", prompt=20, features=[feature("x", 2, 4), feature("y", 10, 5)])
    first = rig.step()
    assert first.num_scheduled_tokens == {"a": 10}
    assert first.encoder_inputs == {"a": [0]}
    second = rig.step()
    assert second.num_scheduled_tokens == {"a": 10}
    assert second.encoder_inputs == {"a": [1]}


def test_without_chunks_the_need_is_not_cut():
    rig = Rig(encoder_tokens=6, chunked_prefill=False, max_model_len=64)
    rig.add("a", prompt=9, features=[feature("x", 0, 4)])
    rig.add("b", prompt=9, features=[feature("y", 2, 4)])
    assert rig.step().num_scheduled_tokens == {"a": 9}
    assert rig.why("b").waiting_for is WaitingFor.ENCODER
    assert rig.step().num_scheduled_tokens == {"a": 1, "b": 9}


def test_the_budget_holds_also_where_the_cache_has_room():
    cache = EncoderCacheManager(20)
    rig = Rig(max_encoder_tokens=6, surroundings={"encoder_cache": cache})
    rig.add("a", prompt=20, features=[feature("x", 0, 4), feature("y", 8, 4)])
    assert [rig.step().encoder_inputs for _ in range(2)] == [{"a": [0]}, {"a": [1]}]


def test_the_cache_holds_also_where_the_budget_has_room():
    cache = EncoderCacheManager(6)
    rig = Rig(max_encoder_tokens=20, surroundings={"encoder_cache": cache})
    rig.add("a", prompt=20, features=[feature("x", 0, 4), feature("y", 8, 4)])
    assert [rig.step().encoder_inputs for _ in range(2)] == [{"a": [0]}, {"a": [1]}]


def test_the_budget_is_shared_by_running_and_admitted_requests():
    rig = Rig(encoder_tokens=6, long_prefill_token_threshold=4)
    rig.add("a", prompt=8, features=[feature("x", 4, 4)])
    rig.step()
    rig.add("b", prompt=4, features=[feature("y", 0, 3)])
    plan = rig.step()
    assert plan.encoder_inputs == {"a": [0]}
    assert rig.why("b").message == (
        "its next feature takes 3 encoder tokens; the step has 2 left, or the encoder cache is full"
    )
    assert rig.step().encoder_inputs == {"b": [0]}


def test_a_request_without_blocks_uses_no_encoder_budget():
    rig = Rig(encoder_tokens=4, blocks=3, block_size=4)
    rig.add("a", prompt=4)
    rig.step()
    rig.add("b", prompt=11, features=[feature("x", 0, 4)])
    plan = rig.plan()
    assert plan.encoder_inputs == {}
    assert room(rig) == 4
    rig.update(plan)
    rig.abort("a", reason=FinishReason.ABORT)
    assert rig.step().encoder_inputs == {"b": [0]}


def test_a_running_request_that_gives_way_itself_uses_no_encoder_budget():
    rig = Rig(
        encoder_tokens=4, blocks=3, block_size=4, policy=Priority, long_prefill_token_threshold=4
    )
    rig.add("a", prompt=8, priority=9, features=[feature("x", 4, 4)])
    rig.add("b", prompt=4, priority=10)
    rig.add("c", prompt=4, priority=11)
    rig.step()
    rig.live("b").priority = rig.live("c").priority = 0
    plan = rig.plan()
    assert plan.preempted_request_ids == {"a"}
    assert plan.encoder_inputs == {}
    assert room(rig) == 4


def test_equal_features_are_encoded_once():
    rig = Rig(encoder_tokens=4)
    rig.add("a", prompt=12, features=[feature("x", 0, 4), feature("x", 6, 4)])
    rig.add("b", prompt=6, features=[feature("x", 1, 4)])
    plan = rig.plan()
    assert plan.num_scheduled_tokens == {"a": 12, "b": 6}
    assert plan.encoder_inputs["a"] == [0, 1]
    assert room(rig) == 0  # room for one
    rig.update(plan)
    rig.add("c", prompt=6, features=[feature("x", 1, 4)])
    assert rig.step().encoder_inputs == {}  # it is still there


def test_a_feature_is_let_go_when_its_positions_are_computed():
    rig = Rig(encoder_tokens=8, long_prefill_token_threshold=4)
    rig.add("a", prompt=12, features=[feature("x", 0, 4), feature("y", 4, 4)])
    plan = rig.plan()
    assert room(rig) == 4
    rig.update(plan)
    assert room(rig) == 8


def test_a_feature_that_comes_again_later_does_not_keep_others_out_until_then():
    rig = Rig(encoder_tokens=4)
    features = [feature("x", 0, 4), feature("y", 4, 4), feature("x", 8, 4)]
    rig.add("a", prompt=12, features=features)
    plans = [rig.step() for _ in range(3)]
    assert [plan.encoder_inputs for plan in plans] == [{"a": [0]}, {"a": [1]}, {"a": [2]}]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 4}] * 3


def test_a_feature_is_held_for_each_place_where_it_is_seen():
    rig = Rig(encoder_tokens=8, max_num_batched_tokens=10)
    rig.add("a", prompt=16, features=[feature("x", 0, 4), feature("x", 8, 4)])
    plan = rig.step()
    assert plan.encoder_inputs == {"a": [0, 1]}
    assert room(rig) == 4  # the second place is not all computed
    rig.step()
    assert room(rig) == 8


def test_freed_embeddings_are_told_once():
    rig = Rig(encoder_tokens=4)
    rig.add("a", prompt=6, features=[feature("x", 0, 4)])
    rig.step()
    rig.add("b", prompt=6, features=[feature("y", 0, 4)])
    plan = rig.step()  # y needs the room of x
    assert list(plan.freed_encoder_inputs) == ["x"]
    assert plan.encoder_inputs == {"b": [0]}
    assert list(rig.step().freed_encoder_inputs) == []


def test_freed_embeddings_of_a_lost_plan_are_told_again():
    rig = Rig(encoder_tokens=4)
    rig.add("a", prompt=6, features=[feature("x", 0, 4)])
    rig.step()
    rig.add("b", prompt=6, features=[feature("y", 0, 4)])
    rig.scheduler.plan_lost(rig.plan())
    plan = rig.step()
    assert "x" in plan.freed_encoder_inputs
    assert plan.encoder_inputs["b"] == [0]  # and what it should have encoded is encoded


def test_an_ended_request_lets_its_features_go():
    rig = Rig(encoder_tokens=4, long_prefill_token_threshold=2)
    rig.add("a", prompt=6, features=[feature("x", 0, 4)])
    rig.step()
    assert room(rig) == 0
    rig.abort("a", reason=FinishReason.ABORT)
    assert room(rig) == 4


def test_text_needs_no_encoder():
    rig = Rig()
    rig.add("a")
    plan = rig.step()
    assert plan.encoder_inputs == {}
    assert list(plan.freed_encoder_inputs) == []
