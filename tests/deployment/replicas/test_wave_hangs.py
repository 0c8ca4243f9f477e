"""Which of several engines that wait for each other is to blame if one hangs."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from support.core.played_engines import names
from support.waiting import wait_until

from hardpoint.errors import EngineDeadError, EngineFaultError
from hardpoint.host.boundary.activity import PluginCall, Snapshot
from hardpoint.host.system.arrivals import Arrivals, count_arrivals
from hardpoint.plugins.parallel import Placement

IN_SLOW = PluginCall("logits_processors", "slow", "plugin 'slow' (acme:Slow)", "apply")


class Rank:
    """A communicator that waits for nobody."""

    def __init__(self, folder, rank, group="engines-0"):
        placement = Placement(hosts=("", ""), folder=str(folder))
        self.context = SimpleNamespace(placement=placement, group=group, rank=rank)
        self.broadcast = self.all_to_all = self.all_gather = self.all_reduce = lambda *arguments: (
            arguments
        )
        count_arrivals(self)


def test_arrivals_are_counted_by_group(tmp_path):
    layers = [Rank(tmp_path, rank) for rank in range(3)]
    agreement = [Rank(tmp_path, rank, "waves") for rank in range(3)]
    arrivals = Arrivals(tmp_path)
    assert arrivals.late() == set()
    assert layers[0].all_gather(1) == (1,)
    assert arrivals.late() == {1, 2}
    for rank in (1, 2):
        layers[rank].all_to_all(1)
    assert arrivals.late() == set()
    assert agreement[2].all_reduce(1) == (1,)
    agreement[0].broadcast(1, 2)
    assert arrivals.late() == {1}
    assert Arrivals(tmp_path / "none").late() == set()


@pytest.fixture
def ranks(world, monkeypatch, tmp_path):
    """The communicators of two engines of a group that restarts them."""
    communicators = [Rank(tmp_path, rank) for rank in range(2)]
    monkeypatch.setattr("hardpoint.replicas.waves.replicas.Arrivals", lambda _: Arrivals(tmp_path))
    world.shared = world.group(2, expert=True, restarts=9, max_resumes=9)
    return communicators


def hang(world, rank, error=None):
    world.of(rank).sink(error or EngineDeadError("a step takes too long"))


class Watcher:
    def __init__(self):
        self.deaths = []

    def died(self, death):
        self.deaths.append(death)
        return EngineDeadError(str(death.error))


def test_the_one_that_did_not_come_is_to_blame(world, ranks, monkeypatch):
    killed = []
    monkeypatch.setattr("os.kill", lambda *arguments: killed.append(arguments))
    group, watcher = world.shared, Watcher()
    group.watch_deaths(watcher.died)
    group.add_requests(names("r", 2))
    ranks[0].all_gather(1)
    world.of(1).last = Snapshot(call=IN_SLOW, in_step=frozenset({"r1"}))
    world.of(0).last = Snapshot(in_step=frozenset({"r0"}))
    hang(world, 0)
    (death,) = watcher.deaths
    assert str(death.error) == (
        "engine 1 (pid 101) does not go on, in apply() of plugin 'slow' (acme:Slow); engine 0 "
        "waited for it: a step takes too long"
    )
    assert (death.call, death.in_step) == (IN_SLOW, {"r1"})
    wait_until(lambda: set(group.pids) == {0, 1}, what="the restart")
    assert len(watcher.deaths) == 1
    assert killed == [(101, signal.SIGKILL)]


@pytest.mark.parametrize(
    ("late", "error"),
    [
        ((0,), None),
        ((), None),
        ((1,), EngineFaultError("plugin 'x' failed")),
    ],
)
def test_otherwise_it_is_the_one_that_was_found(world, ranks, late, error):
    watcher = Watcher()
    world.shared.watch_deaths(watcher.died)
    for rank, communicator in enumerate(ranks):
        if late and rank not in late:
            communicator.all_gather(1)
    hang(world, 0, error)
    (death,) = watcher.deaths
    assert str(death.error) == str(error or "a step takes too long")


def test_one_that_was_killed_blames_nobody(world, ranks):
    watcher = Watcher()
    world.shared.watch_deaths(watcher.died)
    ranks[0].all_gather(1)
    world.of(0).die(killed=True)
    assert [str(death.error) for death in watcher.deaths] == ["it fell over"]
