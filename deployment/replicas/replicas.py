"""The engines of a client of several: their processes, and the views that balancers get."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from hardpoint.errors import EngineClosedError
from hardpoint.plugins import (
    EngineCoreOutputs,
    HardpointError,
    SchedulerStats,
)
from hardpoint.process.client.process_client import EngineStart, ProcessClient, Sink
from hardpoint.process.engine_process import EngineHost

from .hosts import EngineHosts, start_of
from .prefix_index import PrefixIndex
from .replica import Replica, ReplicaClient
from .sessions import Sessions
from .statistics import PrefillRate, Totals

_log = logging.getLogger("hardpoint")

SinkOf = Callable[["Replica"], Sink]
"""Returns what gets the outputs of an engine, and the error that ends them."""


class Replicas:
    """Several engines of one model, by rank, and their processes.

    Attributes:
        start: what engines are started with, but for their rank.
        serving: those that accept requests, in the order of their ranks.
        reachable: those of them that take messages.
        candidates: engines for requests: the reachable ones, or all that serve if none is.
        chosen_from: engines for balancers: the candidates that are not paused, or all if all are.
        sessions: where the requests of each session were sent.
        index: prefixes that they have cached; None if the balancer does not use it.
        prefill_rate: how fast they compute prompts.
        totals: statistics of those that have ended.
    """

    def __init__(
        self,
        start: EngineStart,
        hosts: EngineHosts,
        sink_of: SinkOf,
        changed: threading.Condition,
    ) -> None:
        """Start none yet.

        Args:
            start: parameters of the first engine; `config.parallel.data` is their number.
            sink_of: see SinkOf.
            changed: guards all of this; it is notified where an engine starts or stops serving.
        """
        self.start = start
        self._hosts = hosts
        self.sessions = Sessions()
        self.index: PrefixIndex | None = None
        if start.reports_cache:
            cache = start.config.kv_cache
            self.index = PrefixIndex(cache.block_size, cache.hash_algorithm)
        self.prefill_rate, self.totals = PrefillRate(), Totals()
        self.serving: list[Replica] = []
        self.reachable: list[Replica] = []
        self.candidates: list[Replica] = []
        self.chosen_from: list[Replica] = []
        self._sink_of, self._changed = sink_of, changed
        self._replicas = {n: self._replica(n) for n in range(start.config.parallel.data)}
        self._clients: list[ReplicaClient] = []
        self._starting: dict[Replica, EngineHost] = {}
        self._is_closed = False

    def _replica(self, rank: int) -> Replica:
        reports = self.start.reports_load
        return Replica(rank, self.sessions, self.prefill_rate, self.index, reports=reports)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of all engines, serving or not."""
        return tuple(sorted(self._replicas))

    def of(self, rank: int) -> Replica:
        """Return the engine of a rank."""
        return self._replicas[rank]

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def weight_version(self) -> str:
        """Version of the weights of engines that are started now."""
        return self.start.config.load.version

    @property
    def coming(self) -> set[int]:
        """The ranks of live engines: they serve, are started again, or are leaving."""
        return {
            replica.rank
            for replica in self._replicas.values()
            if replica.is_serving or replica.is_starting or replica.is_leaving
        }

    @property
    def any_client(self) -> ReplicaClient:
        """The client of the first engine that serves; of a dead group, of its last engine."""
        serving = self.serving
        return serving[0].open_client if serving else self._clients[-1]

    def stats(
        self, answers: Mapping[Replica, SchedulerStats | None] | None = None
    ) -> SchedulerStats:
        """Return the statistics of all engines, merged and each.

        Args:
            answers: what engines have just answered; of the others, what they reported last.
        """
        with self._changed:
            known = {rank: replica.stats for rank, replica in self._replicas.items()}
            for replica, stats in (answers or {}).items():
                if self.is_current(replica):
                    known[replica.rank] = stats
            return self.totals.of(known)

    def is_current(self, replica: Replica) -> bool:
        """Return whether no other engine has taken the place of one."""
        return self._replicas.get(replica.rank) is replica

    def open_all(self) -> ReplicaClient:
        """Start all engines, and return the client of the first one once all are ready.

        The first one is started first: it decides on the size of all caches, and packs the weights
        that the others map.

        Raises:
            HardpointError: one cannot be started; the message names it.
        """
        first, *others = self._replicas.values()
        client = self.open(first, max(self.start.config.parallel.num_local, 1))
        ready, config = client.ready, self.start.config
        kv_cache = msgspec.structs.replace(config.kv_cache, num_blocks=ready.num_gpu_blocks)
        config = msgspec.structs.replace(
            config, kv_cache=kv_cache, max_model_len=ready.max_model_len
        )
        self.start = dataclasses.replace(self.start, config=config)
        self._open_together(others)
        return client

    def add(self, count: int, end: Callable[[Replica], object]) -> None:
        """Start further engines, all of them or none; they have the lowest numbers that are free.

        Args:
            count: how many.
            end: ends each if one cannot be started; others may serve by then.

        Raises:
            HardpointError: one cannot be started; the message names it.
        """
        with self._changed:
            free = (rank for rank in itertools.count() if rank not in self._replicas)
            added = [self._replica(rank) for rank in itertools.islice(free, count)]
            for replica in added:
                replica.is_added = True
            self._replicas |= {replica.rank: replica for replica in added}
        try:
            self._open_together(added)
        except BaseException:
            for replica in added:
                end(replica)
            raise

    def _open_together(self, replicas: Sequence[Replica]) -> None:
        """Start engines side by side.

        Raises:
            HardpointError: the first error; the message names the engine.
        """
        with ThreadPoolExecutor(max(len(replicas), 1)) as pool:
            opening = [
                pool.submit(self.open, unopened, num_sharing=len(replicas)) for unopened in replicas
            ]
        for replica, opened in zip(replicas, opening, strict=True):
            if (error := opened.exception()) is not None:
                if isinstance(error, HardpointError):
                    error.args = (f"engine {replica.rank} of {len(self._replicas)}: {error}",)
                raise error

    def leave(self, replica: Replica) -> None:
        """Send nothing more to an engine after its process was asked to end."""
        with self._changed:
            replica.is_serving = False
            self._refresh()

    def set_reachable(self, replica: Replica, *, reachable: bool) -> None:
        """Note whether an engine takes messages."""
        with self._changed:
            replica.is_reachable, replica.blocked_since = reachable, None
            self._refresh()

    def set_paused(self, replica: Replica, *, paused: bool) -> None:
        """Note whether an engine is paused."""
        with self._changed:
            replica.is_paused = paused
            self._refresh()

    def drain(self, replica: Replica, *, for_good: bool = True) -> None:
        """Let an engine accept no more requests; nor, for good, one in its place."""
        with self._changed:
            replica.is_serving, replica.is_starting, replica.is_draining = False, False, for_good
            self._refresh()

    def keep_draining(self) -> bool:
        """Let engines that are about to end serve again; return whether there are any."""
        with self._changed:
            for replica in self._replicas.values():
                if replica.is_draining and replica.client is not None:
                    replica.is_serving, replica.is_draining = True, False
            self._refresh()
            return bool(self.serving)

    def remove_dead(self) -> None:
        """Remove the engines that neither serve nor start, so that their ranks are free."""
        with self._changed:
            dead = [
                candidate
                for candidate in self._replicas.values()
                if candidate.rank not in self.coming
            ]
        for replica in dead:
            self.remove(replica)

    def remove(self, replica: Replica) -> bool:
        """End an engine without requests; return whether it did not serve again."""
        with self._changed:
            if replica.is_serving:  # the others have died, see `keep_draining`
                return False
            replica.is_starting = False
            if self.is_current(replica):
                del self._replicas[replica.rank]
                self.totals.end(replica.rank, replica.stats)
            if self.index is not None:
                self.index.remove_engine(replica.rank)
            starting = self._starting.get(replica)
            self._refresh()
        if starting is not None:
            starting.close(0)
        self.forget(replica.client)
        return True

    def open(self, replica: Replica, num_sharing: int = 1) -> ReplicaClient:
        """Start the process of an engine, which serves from then on; return its client.

        Args:
            replica: the engine.
            num_sharing: engines that are going to take of the memory that is free now.

        Raises:
            EngineClosedError: `close` was called in the meantime, or `drain`.
            HardpointError: the engine cannot be started.
        """
        while True:
            begun = self.start
            client = self._started(begun, replica, num_sharing)
            with self._changed:
                if replica.failure is not None or replica.is_draining or self._is_closed:
                    break
                if begun is self.start:
                    self._serve(replica, client)
                    self._refresh()
                    return client
            client.close()  # it has settings that were changed in the meantime
        client.close()
        self._check_open(replica)
        assert replica.failure is not None
        raise replica.failure

    def _started(self, begun: EngineStart, replica: Replica, num_sharing: int) -> ReplicaClient:
        rank = replica.rank
        start = start_of(begun, rank, num_sharing)
        process = self._hosts.open(rank, start.interpreter)
        try:
            with self._changed:
                self._check_open(replica)
                self._starting[replica] = process
            return ProcessClient(start, self._sink_of(replica), process)
        except BaseException:
            process.close(0)
            self._check_open(replica)
            raise
        finally:
            with self._changed:
                self._starting.pop(replica, None)

    def _serve(self, replica: Replica, client: ReplicaClient) -> None:
        if replica.is_starting:
            self.totals.num_restarts[replica.rank] += 1
        replica.client, replica.is_serving, replica.is_starting = client, True, False
        self._clients.append(client)

    def _check_open(self, *starting: Replica) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine was closed while it was started")
        for replica in starting:
            if replica.is_draining:
                raise EngineClosedError(f"engine {replica.rank} was retired while it was started")

    def ending_with(self, replica: Replica) -> list[Replica]:
        """Return the engines that end if one dies, itself the first."""
        return [replica]

    def reopen(self, replicas: Sequence[Replica]) -> None:
        """Start the successors of engines that have ended together.

        Raises:
            As `open`; none of them serves.
        """
        for replica in replicas:
            client = self.open(replica)
            _log.warning("engine %d was restarted (pid %d)", replica.rank, client.pid)

    def succeed(self, replica: Replica, *, is_starting: bool) -> Replica:
        """Put another engine, which may be going to start, in the place of one; return it."""
        successor = self._replicas[replica.rank] = self._replica(replica.rank)
        self.totals.end(replica.rank, replica.stats)
        successor.is_draining = replica.is_draining
        successor.is_starting = is_starting
        if self.index is not None:
            self.index.remove_engine(replica.rank)
        self._refresh()
        return successor

    def forget(self, client: ReplicaClient | None) -> None:
        """Close the client, if there is one, of an engine that another one has succeeded."""
        if client is not None:
            client.close()
            with self._changed:
                if client in self._clients[:-1]:  # retired and dead, it is forgotten twice
                    self._clients.remove(client)

    def _refresh(self) -> None:
        ranks = sorted(self._replicas)
        self.serving = [self._replicas[rank] for rank in ranks if self._replicas[rank].is_serving]
        self.reachable = [replica for replica in self.serving if replica.is_reachable]
        self.candidates = self.reachable or self.serving
        self.chosen_from = [
            replica for replica in self.candidates if not replica.is_paused
        ] or self.candidates
        self._changed.notify_all()

    def close(self) -> None:
        """End all engines. Closing twice does nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            clients = list(self._clients)
            self.serving, self.reachable, self.candidates, self.chosen_from = [], [], [], []
            starting = list(self._starting.values())
            self._changed.notify_all()
        for process in starting:
            process.close(0)
        with ThreadPoolExecutor(max(len(clients), 1)) as pool:
            list(pool.map(lambda client: client.close(), clients))
        self._hosts.close()


class _Receives(Protocol):
    def receive(self, replica: Replica, item: EngineCoreOutputs | Exception) -> None: ...


class Receiver:
    """The sink of an engine's client, which does not hold the client of several."""

    def __init__(self, group: Callable[[], _Receives | None], replica: Replica) -> None:
        """Hand the messages of an engine on to the group; `group` is a weak reference to it."""
        self._group, self._replica = group, replica

    def __call__(self, item: EngineCoreOutputs | Exception) -> None:
        """Hand on outputs, or the error that ended them."""
        if (group := self._group()) is not None:
            group.receive(self._replica, item)


ReplicasOf = Callable[[EngineStart, EngineHosts, SinkOf, threading.Condition], Replicas]
"""Makes the engines of a group; they are started later."""
