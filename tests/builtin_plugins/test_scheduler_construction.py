"""The parts of the default scheduler, rejected combinations, and budgets of a step."""

from __future__ import annotations

import pytest
from support.builtins.scheduler_harness import Connector, HoldsBack, Simulator, adapter, feature

from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.errors import PluginNotFoundError
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    OverloadedError,
    RequestError,
    SchedulerContext,
)
from hardpoint.plugins.kv_cache import KVCacheGroup
from hardpoint.plugins.scheduling.scheduler import SchedulerLimits
from hardpoint.toolkit.encoder_cache import EncoderCacheManager
from hardpoint.typed import convert

# Construction and limits


def chosen(**scheduler):
    config = convert({"scheduler": scheduler}, EngineConfig, path="")
    plugins = resolve_plugins(config)
    sim = Simulator()
    return plugins.create(
        plugins.one("schedulers"),
        SchedulerContext,
        limits=sim.limits,
        kv_cache=sim.cache,
        policy=sim.policy,
        clock=sim.clock,
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
    sim = Simulator()
    assert not sim.scheduler.has_requests()
    assert sim.scheduler.num_unfinished_requests() == 0
    stats = sim.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 0, 0)
    assert stats.kv_cache_usage == 0
    plan = sim.plan()
    assert plan.step == 1
    assert plan.finished_request_ids == frozenset()


@pytest.mark.parametrize(("blocks", "groups"), [(0, None), (1, [KVCacheGroup(window=8)])])
def test_a_pool_that_holds_nothing_is_refused(blocks, groups):
    with pytest.raises(ConfigError, match=rf"at least one block .* got {blocks} in all"):
        Simulator(blocks=blocks, groups=groups)


def test_a_pool_of_one_block_works_as_far_as_it_goes():
    sim = Simulator(blocks=1, block_size=8)
    sim.add("a", prompt=3, max_tokens=5)
    with pytest.raises(RequestError, match="its 8 tokens and one to generate need 3 KV blocks of"):
        Simulator(blocks=1, block_size=4).add("b", prompt=8)
    assert len(sim.run()["a"]) == 5


def test_a_connector_moves_one_group_only():
    with pytest.raises(ConfigError, match="it moves one KV cache group, the model has 2"):
        Simulator(groups=[KVCacheGroup(), KVCacheGroup()], context={"transfers": Connector()})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 65},
            r"max_num_batched_tokens: expected at least max_model_len \(65\) without .*, got 64",
        ),
        (
            {"chunked_prefill": False, "max_model_len": 64, "long_prefill_token_threshold": 3},
            "long_prefill_token_threshold: expected 0 without scheduler.chunked_prefill, got 3",
        ),
    ],
)
def test_limits_that_cannot_work_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Simulator(**settings)


def test_lookahead_is_apart_from_the_number_of_drafts():
    limits = SchedulerLimits(
        max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1, num_draft_tokens=3
    )
    assert limits.num_lookahead_tokens == 0


def test_finished_ids_by_client_only_where_asked_for():
    for wanted in (False, True):
        sim = Simulator(context={"report_finished": wanted})
        sim.add("a", max_tokens=1, client_index=0)
        sim.add("b", max_tokens=2, client_index=7)
        plan = sim.plan()
        outputs = sim.scheduler.update(plan, sim.executor.execute(plan))
        assert sorted(outputs) == [0, 7]
        assert outputs[0].finished_requests == ({"a"} if wanted else None)
        assert outputs[7].finished_requests is None


def test_finished_ids_reach_a_client_whatever_ended_the_request():
    sim = Simulator(context={"report_finished": True})
    sim.add("a", client_index=3, timeout=1.0)
    sim.clock.advance(5)
    outputs = sim.scheduler.update(sim.plan(), sim.executor.execute(sim.plan()))
    assert outputs[3].finished_requests == {"a"}


# Admission control at arrival


def test_a_prompt_that_no_model_length_allows_is_refused_with_the_numbers():
    sim = Simulator(max_model_len=10)
    sim.add("a", prompt=9)
    expected = r"too long: 10 tokens; this model.s maximum context length is 10 tokens, less one"
    with pytest.raises(RequestError, match=expected):
        sim.add("b", prompt=10)


def test_a_prompt_that_the_cache_can_never_hold_is_refused_with_the_numbers():
    sim = Simulator(blocks=3, block_size=4)
    sim.add("a", prompt=11)
    message = "its 12 tokens and one to generate need 4 KV blocks of 4 tokens, the cache has 3"
    with pytest.raises(RequestError, match=message):
        sim.add("b", prompt=12)
    assert sim.scheduler.num_unfinished_requests() == 1


def test_lookahead_counts_in_what_must_fit():
    sim = Simulator(blocks=3, block_size=4, num_lookahead_tokens=4)
    sim.add("a", prompt=7)
    with pytest.raises(RequestError, match="need 4 KV blocks of 4 tokens, the cache has 3"):
        sim.add("b", prompt=8)


def test_every_group_needs_its_blocks():
    sim = Simulator(blocks=4, groups=[KVCacheGroup(), KVCacheGroup()])
    sim.add("a", prompt=7)
    with pytest.raises(RequestError, match="need 6 KV blocks of 4 tokens, the cache has 4"):
        sim.add("b", prompt=8)


def test_too_many_waiting_is_overload():
    sim = Simulator(max_waiting=2, max_num_seqs=1)
    sim.add("a")
    sim.step()
    sim.add("b")
    sim.add("c")
    message = r"overloaded: 2 requests are waiting, the maximum \(scheduler.max_waiting\)"
    with pytest.raises(OverloadedError, match=message):
        sim.add("d")
    assert sim.live("d") is None
    assert set(sim.scheduler.finish_requests(["d"], 0)) == set()


def test_a_feature_that_no_step_could_encode_is_refused():
    message = r"features\[1\]: expected at most 6 encoder tokens, the budget of a step, got 7"
    with pytest.raises(RequestError, match=message):
        Simulator(encoder_tokens=6).add(
            "a", prompt=20, features=[feature("x", 0, 6), feature("y", 6, 7)]
        )
    with pytest.raises(RequestError, match="expected at most 0 encoder tokens"):
        Simulator().add("a", prompt=20, features=[feature("x", 0, 1)])


def test_features_together_must_fit_into_a_step_that_cannot_be_split():
    sim = Simulator(encoder_tokens=6, chunked_prefill=False, max_model_len=60)
    sim.add("a", prompt=20, features=[feature("x", 0, 4), feature("x", 8, 4), feature("z", 14, 2)])
    message = "at most 6 encoder tokens together, .* without scheduler.chunked_prefill, got 7"
    with pytest.raises(RequestError, match=message):
        sim.add("b", prompt=20, features=[feature("x", 0, 4), feature("y", 4, 3)])


# Scheduling model


def test_no_phases_a_step_gives_tokens_until_all_is_computed():
    sim = Simulator(max_num_batched_tokens=8)
    sim.add("a", prompt=20, max_tokens=3)
    plans = [dict(sim.step().num_scheduled_tokens) for _ in range(5)]
    assert plans == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}, {"a": 1}]


def test_decodes_go_before_a_long_prompt_which_is_split():
    sim = Simulator(max_num_batched_tokens=8)
    sim.add("a", prompt=2)
    sim.add("b", prompt=2)
    sim.step()
    sim.add("c", prompt=13)
    plans = [dict(sim.step().num_scheduled_tokens) for _ in range(3)]
    assert plans == [{"a": 1, "b": 1, "c": 6}, {"a": 1, "b": 1, "c": 6}, {"a": 1, "b": 1, "c": 1}]


def test_running_requests_stand_before_admitted_ones_in_a_plan():
    sim = Simulator()
    sim.add("b")
    sim.step()
    sim.add("a", arrival_time=0.0)
    assert list(sim.step().num_scheduled_tokens) == ["b", "a"]


def test_one_reading_of_the_clock_stamps_everything_in_a_step():
    sim = Simulator(context={"log_stats": True})
    sim.add("a")
    sim.add("b")
    sim.clock.tick = 1.0
    plan = sim.scheduler.schedule()
    assert sim.records[-1].timestamp == 1.0
    outputs = sim.update(plan)
    assert [outputs[name].events[-1].timestamp for name in "ab"] == [1.0, 1.0]


def test_each_resource_has_its_own_limit():
    sim = Simulator(max_num_seqs=3, encoder_tokens=4, policy=HoldsBack)
    sim.context_fields["encoder_cache"] = EncoderCacheManager(4)
    sim.add("a", lora=adapter(1))
    sim.add("b", tags={"hold": "no"})
    sim.add("c", prompt=6, features=[feature("x", 0, 4)])
    sim.add("d", prompt=6, features=[feature("y", 0, 4)])
    plan = sim.step()
    assert list(plan.num_scheduled_tokens) == ["a", "c"]
    assert sim.why("b").waiting_for.value == "policy"
    assert sim.why("d").waiting_for.value == "encoder"
