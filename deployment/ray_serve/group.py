"""The client of all engines that Serve runs: they come, drain and die with its replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Sequence

import msgspec
from ray.serve.handle import DeploymentHandle

from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import HardpointError
from hardpoint.plugins.server.engine_set import EngineSet
from hardpoint.process.build import OpenRemoteClient
from hardpoint.process.client.process_client import EngineStart, Sink
from hardpoint.process.engine_process import EngineProcess
from hardpoint.replicas.choice import EngineChoice
from hardpoint.replicas.group import ReplicaSet
from hardpoint.replicas.hosts import EngineHosts, LocalHosts, start_of
from hardpoint.replicas.replica import Replica
from hardpoint.replicas.replicas import Replicas, SinkOf
from hardpoint.replicas.restarts import RestartBudget

from .client import ServeClient
from .fleet import ReplicaFleet

_log = logging.getLogger("hardpoint")

_POLL_S = 0.05
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
"""Between attempts to open an engine."""


class ServeReplicas(Replicas):
    """Several engines of one model, each in a replica of Serve."""

    def __init__(
        self,
        fleet: ReplicaFleet,
        start: EngineStart,
        hosts: EngineHosts,
        sink_of: SinkOf,
        changed: threading.Condition,
    ) -> None:
        """Start none yet.

        Args:
            start, hosts, sink_of, changed: as of Replicas.
        """
        super().__init__(start, hosts, sink_of, changed)
        self.fleet = fleet

    def _started(
        self,
        begun: EngineStart,
        replica: Replica,
        num_sharing: int,  # noqa: ARG002
    ) -> ServeClient:
        place = self.fleet.pop_idle(begun.config.engine.start_timeout_seconds)
        start = start_of(begun, replica.rank)
        try:
            return ServeClient(self.fleet, place, start, self._sink_of(replica))
        except BaseException:
            self.fleet.give_back(place)
            self._check_open()
            raise

    @property
    def by_place(self) -> dict[str, Replica]:
        """The engines that have a client, by the replica of Serve."""
        replicas = [self.of(rank) for rank in self.ranks]
        return {
            replica.client.replica: replica
            for replica in replicas
            if isinstance(replica.client, ServeClient)
        }

    def close(self) -> None:
        """End all calls. The replicas are Serve's."""
        self.fleet.close()
        super().close()


class ServeGroup(ReplicaSet):
    """Uses as many engines as Serve runs; implements `EngineCoreClient` over all of them."""

    # Serve's changes come in its router's thread, which must not wait: each change is followed in
    # a thread of its own.

    def __init__(
        self,
        start: EngineStart,
        choice: EngineChoice,
        budget: RestartBudget,
        fleet: ReplicaFleet,
        drain_s: float,
        sink: Sink | None,
    ) -> None:
        self._fleet, self._drain_s = fleet, drain_s
        self._joining = threading.Lock()
        self._leaving: set[str] = set()
        replicas = functools.partial(ServeReplicas, fleet)
        super().__init__(start, choice, budget, LocalHosts(), sink=sink, replicas=replicas)
        self.scale, self.retire = self._refuse_scale, self._refuse_retire
        fleet.watch(self._serve_changed)
        self._serve_changed(None)

    @property
    def _places(self) -> dict[str, Replica]:
        assert isinstance(self._replicas, ServeReplicas)
        return self._replicas.by_place

    def _serve_changed(self, ids: frozenset[str] | None) -> None:
        threading.Thread(target=self._join, name="hardpoint-join", daemon=True).start()
        if ids is None:
            return
        for place in self._places:
            if place not in ids and place not in self._leaving:
                self._leaving.add(place)
                threading.Thread(
                    target=self._leave, args=(place,), name="hardpoint-leave", daemon=True
                ).start()

    def _join(self) -> None:
        pause_s = _LEAST_PAUSE_S
        with self._joining:
            while self._fleet.num_wanted > 0 and not self._replicas.is_closed:
                try:
                    self._replicas.add(1, self._replicas.remove)
                except HardpointError as error:
                    _log.warning("an engine of Ray Serve cannot be opened: %s", error)
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MOST_PAUSE_S)
                else:
                    _log.info("Ray Serve has added an engine; there are %d", len(self.ranks))
        self._dispatch.send_waiting()

    def _leave(self, place: str) -> None:
        """Let the requests of a replica that ends run on for a while, then go on at others."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._leaving.discard, place)
            replica = self._places.get(place)
            if replica is None:
                return
            self._replicas.drain(replica)
            _log.info("engine %d is removed by Ray Serve", replica.rank)
            deadline = time.monotonic() + self._drain_s
            with self._changed:
                while self._ledger.of(replica) and time.monotonic() < deadline:
                    self._changed.wait(_POLL_S)
            if self._replicas.is_closed:
                return
            with self._lock:
                known = replica.rank in self._replicas.ranks
                current = self._replicas.of(replica.rank) if known else None
            if current is not None and (current is replica or current.is_draining):
                self._move(current)
                self._replicas.remove(current)

    def _end_hopeless(self, reported: Exception) -> None:
        """End no request because no engine is left: Serve starts another one."""
        if self._replicas.coming:
            super()._end_hopeless(reported)

    def _refuse_scale(self, num_engines: int, drain_s: float) -> EngineSet:  # noqa: ARG002
        """Refuse: Serve decides how many there are."""
        raise HardpointError(
            f"scale: expected min_engines and max_engines of Ray Serve, which decides on the "
            f"number of engines, got {num_engines}"
        )

    def _refuse_retire(self, ranks: Sequence[int], drain_s: float) -> EngineSet:  # noqa: ARG002
        """Refuse: Serve decides which there are."""
        raise HardpointError(
            f"retire: Ray Serve decides which engines there are, got {list(ranks)}"
        )


def opener(handle: DeploymentHandle, drain_s: float) -> OpenRemoteClient:
    """Return the function that opens the client of the engines of a deployment.

    Args:
        handle: handle of the deployment.
        drain_s: how long requests may run on at an engine that Serve removes.
    """
    return functools.partial(_open, handle, drain_s)


def _open(
    handle: DeploymentHandle,
    drain_s: float,
    start: EngineStart,
    sink: Sink | None,
    process: EngineProcess | None,  # noqa: ARG001 - engines run in Serve's replicas
    plugins: PluginSet,
) -> ServeGroup:
    limit = start.config.engine.max_restarts_per_minute
    choice = EngineChoice(plugins, start.config)
    config = start.config
    parallel = msgspec.structs.replace(config.parallel, data=1)
    start = dataclasses.replace(
        start,
        config=msgspec.structs.replace(config, parallel=parallel),
        reports_load=True,
        reports_cache=choice.uses_cached_prefixes,
    )
    budget = RestartBudget(enabled=True, max_per_minute=limit)
    fleet = ReplicaFleet(handle)
    try:
        return ServeGroup(start, choice, budget, fleet, drain_s, sink)
    except BaseException:
        fleet.close()
        raise
