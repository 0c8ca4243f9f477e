"""The client of several engines, with engines that the test plays."""

from __future__ import annotations

import threading

import msgspec
import pytest
from support.core.played_engines import Engine, loads, names, request
from support.waiting import PATIENCE_S, wait_until

from hardpoint.errors import EngineClosedError, EngineDeadError, RequestError
from hardpoint.host.boundary.errors import rejection_output
from hardpoint.plugins import (
    EngineCoreOutputs,
    FinishReason,
    HardpointError,
    ModelError,
    PrefixCacheStats,
    SchedulerStats,
)
from hardpoint.plugins.requests.stats import StepFault
from hardpoint.process.client.sockets import READER_THREAD

# Start


def test_all_engines_have_the_cache_of_the_first(world):
    group = world.group(3)
    configs = [engine.start.config for engine in world.engines]
    assert sorted(engine.start.engine_index for engine in world.engines) == [0, 1, 2]
    assert world.engines[0].start.engine_index == 0
    assert [config.kv_cache.num_blocks for config in configs] == [None, 64, 64]
    assert [config.max_model_len for config in configs] == [None, 128, 128]
    assert [engine.start.num_sharing for engine in world.engines] == [3, 2, 2]
    assert set(group.pids) == set(group.ranks) == {0, 1, 2}


def test_one_that_cannot_start_takes_all_back(world):
    world.failing[2] = [ModelError("weights: memory is short")]
    with pytest.raises(ModelError, match=r"^engine 2 of 4: weights: memory is short$"):
        world.group(4)
    assert len(world.engines) == 3
    assert all(engine.closed for engine in world.engines)


# Requests


def test_requests_of_a_call_are_one_message_to_each_engine(world):
    group = world.group(2)
    group.add_requests(names("r", 5))
    assert [engine.ids for engine in world.engines] == [["r0", "r2", "r4"], ["r1", "r3"]]
    assert [engine.messages for engine in world.engines] == [1, 1]
    assert loads(group) == {0: (3, 9), 1: (2, 6)}


def test_what_is_in_flight_is_counted_until_it_ends(world):
    group = world.group(2)
    group.add_requests(names("r", 4))
    first, second = world.of(0), world.of(1)
    first.give("r0", 7)
    assert loads(group) == {0: (2, 3), 1: (2, 6)}
    first.give("r0", 8, finish=FinishReason.STOP)
    second.give("r1", finish=FinishReason.LENGTH)
    assert loads(group) == {0: (1, 3), 1: (1, 3)}
    group.abort_requests(["r2", "r3", "unknown"])
    assert (first.aborted, second.aborted) == (["r2"], ["r3"])
    assert loads(group) == {0: (0, 0), 1: (0, 0)}
    assert world.tokens("r0") == [7, 8]


def test_aborted_requests_that_the_engine_reports_are_counted_once(world):
    group = world.group(2)
    group.add_request(request("a"))
    world.of(0).sink(EngineCoreOutputs(finished_requests={"a"}))
    assert loads(group)[0] == (0, 0)
    group.abort_requests(["a"])
    assert world.of(0).aborted == []


def test_a_request_that_names_its_engine_runs_there(world):
    group = world.group(3)
    for index in range(4):
        group.add_request(request(f"r{index}", data_parallel_rank=2))
    assert world.of(2).ids == ["r0", "r1", "r2", "r3"]


def test_an_engine_that_accepts_nothing_is_asked_again(world):
    group = world.group(2)
    world.of(0).is_full = True
    attempt = group.offer_requests(names("r", 4))
    assert not attempt()
    world.of(0).is_full = False
    assert attempt()
    assert [engine.ids for engine in world.engines] == [["r0", "r2"], ["r1", "r3"]]
    assert [engine.messages for engine in world.engines] == [1, 1]


def test_one_that_cannot_be_encoded_takes_its_call_back(world):
    group = world.group(2)
    call = [*names("r", 3), request("bad", tags={"unencodable": "yes"})]
    for send in (group.add_requests, group.offer_requests):
        with pytest.raises(RequestError, match="^tags: cannot be encoded$"):
            send(call)
        assert loads(group) == {0: (0, 0), 1: (0, 0)}


def test_one_that_is_refused_ends_its_call_on_all_engines(world):
    group = world.group(2)
    group.add_request(request("other"))
    group.add_requests(names("r", 4))
    world.of(1).sink(rejection_output("r0", RequestError("prompt: too long")))
    assert [world.error(f"r{i}") for i in range(4)] == ["prompt: too long"] * 4
    assert loads(group) == {0: (1, 3), 1: (0, 0)}
    assert sorted(world.of(0).aborted + world.of(1).aborted) == ["r1", "r2", "r3"]


def test_statistics_are_those_of_all_engines(world):
    world.group(2)
    for rank in (0, 1):
        stats = SchedulerStats(
            num_running=rank + 1,
            num_waiting=10 * rank,
            kv_cache_usage=0.5 * rank,
            prefix_cache=PrefixCacheStats(1, 10, 5),
            num_accepted_by_position=[1] * (rank + 1),
            num_requests_by_adapter={"a": 1, f"own{rank}": 2},
        )
        world.of(rank).sink(EngineCoreOutputs(scheduler_stats=stats))
    merged = world.received[-1].scheduler_stats
    assert (merged.num_running, merged.num_waiting, merged.kv_cache_usage) == (3, 10, 0.25)
    assert merged.prefix_cache == PrefixCacheStats(2, 20, 10)
    assert merged.num_accepted_by_position == [2, 1]
    assert merged.num_requests_by_adapter == {"a": 2, "own0": 2, "own1": 2}


# Control calls


def test_a_call_goes_to_all_and_one_answer_is_made(world):
    group = world.group(2)
    answers = {
        "collective_rpc": ([["a"], ["b", "c"]], ["a", "b", "c"]),
        "is_paused": ([True, False], False),
        "supported_tasks": ([["generate"], ["generate"]], ["generate"]),
        "step_faults": (
            [{"x": StepFault(2, "one")}, {"x": StepFault(3, "two"), "y": StepFault(1, "three")}],
            {"x": StepFault(5, "one"), "y": StepFault(1, "three")},
        ),
    }
    for method, (results, expected) in answers.items():
        future = group.call(method, 1)
        for engine, answer in reversed(list(zip(world.engines, results, strict=True))):
            assert not future.done()
            name, args, engine_future = engine.calls[-1]
            assert (name, args) == (method, (1,))
            engine_future.set_result(answer)
        assert future.result(0) == expected


def test_a_partial_failure_names_the_engines(world):
    group = world.group(3)
    future = group.call("reset_prefix_cache")
    for rank, outcome in enumerate((None, RequestError("no such level"), None)):
        engine_future = world.of(rank).calls[-1][2]
        engine_future.set_exception(outcome) if outcome else engine_future.set_result(None)
    with pytest.raises(RequestError, match=r"^engine 1: no such level; 2 of 3 engines succeeded$"):
        future.result(0)


def test_one_error_of_all_engines_is_that_error(world):
    group = world.group(2)
    future = group.call("wake_up")
    for engine in world.engines:
        engine.calls[-1][2].set_exception(HardpointError("it is not asleep"))
    with pytest.raises(HardpointError, match="^it is not asleep$"):
        future.result(0)


def test_an_engine_that_dies_is_left_out_of_a_call(world):
    group = world.group(2)
    future = group.call("is_paused")
    world.of(0).calls[-1][2].set_exception(EngineDeadError("killed"))
    world.of(1).calls[-1][2].set_result(True)
    assert future.result(0) is True
    last = group.call("is_paused")
    for engine in world.engines:
        engine.calls[-1][2].set_exception(EngineDeadError("killed"))
    with pytest.raises(EngineDeadError, match="killed"):
        last.result(0)


def test_an_engine_that_is_shutting_down_is_left_out_of_a_call(world):
    world.answered |= {"pause", "call_part", "why_waiting", "is_paused"}
    group = world.group(2)

    def refuse(*_):
        raise EngineDeadError("the engine is shutting down")

    world.of(1).call = refuse
    calls = [("pause", "keep", False), ("call_part", "prompts", "ask"), ("why_waiting", [])]
    for method, *args in calls:
        group.call(method, *args)
        assert method in world.of(0).called
    assert group.call("pause", "keep", False).result(PATIENCE_S) is None
    world.of(0).call = refuse
    with pytest.raises(EngineDeadError, match="is shutting down"):
        group.call("pause", "keep", False).result(PATIENCE_S)


def test_each_engine_is_asked_why_its_own_requests_wait(world):
    group = world.group(2)
    group.add_requests(names("r", 4))
    future = group.call("why_waiting", ["r3", "r0", "r2"])
    ids_by_engine = [engine.calls[-1][1][0] for engine in world.engines]
    assert ids_by_engine == [["r0", "r2"], ["r3"]]
    world.of(0).calls[-1][2].set_result(["because", None])
    world.of(1).calls[-1][2].set_result(["therefore"])
    assert future.result(0) == ["therefore", "because", None]
    last = group.call("why_waiting", ["r3", "r0"])
    world.of(0).calls[-1][2].set_exception(EngineDeadError("killed"))
    world.of(1).calls[-1][2].set_result(["therefore"])
    assert last.result(0) == ["therefore", None]


def test_a_part_that_is_not_done_is_asked_again_where_it_is_not(world):
    group = world.group(2)
    args = ("adapters", "poll", {"ticket": 7})
    first = group.call("call_part", *args)
    world.of(0).calls[-1][2].set_result({"name": "a"})
    world.of(1).calls[-1][2].set_result(None)
    assert first.result(0) is None
    second = group.call("call_part", *args)
    assert [len(engine.calls) for engine in world.engines] == [1, 2]
    world.of(1).calls[-1][2].set_result({"name": "a"})
    assert second.result(0) == {"name": "a"}
    third = group.call("call_part", "adapters", "list")
    for engine, content in zip(world.engines, "xy", strict=True):
        engine.calls[-1][2].set_result([{"name": "a", "content_hash": content}])
    with pytest.raises(HardpointError, match="list: the engines answered differently"):
        third.result(0)
    released = group.call("call_part", "retention", "release", {})
    for engine, answer in zip(world.engines, ("missing", "accepted"), strict=True):
        engine.calls[-1][2].set_result(answer)
    assert released.result(0) == "accepted"


def test_a_part_that_was_done_by_an_engine_that_died_is_asked_of_its_successor(world):
    group = world.group(2, restarts=1)
    args = ("weight_updates", "poll", {"ticket": 7})
    first = group.call("call_part", *args)
    world.of(0).calls[-1][2].set_result(None)
    world.of(1).calls[-1][2].set_result(True)
    assert first.result(0) is None
    world.of(1).die(killed=True)
    wait_until(lambda: len(world.engines) == 3 and set(group.pids) == {0, 1}, what="the restart")
    second = group.call("call_part", *args)
    world.of(0).calls[-1][2].set_result(True)
    world.of(1).calls[-1][2].set_exception(HardpointError("no weights are prepared"))
    with pytest.raises(HardpointError, match="^engine 1: no weights are prepared; 1 of 2 engines"):
        second.result(0)


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_a_part_is_done_if_the_engine_that_is_not_done_dies(world, is_asked_again):
    group = world.group(2)
    args = ("weight_updates", "poll", {"ticket": 7})
    first = group.call("call_part", *args)
    world.of(0).calls[-1][2].set_result(True)
    world.of(1).calls[-1][2].set_result(None)
    assert first.result(0) is None
    if is_asked_again:
        second = group.call("call_part", *args)
        world.of(1).calls[-1][2].set_exception(EngineDeadError("killed"))
    else:
        world.of(1).die(killed=True)
        wait_until(lambda: set(group.pids) == {0}, what="the death")
        second = group.call("call_part", *args)
    assert second.result(0) is True
    assert len(world.of(0).calls) == 1


def test_cancelling_a_call_cancels_it_everywhere(world):
    group = world.group(2)
    future = group.call("pause", "wait")
    assert future.cancel()
    assert all(engine.calls[0][2].cancelled() for engine in world.engines)


def test_requests_that_time_out_keep_the_time_that_is_left(world):
    group = world.group(2)
    timed = msgspec.structs.replace(request("a"), timeout=600.0)
    group.add_request(timed)
    world.of(0).die(killed=True)
    assert 0 < world.of(1).sent[0].timeout <= 600.0


def test_nothing_is_served_after_closing(world):
    group = world.group(2)
    group.close()
    group.close()
    assert all(engine.closed for engine in world.engines)
    with pytest.raises((EngineClosedError, EngineDeadError)):
        group.add_request(request("late"))


def test_it_may_be_closed_in_a_thread_that_closing_waits_for(world, monkeypatch):
    """The collector runs in any thread, also in a reader."""
    group = world.group(2)
    reader, waited_for = threading.Thread(target=group.close, name=READER_THREAD), []

    def close(engine):
        reader.join(PATIENCE_S)
        waited_for.append(reader.is_alive())
        engine.closed = True

    monkeypatch.setattr(Engine, "close", close)
    reader.start()
    wait_until(lambda: all(engine.closed for engine in world.engines), what="the end")
    assert waited_for == [False, False]
