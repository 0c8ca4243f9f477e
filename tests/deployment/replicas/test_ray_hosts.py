"""Engines on Ray, without Ray: the test plays the cluster and the engines in its actors."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future

import msgspec
import pytest
from support.joining import HELLO, NO_PLUGINS, Peer, free_address
from support.waiting import PATIENCE_S, wait_until

from hardpoint import LLM
from hardpoint.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    HardpointError,
    ModelError,
    PluginLoadError,
)
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.launch import Launch
from hardpoint.replicas.on_ray import hosts
from hardpoint.replicas.on_ray.actor import ActorLaunch, EngineActor
from hardpoint.replicas.remote import joined_host, listener
from hardpoint.replicas.remote.comparison import hello_of
from hardpoint.replicas.remote.messages import MessageKind, RemoteFailure, decode, encode
from hardpoint.testing import scripted_config
from hardpoint.toolkit.ray_cluster import RayNode


class PlayedActor:
    """An actor that keeps its launch."""

    def __init__(self, launch_of):
        self.node = RayNode("f" * 20, "10.0.0.7", "b", {})
        self.running, self.is_ended = Future(), False
        self.given = decode(launch_of(self.node), ActorLaunch)

    def failure(self, error):
        return HardpointError(f"{self.node}: {error}")

    def end(self):
        self.is_ended = True


class PlayedCluster:
    """A cluster with room, unless it is full; how it was asked is kept."""

    address, nodes, num_per_node = "127.0.0.1", [], 3

    def __init__(self, parallel):
        self.actors, self.waits = [], []
        self.is_full = self.is_closed = False
        PlayedCluster.last = self

    def place(self, launch_of, *, timeout_s, is_cancelled, waits):
        self.waits.append(waits)
        if self.is_full:
            wait_until(is_cancelled, timeout_s, "room")
            raise HardpointError("no room")
        self.actors.append(PlayedActor(launch_of))
        return self.actors[-1]

    def close(self):
        self.is_closed = True


class NoLocal:
    def open(self, rank, interpreter):
        raise AssertionError(f"engine {rank} is not local")

    def close(self):
        pass


class Places:
    """The hosts of a head, and the processes started with them."""

    def __init__(self, config):
        self.config = config
        self.hosts = hosts.RayHosts(config, NoLocal())
        self.cluster = PlayedCluster.last
        self.peers, self.threads, self.open, self.sockets = [], [], [], []

    def launch(self, rank=0, manifest=NO_PLUGINS, main_objects=b"", **kv_cache):
        """Start an engine; return its host, and where the error of its launch will be."""
        host, errors = self.hosts.open(rank, None), []
        config = msgspec.to_builtins(self.config) | {"kv_cache": kv_cache}
        self.sockets.append(EngineSockets(rank))
        addresses = msgspec.json.encode(self.sockets[-1].addresses).decode()
        launch = Launch(
            address=addresses,
            manifest=manifest,
            config=config,
            engine_index=rank,
            main_objects=main_objects,
        )

        def run():
            try:
                host.launch(launch)
            except HardpointError as error:
                errors.append(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        self.open.append(host)
        return host, errors

    def actor(self, number=0):
        wait_until(lambda: len(self.cluster.actors) > number, PATIENCE_S, "the actor")
        return self.cluster.actors[number]

    def join(self, actor, **fields):
        """Play the engine of an actor."""
        peer = Peer(actor.given.address, actor.given.keys)
        self.peers.append(peer)
        hello = hello_of(self.config)
        peer.join(hello, rank=actor.given.rank, host=actor.given.node, **fields)
        self.returned()
        return peer

    def returned(self):
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def close(self):
        for host in self.open:
            host.close(0)
        self.returned()
        for resource in (*self.peers, *self.sockets, self.hosts):
            resource.close()


@pytest.fixture
def places(scripted, monkeypatch):
    opened = []

    def open_places(**parallel):
        monkeypatch.setattr(hosts, "EngineCluster", PlayedCluster)
        monkeypatch.setattr(listener, "_INTERVAL_S", 0.1)
        monkeypatch.setattr(joined_host, "_NETWORK_S", 0.1)  # peers do not obey
        table = {"data": 2, "ray": {}, "join_seconds": PATIENCE_S, "heartbeat_seconds": 600.0}
        config = scripted_config(scripted, {"parallel": table | parallel})
        opened.append(Places(msgspec.convert(config, EngineConfig)))
        return opened[-1]

    yield open_places
    for place in opened:
        place.close()
        assert place.cluster.is_closed


def test_an_engine_joins_with_the_key_of_its_launch_which_ends_with_it(places):
    started = places()
    host, errors = started.launch(1)
    actor = started.actor()
    assert actor.given.address.startswith("tcp://127.0.0.1:")
    assert (actor.given.rank, actor.given.num_sharing) == (1, 3)
    peer = started.join(actor)
    assert not errors
    assert host.label == (
        "joined engine process (pid 4711 on Ray node 10.0.0.7 (b, id ffffffffffff), key of engine "
        "1)"
    )
    stranger = Peer(actor.given.address)
    stranger.socket.send_multipart([MessageKind.HELLO, b"", encode(HELLO)])
    assert stranger.get(MessageKind.WELCOME, MessageKind.REFUSED, seconds=0.3) is None
    stranger.close()
    host.close(0)
    assert actor.is_ended
    assert peer.get(MessageKind.GONE) is not None
    again = Peer(actor.given.address, actor.given.keys)
    again.socket.send_multipart([MessageKind.HELLO, b"", encode(HELLO)])
    assert again.get(MessageKind.WELCOME, MessageKind.REFUSED, seconds=0.3) is None
    again.close()


def test_memory_is_divided_only_for_the_engine_that_finds_the_size_of_caches(places):
    started = places()
    started.launch(1, num_blocks=7)
    assert started.actor().given.num_sharing == 1


def test_what_an_actor_cannot_run_ends_its_launch_at_once(places):
    started = places()
    _, errors = started.launch(0)
    report = RemoteFailure(kind="ModelError", message="the model is not there", notes=["look"])
    started.actor().running.set_result(encode(report))
    started.returned()
    (error,) = errors
    assert isinstance(error, ModelError)
    assert str(error) == "Ray node 10.0.0.7 (b, id ffffffffffff): the model is not there"
    assert error.__notes__ == ["look"]


def test_an_actor_that_dies_before_it_has_joined_ends_its_launch(places):
    started = places()
    _, errors = started.launch(0)
    started.actor().running.set_exception(RuntimeError("the node died"))
    started.returned()
    assert str(errors[0]) == "Ray node 10.0.0.7 (b, id ffffffffffff): the node died"


def test_a_plugin_that_the_program_defines_itself_is_refused(places):
    started = places()
    fields = {
        "kind": "samplers",
        "name": "a",
        "value": "__main__:A",
        "distribution": "",
        "version": "",
    }
    manifest = msgspec.structs.replace(NO_PLUGINS, entries=(PluginEntry(**fields),))
    _, errors = started.launch(0, manifest, b"pickled")
    started.returned()
    assert isinstance(errors[0], PluginLoadError)
    assert str(errors[0]).endswith(
        "expected a plugin of a module that is on each node of Ray (parallel.ray), got "
        "'__main__:A', which this program defines itself"
    )


def test_closing_ends_the_waiting_for_room_and_for_an_engine(places):
    started = places()
    host, errors = started.launch(0)
    actor = started.actor()
    host.close(0)
    started.returned()
    started.cluster.is_full = True
    other, _ = started.launch(1)
    wait_until(lambda: len(started.cluster.waits) == 2, PATIENCE_S, "the waiting")
    other.close(0)
    started.returned()
    assert actor.is_ended
    assert isinstance(errors[0], EngineClosedError)


def test_only_an_engine_that_was_lost_waits_for_nodes_that_are_not_there(places):
    started = places()
    host, _ = started.launch(0)
    peer = started.join(started.actor())
    peer.send(b"?")
    wait_until(lambda: host.has_ended, PATIENCE_S, "the end")
    assert host.was_killed
    host.close(0)
    started.launch(0)
    again = started.actor(1)
    started.join(again)
    started.launch(1)
    started.join(started.actor(2))
    assert started.cluster.waits == [False, True, False]
    started.open[1].close(0)  # as asked for
    started.launch(0)
    started.join(started.actor(3))
    assert started.cluster.waits[3:] == [False]


def test_no_room_for_an_engine_that_was_lost_is_a_death_that_may_be_tried_again(places):
    started = places()
    host, _ = started.launch(0)
    started.join(started.actor()).send(b"?")
    wait_until(lambda: host.has_ended, PATIENCE_S, "the end")
    started.cluster.place = refuse
    for _ in range(2):
        _, errors = started.launch(0)
        started.returned()
        assert isinstance(errors[0], EngineDeadError)
    _, errors = started.launch(1)
    started.returned()
    assert not isinstance(errors[0], EngineDeadError)


def refuse(*_, **__):
    raise HardpointError("no room")


def test_an_address_that_other_nodes_do_not_reach_is_refused(places, monkeypatch):
    monkeypatch.setattr(PlayedCluster, "nodes", [RayNode("e" * 20, "10.0.0.7", "b", {})])
    message = (
        r"^parallel.join_address: expected an address of this node that Ray node 10.0.0.7 \(b, id "
        r"eeeeeeeeeeee\) reaches, got none, and the address of this node in Ray is 127.0.0.1$"
    )
    with pytest.raises(ConfigError, match=message):
        places()
    places(join_address=free_address())


def test_without_ray_the_error_has_the_command_to_install_it(scripted, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    config = scripted_config(scripted, {"parallel": {"data": 2, "ray": {}}})
    with pytest.raises(ConfigError, match=r"^parallel.ray: .* pip install '\S*hardpoint\[ray\]'"):
        LLM(config=config)


def test_what_an_actor_lacks_is_its_answer(tmp_path):
    launch = ActorLaunch(
        address="tcp://127.0.0.1:1",
        keys=hosts.LaunchKeys().make("a"),
        rank=0,
        node="n",
        config={"model": str(tmp_path / "none")},
        num_sharing=1,
    )
    actor = EngineActor.__new__(EngineActor)  # which would redirect the output of the tests
    report = decode(actor.run(encode(launch)), RemoteFailure)
    assert report.kind == "ModelError"
    assert str(tmp_path / "none") in report.message
