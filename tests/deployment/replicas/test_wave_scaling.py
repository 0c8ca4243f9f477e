"""The number of engines that share experts changes: another set takes the place of all."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import msgspec
import pytest
from support.core.played_engines import names, request
from support.waiting import PATIENCE_S, wait_until

from hardpoint.errors import EngineClosedError, EngineTimeoutError
from hardpoint.plugins import (
    EngineCoreOutputs,
    FinishReason,
    HardpointError,
    ModelError,
    RequestError,
)
from hardpoint.plugins.server.engine_set import EngineSet


@pytest.fixture
def waves(world):
    """Two engines that share experts, and pause when they are asked to."""
    world.answered = {"pause", "resume"}
    return world.group(2, expert=True, restarts=9)


def parallel(engine):
    start = engine.start
    hosts = None if start.engines is None else len(start.engines.hosts)
    return start.config.parallel.data, hosts, start.config.kv_cache.num_blocks


@contextmanager
def changing(change):
    """Run a change in a thread, with its answer or error in the list; it ends with the block."""
    ended = []

    def run():
        try:
            ended.append(change())
        except HardpointError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield ended
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def assert_goes_on(world, group, engines):
    """The engines serve as before, and their replacements are closed."""
    assert [world.engines[i].closed for i in range(len(world.engines))] == [
        engine not in engines for engine in world.engines
    ]
    assert list(group.pids.values()) == [engine.pid for engine in engines]
    group.add_requests(names("after", len(engines)))
    assert all(engine.ids[-1].startswith("after") for engine in engines)


def test_requests_go_on_at_the_others(world, waves):
    before = list(world.engines)
    waves.add_requests(names("r", 2))
    before[0].give("r0", 5, 6)
    assert waves.scale(4, 30.0) == EngineSet(1, (0, 1, 2, 3))
    assert [engine.called for engine in before] == [["pause"]] * 2
    assert before[0].calls[0][1] == ("keep", False)
    after = world.engines[2:]
    assert [engine.closed for engine in world.engines] == [True] * 2 + [False] * 4
    assert {parallel(engine) for engine in after} == {(4, 4, 64)}
    moved = {sent.request_id: sent for engine in after for sent in engine.sent}
    assert moved["r0"].resumed.output_token_ids == [5, 6]
    assert moved["r1"].resumed is None
    before[0].give("r0", 7)  # too late
    for engine in after:
        for name in engine.ids:
            engine.give(name, 8, finish=FinishReason.STOP)
    assert [world.tokens(name) for name in ("r0", "r1")] == [[5, 6, 8], [8]]
    assert [world.outputs(name)[-1].num_resumes for name in ("r0", "r1")] == [1, 1]
    assert [engine.in_flight for engine in waves.load().engines] == [0] * 4


def test_one_engine_needs_no_other(world, waves):
    assert waves.scale(1, 0.0) == EngineSet(1, (0,))
    assert parallel(world.engines[-1]) == (1, None, 64)
    assert waves.scale(1, 0.0) == EngineSet(1, (0,))
    assert waves.scale(3, 0.0) == EngineSet(2, (0, 1, 2))
    assert parallel(world.engines[-1]) == (3, 3, 64)


def test_requests_that_name_an_engine(world, waves):
    for rank in (0, 1):
        waves.add_request(request(f"at{rank}", data_parallel_rank=rank))
    assert waves.retire([1], 0.0) == EngineSet(1, (0,))
    assert world.engines[-1].ids == ["at0"]
    assert world.error("at1") == (
        "engine 1 was retired; the request names that engine (data_parallel_rank)"
    )


def test_a_suspect_that_waits_for_an_engine_that_goes(world, waves):
    waves.add_requests([request(name, data_parallel_rank=1) for name in ("first", "second")])
    world.of(1).die("first", "second")
    wait_until(lambda: len(waves.pids) == 2, what="the restart")
    wait_until(lambda: world.of(1).ids == ["first"], what="the first suspect")
    assert waves.scale(1, 0.0) == EngineSet(1, (0,))
    for name in ("first", "second"):
        assert world.error(name).startswith("engine 1 was retired; the request names that engine")


def test_engines_that_cannot_be_started(world, waves):
    before = list(world.engines)
    waves.add_requests(names("r", 2))
    world.failing[2] = [ModelError("parallel.data: 4 experts cannot be spread over 3 engines")]
    with pytest.raises(ModelError, match="^engine 2 of 3: parallel.data: 4 experts cannot be spr"):
        waves.scale(3, 0.0)
    assert [engine.called for engine in before] == [[], []]
    assert_goes_on(world, waves, before)
    assert waves.scale(4, 0.0) == EngineSet(1, (0, 1, 2, 3))


def test_one_that_has_started_dies_before_it_serves(world, waves):
    before = list(world.engines)
    world.answered = {"resume"}
    with changing(lambda: waves.scale(3, 0.0)) as ended:
        wait_until(lambda: before[1].calls, what="the pause")
        world.of(2).die()
        for engine in before:
            engine.calls[0][-1].set_result(None)
    assert str(ended[0]) == "it fell over"
    assert [engine.called for engine in before] == [["pause", "resume"]] * 2
    assert_goes_on(world, waves, before)


def test_an_engine_dies_while_others_start(world, waves):
    waves.add_requests(names("r", 2))
    world.hold = threading.Event()
    with changing(lambda: waves.scale(3, 0.0)) as ended:
        wait_until(lambda: world.num_spawned == 5, what="the processes")
        world.of(1).die(killed=True)
        wait_until(lambda: ended, what="the error")
    assert str(ended[0]).startswith("scale: expected engines that serve; one has died, so try")
    wait_until(lambda: len(waves.pids) == 2, what="the restart")
    serving = [engine for engine in world.engines if engine.pid in waves.pids.values()]
    assert sorted(name for engine in serving for name in engine.ids) == ["r0", "r1"]
    assert [parallel(engine)[:2] for engine in serving] == [(2, 2)] * 2


def test_an_engine_dies_in_the_pause(world, waves):
    world.answered = {"resume"}
    with changing(lambda: waves.scale(3, 0.0)) as ended:
        wait_until(lambda: world.engines[1].calls, what="the pause")
        world.engines[1].die(killed=True)
        for engine in world.engines[:2]:
            engine.calls[0][-1].set_result(None)
    assert str(ended[0]).startswith("scale: expected engines that serve; one has died, so try")
    wait_until(lambda: set(waves.pids) == {0, 1}, what="the restart")


def test_engines_that_do_not_pause_in_time(world):
    waves = world.group(2, expert=True, restarts=9, call_timeout_seconds=0.2)
    before = list(world.engines)
    waves.add_requests(names("r", 2))
    world.answered = {"resume"}
    with pytest.raises(EngineTimeoutError, match="^scale: the engines did not pause within 0.2 s"):
        waves.scale(4, 0.0)
    assert [engine.called for engine in before] == [["pause", "resume"]] * 2
    assert_goes_on(world, waves, before)


def test_an_engine_that_cannot_pause(world, waves):
    before = list(world.engines)
    world.answered = {"resume"}
    with changing(lambda: waves.scale(4, 0.0)) as ended:
        wait_until(lambda: before[1].calls, what="the pause")
        before[1].calls[0][-1].set_exception(HardpointError("it was resumed meanwhile"))
    assert str(ended[0]) == "it was resumed meanwhile"
    assert_goes_on(world, waves, before)


def test_paused_engines_are_left_as_they_are(world, waves):
    before = list(world.engines)
    waves.call("pause", "keep", False)
    with pytest.raises(HardpointError, match="^scale: expected engines that are neither paused"):
        waves.scale(4, 0.0)
    assert len(world.engines) == 2
    assert "resume" not in before[0].called


def test_engines_that_are_paused_during_the_change_stay_paused(world, waves):
    before = list(world.engines)
    world.hold = threading.Event()
    with changing(lambda: waves.scale(4, 0.0)) as ended:
        wait_until(lambda: world.num_spawned == 6, what="the processes")
        waves.call("pause", "keep", False)
        world.hold.set()
    assert str(ended[0]).startswith("scale: expected engines that are neither paused")
    assert "resume" not in before[0].called
    assert list(waves.pids.values()) == [engine.pid for engine in before]


def test_settings_that_change_meanwhile(world, waves):
    before = list(world.engines)
    start = before[0].start
    world.hold = threading.Event()
    changed = msgspec.structs.replace(start.config, max_model_len=77)
    with changing(lambda: waves.scale(3, 0.0)) as ended:
        wait_until(lambda: world.num_spawned == 5, what="the processes")
        waves.restart_with(changed, start.manifest)
        world.hold.set()
    assert ended == [EngineSet(1, (0, 1, 2))]
    assert [engine.closed for engine in world.engines[2:5]] == [True] * 3
    assert {engine.start.config.max_model_len for engine in world.engines[5:]} == {77}


def test_engines_that_are_restarted_are_as_many(world, waves):
    start = world.engines[0].start
    waves.scale(4, 0.0)
    waves.restart_with(start.config, start.manifest)
    world.of(3).die(killed=True)
    wait_until(lambda: len(world.engines) == 10 and len(waves.pids) == 4, what="the restart")
    assert {parallel(engine)[:2] for engine in world.engines[6:]} == {(4, 4)}


def test_the_end_of_the_program_in_a_change(world, waves):
    world.hold = threading.Event()
    with changing(lambda: waves.scale(4, 0.0)) as ended:
        wait_until(lambda: world.num_spawned == 6, what="the processes")
        waves.close()
    assert isinstance(ended[0], EngineClosedError)
    assert all(engine.closed for engine in world.engines)


def test_one_change_of_engines_that_share_experts_at_a_time(world, waves):
    world.hold = threading.Event()
    with changing(lambda: waves.scale(3, 0.0)) as ended:
        wait_until(lambda: world.num_spawned == 5, what="the processes")
        with pytest.raises(HardpointError, match="^scale: the engines are being changed already"):
            waves.scale(1, 0.0)
        world.hold.set()
    assert ended == [EngineSet(1, (0, 1, 2))]


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        ([0], "^retire: expected the highest of the ranks 0, 1, since .* without gaps, got"),
        ([0, 1], "^retire: expected that an engine is left"),
        ([2], "^retire: expected ranks of 0, 1, got 2"),
    ],
)
def test_engines_that_cannot_be_retired(waves, ranks, error):
    with pytest.raises(RequestError, match=error):
        waves.retire(ranks, 0.0)
    assert tuple(waves.ranks) == (0, 1)


def test_the_others_have_waves_of_their_own(world, waves):
    before = list(world.engines)
    before[0].sink(EngineCoreOutputs(start_wave=0))
    before[1].sink(EngineCoreOutputs(start_wave=1))
    waves.scale(3, 0.0)
    after = world.engines[2:]
    before[0].sink(EngineCoreOutputs(start_wave=2))  # too late
    assert [engine.called for engine in after] == [[], [], []]
    after[1].sink(EngineCoreOutputs(start_wave=0))
    assert [engine.called for engine in after] == [["start_wave"], [], ["start_wave"]]
