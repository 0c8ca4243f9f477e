"""What the default scheduler is built with, what it refuses, and how a step is shared."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import Connector, Rig, adapter, feature

from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.core.engine.encoder_cache import EncoderCacheManager
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    OverloadedError,
    RequestError,
    SchedulerContext,
)
from hardpoint.plugins.errors import PluginNotFoundError
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.kv_cache import KVCacheGroup
from hardpoint.plugins.scheduler import SchedulerLimits
from hardpoint.plugins.typed import convert
from hardpoint.registry.plugin_set import resolve_plugins

# Construction and limits


def chosen(**scheduler):
    config = convert({"scheduler": scheduler}, EngineConfig, path="")
    plugins = resolve_plugins(config)
    rig = Rig()
    return plugins.create(
        plugins.one("schedulers"),
        SchedulerContext,
        limits=rig.limits,
        kv_cache=rig.cache,
        policy=rig.policy,
        clock=rig.clock,
    )


@pytest.mark.parametrize(
    "scheduler",
    [
        {},
        {"use": "default"},
        {"use": "hardpoint.builtin_plugins.scheduling:DefaultScheduler"},
    ],
)
def test_it_is_the_default_and_chosen_by_name_or_by_class(scheduler):
    assert type(chosen(**scheduler)) is DefaultScheduler
    assert DefaultScheduler.contract == KINDS["schedulers"].contract


def test_an_unknown_policy_is_refused_by_name():
    config = convert({"scheduler": {"policy": "alphabetical"}}, EngineConfig, path="")
    with pytest.raises(
        PluginNotFoundError,
        match=r"scheduler.policy: no .* is called 'alphabetical'; found: fair, fcfs, priority",
    ):
        resolve_plugins(config)


def test_it_begins_empty():
    rig = Rig()
    assert not rig.scheduler.has_requests()
    assert rig.scheduler.num_unfinished_requests() == 0
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 0, 0)
    assert stats.kv_cache_usage == 0
    plan = rig.plan()
    assert plan.step == 1
    assert plan.finished_request_ids == frozenset()


@pytest.mark.parametrize(("blocks", "groups"), [(0, None), (1, [KVCacheGroup(window=8)])])
def test_a_pool_that_holds_nothing_is_refused(blocks, groups):
    with pytest.raises(ConfigError, match=rf"at least one block .* got {blocks} in all"):
        Rig(blocks=blocks, groups=groups)


def test_a_pool_of_one_block_works_as_far_as_it_goes():
    rig = Rig(blocks=1, block_size=8)
    rig.add("a", prompt=3, max_tokens=5)
    with pytest.raises(RequestError, match="its 8 tokens and one to generate need 3 KV blocks of"):
        Rig(blocks=1, block_size=4).add("b", prompt=8)
    assert len(rig.run()["a"]) == 5


def test_a_connector_moves_one_group_only():
    with pytest.raises(ConfigError, match="it moves one KV cache group, the model has 2"):
        Rig(groups=[KVCacheGroup(), KVCacheGroup()], surroundings={"connector": Connector()})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 65},
            r"max_num_batched_tokens: expected at least max_model_len \(65\) without .*, got 64",
        ),
        (
            {"chunked_prefill": False, "max_model_len": 64, "long_prefill_token_threshold": 3},
            "long_prefill_token_threshold: expected 0 without scheduler.chunked_prefill, got 3",
        ),
        ({"asynchronous": True, "num_draft_tokens": 2}, "asynchronous: .* with a speculator"),
    ],
)
def test_limits_that_cannot_work_together_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Rig(**settings)


def test_lookahead_is_apart_from_the_number_of_drafts():
    limits = SchedulerLimits(
        max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1, num_draft_tokens=3
    )
    assert limits.num_lookahead_tokens == 0


def test_finished_ids_by_client_only_where_asked_for():
    for wanted in (False, True):
        rig = Rig(surroundings={"report_finished": wanted})
        rig.add("a", max_tokens=1, client_index=0)
        rig.add("b", max_tokens=2, client_index=7)
        plan = rig.plan()
        outputs = rig.scheduler.update(plan, rig.executor.execute(plan))
        assert sorted(outputs) == [0, 7]
        assert outputs[0].finished_requests == ({"a"} if wanted else None)
        assert outputs[7].finished_requests is None


def test_finished_ids_reach_a_client_whatever_ended_the_request():
    rig = Rig(surroundings={"report_finished": True})
    rig.add("a", client_index=3, timeout=1.0)
    rig.clock.advance(5)
    outputs = rig.scheduler.update(rig.plan(), rig.executor.execute(rig.plan()))
    assert outputs[3].finished_requests == {"a"}


# Admission control at arrival


def test_a_prompt_that_no_model_length_allows_is_refused_with_the_numbers():
    rig = Rig(max_model_len=10)
    rig.add("a", prompt=9)
    with pytest.raises(RequestError, match=r"at most 9 tokens \(max_model_len 10 less one.*got 10"):
        rig.add("b", prompt=10)


def test_a_prompt_that_the_cache_can_never_hold_is_refused_with_the_numbers():
    rig = Rig(blocks=3, block_size=4)
    rig.add("a", prompt=11)
    words = "its 12 tokens and one to generate need 4 KV blocks of 4 tokens, the cache has 3"
    with pytest.raises(RequestError, match=words):
        rig.add("b", prompt=12)
    assert rig.scheduler.num_unfinished_requests() == 1


def test_lookahead_counts_in_what_must_fit():
    rig = Rig(blocks=3, block_size=4, num_lookahead_tokens=4)
    rig.add("a", prompt=7)
    with pytest.raises(RequestError, match="need 4 KV blocks of 4 tokens, the cache has 3"):
        rig.add("b", prompt=8)


def test_every_group_needs_its_blocks():
    rig = Rig(blocks=4, groups=[KVCacheGroup(), KVCacheGroup()])
    rig.add("a", prompt=7)
    with pytest.raises(RequestError, match="need 6 KV blocks of 4 tokens, the cache has 4"):
        rig.add("b", prompt=8)


def test_too_many_waiting_is_overload():
    rig = Rig(max_waiting=2, max_num_seqs=1)
    rig.add("a")
    rig.step()
    rig.add("b")
    rig.add("c")
    words = r"overloaded: 2 requests wait, which is the most that may \(scheduler.max_waiting\)"
    with pytest.raises(OverloadedError, match=words):
        rig.add("d")
    assert rig.live("d") is None
    assert set(rig.scheduler.finish_requests(["d"], 0)) == set()


def test_a_feature_that_no_step_could_encode_is_refused():
    words = r"features\[1\]: expected at most 6 encoder tokens, the budget of a step, got 7"
    with pytest.raises(RequestError, match=words):
        Rig(encoder_tokens=6).add("a", prompt=20, features=[feature("x", 0, 6), feature("y", 6, 7)])
    with pytest.raises(RequestError, match="expected at most 0 encoder tokens"):
        Rig().add("a", prompt=20, features=[feature("x", 0, 1)])


def test_features_together_must_fit_into_a_step_that_cannot_be_split():
    rig = Rig(encoder_tokens=6, chunked_prefill=False, max_model_len=60)
    rig.add("a", prompt=20, features=[feature("x", 0, 4), feature("x", 8, 4), feature("z", 14, 2)])
    words = "at most 6 encoder tokens together, .* without scheduler.chunked_prefill, got 7"
    with pytest.raises(RequestError, match=words):
        rig.add("b", prompt=20, features=[feature("x", 0, 4), feature("y", 4, 3)])


# Scheduling model


def test_no_phases_a_step_gives_tokens_until_all_is_computed():
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", prompt=20, max_tokens=3)
    given = [dict(rig.step().num_scheduled_tokens) for _ in range(5)]
    assert given == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}, {"a": 1}]


def test_decodes_go_before_a_long_prompt_which_is_split():
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", prompt=2)
    rig.add("b", prompt=2)
    rig.step()
    rig.add("c", prompt=13)
    given = [dict(rig.step().num_scheduled_tokens) for _ in range(3)]
    assert given == [{"a": 1, "b": 1, "c": 6}, {"a": 1, "b": 1, "c": 6}, {"a": 1, "b": 1, "c": 1}]


def test_running_requests_stand_before_admitted_ones_in_a_plan():
    rig = Rig()
    rig.add("b")
    rig.step()
    rig.add("a", arrival_time=0.0)
    assert list(rig.step().num_scheduled_tokens) == ["b", "a"]


def test_one_reading_of_the_clock_stamps_everything_in_a_step():
    rig = Rig(surroundings={"log_stats": True})
    rig.add("a")
    rig.add("b")
    rig.clock.tick = 1.0
    plan = rig.scheduler.schedule()
    assert rig.records[-1].timestamp == 1.0
    outputs = rig.update(plan)
    assert [outputs[name].events[-1].timestamp for name in "ab"] == [1.0, 1.0]


def test_each_resource_has_its_own_limit():
    rig = Rig(max_num_seqs=3, encoder_tokens=4, max_loras=1)
    rig.around["encoder_cache"] = EncoderCacheManager(4)
    rig.add("a", lora=adapter(1))
    rig.add("b", lora=adapter(2))
    rig.add("c", prompt=6, features=[feature("x", 0, 4)])
    rig.add("d", prompt=6, features=[feature("y", 0, 4)])
    plan = rig.step()
    assert list(plan.num_scheduled_tokens) == ["a", "c"]
    assert rig.why("b").waiting_for.value == "lora_slot"
    assert rig.why("d").waiting_for.value == "encoder"
