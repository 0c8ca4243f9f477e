"""The number of engines changes while they serve."""

from __future__ import annotations

import threading

import pytest
from support.core.played_engines import Engine, loads, names, request
from support.waiting import PATIENCE_S, wait_until

from hardpoint import EngineDeadError
from hardpoint.plugins import FinishReason, HardpointError, ModelError, RequestError
from hardpoint.plugins.server.engine_set import EngineSet


def test_engines_are_added_with_the_lowest_free_ranks(world):
    group = world.group(2)
    assert group.scale(4, 0.0) == EngineSet(1, (0, 1, 2, 3))
    assert set(group.pids) == {0, 1, 2, 3}
    group.add_requests(names("r", 4))
    assert [load[0] for load in loads(group).values()] == [1, 1, 1, 1]
    assert group.scale(4, 0.0) == EngineSet(1, (0, 1, 2, 3))
    assert group.retire([1], 0.0) == EngineSet(2, (0, 2, 3))
    assert group.scale(4, 0.0) == EngineSet(3, (0, 1, 2, 3))


def test_engines_that_go_finish_what_they_have(world):
    group = world.group(3)
    group.add_requests(names("r", 3))
    going, result = world.of(2), []
    change = threading.Thread(target=lambda: result.append(group.scale(2, 600.0)))
    change.start()
    wait_until(lambda: len(group.pids) == 2, what="the draining")
    group.add_requests(names("s", 4))
    assert not any(name.startswith("s") for name in going.ids)
    going.give("r2", 7, finish=FinishReason.STOP)
    change.join(PATIENCE_S)
    assert result == [EngineSet(1, (0, 1))]
    assert going.closed
    assert world.tokens("r2") == [7]


def test_what_is_left_at_the_deadline_goes_on_elsewhere(world):
    group = world.group(2, max_resumes=0)
    group.add_requests(names("r", 2))
    group.add_request(request("pinned", data_parallel_rank=1))
    going = world.of(1)
    going.give("r1", 5)
    assert group.retire([1], 0.05) == EngineSet(1, (0,))
    assert going.closed
    resumed = world.of(0).sent[-1]
    assert (resumed.request_id, resumed.resumed.output_token_ids) == ("r1", [5])
    going.give("r1", 6)  # too late
    assert world.tokens("r1") == [5]
    assert world.error("pinned") == (
        "engine 1 was retired; the request names that engine (data_parallel_rank)"
    )


def test_engines_that_cannot_be_started_are_none_of_them(world):
    group = world.group(2)
    world.failing[3] = [ModelError("weights: memory is short")]
    with pytest.raises(ModelError, match="^engine 3 of 4: weights: memory is short$"):
        group.scale(4, 0.0)
    assert tuple(group.ranks) == (0, 1)
    assert all(engine.closed for engine in world.engines[2:])
    assert group.scale(3, 0.0) == EngineSet(1, (0, 1, 2))


def test_requests_of_an_engine_that_is_added_in_vain_go_on_elsewhere(world):
    group = world.group(1)
    started = threading.Event()

    class Failure(list):
        def pop(self, index):
            assert started.wait(PATIENCE_S)
            return super().pop(index)

    world.failing[2], errors = Failure([ModelError("memory is short")]), []

    def scale():
        try:
            group.scale(3, 0.0)
        except ModelError as error:
            errors.append(str(error))

    change = threading.Thread(target=scale)
    change.start()
    wait_until(lambda: len(group.pids) == 2, what="the first one")
    group.add_requests([*names("r", 4), request("pinned", data_parallel_rank=1)])
    there = world.of(1).ids
    started.set()
    change.join(PATIENCE_S)
    assert errors == ["engine 2 of 3: memory is short"]
    assert there
    assert set(world.of(0).ids) == {"r0", "r1", "r2", "r3"}
    assert world.of(1).closed
    assert world.error("pinned").startswith("engine 1 was retired; ")


def test_one_change_at_a_time(world):
    group = world.group(2)
    world.hold = threading.Event()
    first = threading.Thread(target=lambda: group.scale(3, 0.0))
    first.start()
    wait_until(lambda: world.num_spawned == 3, what="the other process")
    with pytest.raises(HardpointError, match="^scale: the engines are being changed already"):
        group.scale(1, 0.0)
    world.hold.set()
    first.join(PATIENCE_S)
    assert tuple(group.ranks) == (0, 1, 2)


def test_one_that_dies_while_it_drains_is_not_restarted(world):
    group = world.group(2, restarts=5)
    group.add_requests(names("r", 2))
    change = threading.Thread(target=lambda: group.retire([1], 600.0))
    change.start()
    wait_until(lambda: len(group.pids) == 1, what="the draining")
    world.of(1).die(killed=True)
    change.join(PATIENCE_S)
    assert tuple(group.ranks) == (0,)
    assert world.of(0).ids == ["r0", "r1"]
    assert len(world.engines) == 2


def restarting(world, group):
    """Let engine 1 die; its successor starts until `world.hold` is set."""
    world.hold, before = threading.Event(), world.num_spawned
    world.of(1).die(killed=True)
    wait_until(lambda: world.num_spawned > before, what="the restart")
    return group


def test_one_that_is_retired_while_it_is_restarted_does_not_run(world):
    group = restarting(world, world.group(2, restarts=3))
    assert group.retire([1], 0.0) == EngineSet(1, (0,))  # it ends the process that starts
    wait_until(lambda: len(world.engines) == 3 and world.engines[2].closed, what="its end")
    assert set(group.pids) == {0}
    assert group.num_restarts == 0
    assert group.scale(2, 0.0) == EngineSet(2, (0, 1))
    assert world.num_spawned == 4


def test_the_last_engine_that_lives_is_not_retired_while_it_is_restarted(world):
    group = world.group(2, restarts=3)
    world.failing[0] = [ModelError("weights: gone")]
    world.of(0).die(killed=True)
    wait_until(lambda: not world.failing[0], what="the restart that fails")
    restarting(world, group).add_request(request("r"))
    with pytest.raises(RequestError, match="expected that an engine is left, got all that are not"):
        group.retire([1], 0.0)
    world.hold.set()
    wait_until(lambda: world.of(1).ids == ["r"], what="the request at the restarted engine")


def test_one_that_dies_while_its_requests_are_moved_is_gone_as_well(world, monkeypatch):
    group = world.group(3)
    group.add_requests(names("r", 3))
    going, send = world.of(1), Engine.add_requests

    def dying(engine, requests):
        monkeypatch.setattr(Engine, "add_requests", send)
        going.die(killed=True)
        send(engine, requests)

    monkeypatch.setattr(Engine, "add_requests", dying)
    assert group.retire([1], 0.0) == EngineSet(1, (0, 2))
    assert going.closed
    assert "r1" in world.of(0).ids + world.of(2).ids


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda group: group.scale(0, 0.0), "^scale: expected 1 to 1024 engines, got 0$"),
        (lambda group: group.scale(True, 0.0), "^scale: expected 1 to 1024 engines, got True$"),
        (lambda group: group.scale(2000, 0.0), "^scale: expected 1 to 1024 engines, got 2000$"),
        (lambda group: group.retire([7], 0.0), "^retire: expected ranks of 0, 1, got 7$"),
        (lambda group: group.retire([0, 1], 0.0), "^retire: expected that an engine is left, got"),
        (lambda group: group.scale(1, -1.0), "^drain_seconds: expected seconds >= 0, got -1.0$"),
    ],
)
def test_wrong_changes_change_nothing(world, change, error):
    group = world.group(2)
    with pytest.raises(RequestError, match=error):
        change(group)
    assert tuple(group.ranks) == (0, 1)


def test_an_engine_that_is_ended_where_it_runs_is_drained_and_started_again(world):
    group = world.group(2, restarts=1, drain_seconds=600.0)
    group.add_requests(names("r", 2))
    going = world.of(1)
    world.leaving[-1](1)
    wait_until(lambda: set(group.pids) == {0}, what="the draining")
    group.add_requests(names("s", 2))
    assert not going.closed
    going.give("r1", 7, finish=FinishReason.STOP)
    wait_until(lambda: set(group.pids) == {0, 1}, what="another one")
    assert going.closed
    assert world.of(1) is not going
    assert world.tokens("r1") == [7]
    assert loads(group)[0][0] == 3
    assert group.retire([0], 0.0).ranks == (1,)  # it is drained no more


def test_what_has_not_ended_in_time_goes_on_elsewhere(world):
    group = world.group(2)
    group.add_requests(names("r", 2))
    world.leaving[-1](1)
    wait_until(lambda: "r1" in world.of(0).ids, what="the request")
    assert set(group.pids) == {0}
    world.of(0).give("r1", 8, finish=FinishReason.STOP)
    assert world.tokens("r1") == [8]
    world.leaving[-1](1)  # it is not there any more
    world.leaving[-1](0)
    wait_until(lambda: isinstance(world.received[-1], EngineDeadError), what="the end of all")
    assert str(world.received[-1]) == "engine 0 was ended where it runs"
