"""Engines that are dead, about to end, or take no messages: which are counted and chosen."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from support.core.played_engines import names, request
from support.waiting import PATIENCE_S, wait_until

from hardpoint import EngineDeadError
from hardpoint.host.boundary.errors import rejection_output
from hardpoint.plugins import EngineCoreOutputs, RequestError
from hardpoint.plugins.requests.engine_state import EngineLoad
from hardpoint.plugins.server.engine_set import EngineSet
from hardpoint.replicas import dispatch
from hardpoint.replicas.replica import Replica, ReplicaView
from hardpoint.replicas.sessions import Sessions
from hardpoint.replicas.statistics import PrefillRate

LEAVING = EngineLoad(num_running=0, num_waiting=0, kv_cache_usage=0.0, is_leaving=True)


@pytest.fixture
def one_dead(world):
    """Return a function that opens two engines, one of them dead for good."""

    def opened(dead):
        group = world.group(2)
        world.of(dead).die(killed=True)
        wait_until(lambda: len(group.pids) == 1, what="the death")
        return group

    return opened


@pytest.mark.parametrize("dead", [0, 1])
def test_scaling_counts_engines_that_live(one_dead, dead):
    group = one_dead(dead)
    assert set(group.scale(1, 0.0).ranks) == {0, 1}  # nothing changes
    assert set(group.pids) == {1 - dead}


@pytest.mark.parametrize(("count", "ranks"), [(2, (0, 1)), (3, (0, 1, 2))])
@pytest.mark.parametrize("dead", [0, 1])
def test_scaling_replaces_a_dead_engine(one_dead, dead, count, ranks):
    group = one_dead(dead)
    assert group.scale(count, 0.0) == EngineSet(1, ranks)
    assert set(group.pids) == set(ranks)


def test_the_last_engine_that_lives_is_not_retired(one_dead):
    group = one_dead(1)
    message = "retire: expected that an engine is left, got all that are not dead"
    with pytest.raises(RequestError, match=message):
        group.retire([0], 0.0)
    assert group.retire([1], 0.0) == EngineSet(1, (0,))


def test_where_all_are_dead_none_is_started(one_dead, world):
    group = one_dead(1)
    world.of(0).die(killed=True)
    with pytest.raises(EngineDeadError, match="scale: expected an engine that lives; all are dead"):
        group.scale(2, 0.0)


def test_an_engine_that_drains_serves_again_where_the_others_die(world):
    group = world.group(2)
    group.add_requests(names("r", 2))
    change = threading.Thread(target=lambda: group.retire([1], 600.0))
    change.start()
    wait_until(lambda: len(group.pids) == 1, what="the draining")
    world.of(0).die(killed=True)
    wait_until(lambda: world.of(1).ids == ["r1", "r0"], what="the request of the dead engine")
    world.of(1).give("r0", 1, finish=1)
    world.of(1).give("r1", 1, finish=1)
    change.join(PATIENCE_S)
    assert set(group.pids) == {1}


def test_requests_that_move_are_admitted_already(world):
    group = world.group(2)
    group.add_requests(names("r", 4))
    assert not any(sent.is_admitted for engine in world.engines for sent in engine.sent)
    world.of(1).give("r1", 5)
    world.of(1).die(killed=True)
    wait_until(lambda: len(world.of(0).sent) == 4, what="the requests of the dead engine")
    moved = {sent.request_id: sent.is_admitted for sent in world.of(0).sent}
    assert moved == {"r0": False, "r2": False, "r1": True, "r3": True}


def test_an_engine_that_is_about_to_end_gets_nothing_and_loses_nothing(world):
    group = world.group(2)
    group.add_requests(names("r", 2))
    leaving, other = world.of(1), world.of(0)
    leaving.sink(EngineCoreOutputs(load=LEAVING))
    assert [status.state for status in group.load().engines] == ["serving", "draining"]
    group.add_requests(names("s", 2))
    assert leaving.ids == ["r1"]
    shutting_down = EngineDeadError("the engine is shutting down")
    leaving.sink(rejection_output("r1", shutting_down))  # it came too late
    assert other.ids == ["r0", "s0", "s1", "r1"]
    assert world.outputs("r1") == []


def test_an_engine_that_takes_no_messages_gets_none(world, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    group = world.group(2)
    stuck, other = world.of(1), world.of(0)
    stuck.is_full = True
    attempt = group.offer_requests(names("r", 2))
    assert not attempt()
    clock[0] = 5.0
    assert attempt()
    assert other.ids == ["r0", "r1"]
    assert not other.sent[1].is_admitted  # no engine has taken it
    group.add_requests(names("s", 2))
    assert other.ids == ["r0", "r1", "s0", "s1"]
    waiting = group.offer_requests([request("pinned", data_parallel_rank=1)])
    assert waiting()
    assert stuck.ids == []
    stuck.is_full = False
    stuck.sink(EngineCoreOutputs())  # it reads again
    assert stuck.ids == ["pinned"]


def test_the_only_engine_that_takes_no_messages_keeps_its_callers_waiting(world, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    group = world.group(1)
    world.of(0).is_full = True
    attempt = group.offer_requests(names("r", 1))
    assert not attempt()
    clock[0] = 5.0
    assert not attempt()  # so that its sender gets an EngineTimeoutError
    world.of(0).is_full = False
    assert attempt()


def test_a_balancer_sees_engines_and_cannot_change_them():
    replica = Replica(3, Sessions(), PrefillRate())
    replica.add("r", 7)
    view = ReplicaView(replica)
    assert (view.rank, view.in_flight, view.pending_prompt_tokens) == (3, 1, 7)
    with pytest.raises(AttributeError):
        view.in_flight = 0
    with pytest.raises(AttributeError):
        view.is_serving = False
