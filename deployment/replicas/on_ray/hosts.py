"""Engines in actors of a Ray cluster, as their client sees them."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import msgspec
import zmq

from hardpoint.errors import ConfigError, EngineClosedError, EngineDeadError, PluginLoadError
from hardpoint.host.boundary.errors import error_of
from hardpoint.plugins import EngineConfig, HardpointError
from hardpoint.process.child_processes.launch import ChildLaunch
from hardpoint.process.launch import Launch
from hardpoint.replicas.hosts import EngineHosts
from hardpoint.replicas.remote.joined_host import JoinedHost
from hardpoint.replicas.remote.joined_hosts import JoinedHosts
from hardpoint.replicas.remote.listener import ANY_PORT, JoinListener
from hardpoint.replicas.remote.messages import RemoteFailure, decode, encode
from hardpoint.toolkit.curve_keys import KeyPair, is_loopback
from hardpoint.toolkit.ray_cluster import RayNode, listening_address

from .actor import ActorLaunch
from .cluster import EngineCluster, PlacedActor

_log = logging.getLogger("hardpoint")

_GRACE_S = 5.0
_OF_PROGRAM = "__main__:"


class LaunchKeys:
    """Keys of a head and of the engines that it has started, in memory alone.

    Attributes:
        pair: the head's own.
    """

    def __init__(self) -> None:
        public, secret = zmq.curve_keypair()
        self.pair = KeyPair(public, secret, public)
        self._names: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def names(self) -> Mapping[bytes, str]:
        """Return the names of the engines that may connect now, by their public keys."""
        with self._lock:
            return dict(self._names)

    def make(self, name: str) -> KeyPair:
        """Make the keys of an engine."""
        public, secret = zmq.curve_keypair()
        with self._lock:
            self._names[public] = name
        return KeyPair(public, secret, self.pair.public)

    def revoke(self, keys: KeyPair) -> None:
        """Let their owner connect no more; a connection that it has ends."""
        with self._lock:
            self._names.pop(keys.public, None)


class RayHosts(JoinedHosts):
    """Runs engines in Ray actors, which join with keys that each has got when it was started."""

    def __init__(self, config: EngineConfig, local: EngineHosts) -> None:
        """Join the cluster, and listen for engines.

        Args:
            config: has `parallel.ray`.
            local: runs the engines that are local; closed with this.

        Raises:
            ConfigError: Ray is not installed, no cluster answers, it is too small for all engines,
                or the address where engines are to connect cannot be used.
        """
        parallel = config.parallel
        self._cluster, self._keys = EngineCluster(parallel), LaunchKeys()
        self._lost: set[int] = set()
        with contextlib.ExitStack() as undo:
            undo.callback(self._cluster.close)
            address = parallel.join_address
            if address is None:
                address = self._own_address()
            parallel = msgspec.structs.replace(parallel, join_address=address)
            super().__init__(msgspec.structs.replace(config, parallel=parallel), local, self._keys)
            undo.pop_all()

    def _own_address(self) -> str:
        """Return an address of this node with any port.

        Raises:
            ConfigError: other nodes cannot reach it.
        """
        here = self._cluster.address
        outside = [node for node in self._cluster.nodes if not is_loopback(node.address)]
        if is_loopback(here) and outside:
            raise ConfigError(
                f"parallel.join_address: expected an address of this node that {outside[0]} "
                f"reaches, got none, and the address of this node in Ray is {here}"
            )
        return f"tcp://{listening_address(here, 0).removesuffix(':0')}{ANY_PORT}"

    def place(self, rank: int) -> JoinedHost:
        """Return the place of an engine, which is started when it gets its launch."""
        was_lost = rank in self._lost
        self._lost.discard(rank)
        return RayHost(
            self._listener, rank, self._parallel.join_seconds, self._cluster, self._keys,
            self._lost.add, was_lost=was_lost,
        )  # fmt: skip

    def close(self) -> None:
        """Stop listening, and leave the cluster."""
        super().close()
        self._cluster.close()


class RayHost(JoinedHost):
    """An engine in an actor."""

    def __init__(
        self,
        listener: JoinListener,
        rank: int,
        limit_s: float,
        cluster: EngineCluster,
        keys: LaunchKeys,
        report_loss: Callable[[int], None],
        *,
        was_lost: bool,
    ) -> None:
        """Place nothing yet.

        Args:
            limit_s: how long `launch` waits for room, and then for the engine.
            report_loss: called with the rank if the engine, or its actor, ends by itself.
            was_lost: whether the engine of that rank was lost before, so that its node may be
                gone, and it is waited for another one.
        """
        super().__init__(listener.order, rank, listener.address, limit_s)
        self._cluster, self._known, self._report_loss = cluster, keys, report_loss
        self._was_lost = was_lost
        self._keys = keys.make(f"of engine {rank}")
        self._actor: PlacedActor | None = None

    def launch(self, launch: ChildLaunch) -> None:
        """Place the actor, and wait until the engine has joined.

        Raises:
            As JoinedHost.launch; and:
            ConfigError: the cluster has no room, whatever ends.
            EngineDeadError: the actor died, or there was no room for an engine that was lost.
            PluginLoadError: the program itself defines a plugin, so no node has it.
            HardpointError: there was no room in time, or what the actor runs does not join.
        """
        assert isinstance(launch, Launch)
        if launch.main_objects:
            entries = [
                entry for entry in launch.manifest.tree() if entry.value.startswith(_OF_PROGRAM)
            ]
            raise PluginLoadError(
                f"{entries[0].source}: expected a plugin of a module that is on each node of Ray "
                f"(parallel.ray), got {entries[0].value!r}, which this program defines itself"
            )
        self._place(launch).running.add_done_callback(self._returned)
        super().launch(launch)

    def _place(self, launch: Launch) -> PlacedActor:
        try:
            actor = self._cluster.place(
                functools.partial(self._launch_on, launch),
                timeout_s=self._limit_s,
                is_cancelled=lambda: self._is_closed,
                waits=self._was_lost,
            )
        except HardpointError as error:
            if self._is_closed:
                raise EngineClosedError("the engine was closed while it was placed") from error
            if self._was_lost:
                self._report_loss(self.rank)
                raise EngineDeadError(str(error)) from error
            raise
        with self._changed:
            self._actor = actor
            if not self._is_closed:
                return actor
        actor.end()
        raise EngineClosedError("the engine was closed while it was placed")

    def _launch_on(self, launch: Launch, node: RayNode) -> bytes:
        size_is_known = msgspec.convert(launch.config, EngineConfig).kv_cache.num_blocks is not None
        actor_launch = ActorLaunch(
            address=self._address,
            keys=self._keys,
            rank=self.rank,
            node=str(node),
            config=launch.config,
            # The first engine finds the size of all caches, before others are on its node.
            num_sharing=1 if size_is_known else self._cluster.num_per_node,
        )
        return encode(actor_launch)

    def _returned(self, running: Future[bytes]) -> None:
        """Note that the actor runs no engine any more; in a thread of Ray's."""
        actor = self._actor
        if actor is None or self._is_closed:
            return
        if (failure := running.exception()) is not None:
            error = actor.failure(failure)
            self._report_loss(self.rank)
            _log.warning("engine %d: %s", self.rank, error)
        elif answer := running.result():
            report = decode(answer, RemoteFailure)
            error = error_of(report.kind, f"{actor.node}: {report.message}")
            for note in report.notes:
                error.add_note(note)
        else:
            error = EngineDeadError(f"{actor.node}: the engine ended before it has joined")
        self.refuse(error)

    def ended(self, description: str, *, was_killed: bool) -> None:
        """Note how it ended."""
        if not self._is_closed:
            self._report_loss(self.rank)
        super().ended(description, was_killed=was_killed)

    def close(self, grace_s: float = _GRACE_S) -> None:
        """End the engine, wait for that, and end the actor."""
        super().close(grace_s)
        self._known.revoke(self._keys)
        with self._changed:
            actor, self._actor = self._actor, None
        if actor is not None:
            actor.end()
