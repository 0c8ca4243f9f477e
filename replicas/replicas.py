"""The engines of a client of several: their processes, and what balancers see of them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from hardpoint.core.client.process_client import EngineStart, ProcessClient, Sink
from hardpoint.core.engine_process.process import EngineProcess
from hardpoint.errors import EngineClosedError
from hardpoint.plugins import (
    EngineCoreOutputs,
    EngineCoreRequest,
    HardpointError,
    SchedulerStats,
)

_MOST_SESSIONS = 65_536


class Replica:
    """One engine process of several; the `EngineView` of balancers.

    Attributes:
        rank: number of the engine.
        client: its client; None while it is started.
        stats: its last scheduler statistics.
        failure: the error that ended it before its start was complete.
        is_serving: whether it accepts requests.
        is_starting: whether it is started again.
    """

    def __init__(self, rank: int, sessions: Sessions) -> None:
        """Begin without a request."""
        self.rank = rank
        self.client: ProcessClient | None = None
        self.stats: SchedulerStats | None = None
        self.failure: Exception | None = None
        self.is_serving = False
        self.is_starting = False
        self.in_flight = 0
        self.pending_prompt_tokens = 0
        self.num_waiting = 0
        self.num_running = 0
        self.kv_cache_usage = 0.0
        self._sessions = sessions

    @property
    def open_client(self) -> ProcessClient:
        """The client of an engine that has been started."""
        assert self.client is not None
        return self.client

    def cached_prefix_tokens(self, request: EngineCoreRequest) -> int:  # noqa: ARG002
        """Return the length of the longest prefix of a prompt that the engine has cached."""
        return 0

    def has_session(self, request: EngineCoreRequest) -> bool:
        """Return whether the last request of the same session ran there."""
        return self._sessions.rank_of(request) == self.rank

    def has_adapter(self, request: EngineCoreRequest) -> bool:
        """Return whether the request's adapter is loaded there."""
        if request.lora is None:
            return True
        return self.stats is not None and request.lora.name in self.stats.num_requests_by_adapter

    def read(self, outputs: EngineCoreOutputs) -> None:
        """Read the statistics that come with outputs."""
        if (stats := outputs.scheduler_stats) is not None:
            self.stats = stats
            self.num_waiting, self.num_running = stats.num_waiting, stats.num_running
            self.kv_cache_usage = stats.kv_cache_usage


class Sessions:
    """The engine that each session's last request was sent to; the oldest are forgotten."""

    def __init__(self, most: int = _MOST_SESSIONS) -> None:
        """Remember `most` sessions at most."""
        self._most = most
        self._ranks: dict[tuple[str | None, str], int] = {}

    def rank_of(self, request: EngineCoreRequest) -> int | None:
        """Return the rank of the engine; None without a session, or before its second request."""
        return None if (key := _session(request)) is None else self._ranks.get(key)

    def note(self, request: EngineCoreRequest, rank: int) -> None:
        """Remember where a request is sent."""
        if (key := _session(request)) is None:
            return
        self._ranks.pop(key, None)
        self._ranks[key] = rank
        if len(self._ranks) > self._most:
            del self._ranks[next(iter(self._ranks))]


def _session(request: EngineCoreRequest) -> tuple[str | None, str] | None:
    retention = request.retention
    return None if retention is None else (request.cache_salt, retention.session)


class Replicas:
    """Several engines of one model, by rank, and their processes.

    Attributes:
        start: what engines are started with, but for their rank.
        serving: those that accept requests, in the order of their ranks.
        sessions: where the requests of each session were sent.
    """

    def __init__(
        self,
        start: EngineStart,
        sink_of: Callable[[Replica], Sink],
        changed: threading.Condition,
    ) -> None:
        """Start none yet.

        Args:
            start: parameters of the first engine; `config.parallel.data` is their number.
            sink_of: returns what gets the outputs of an engine, and the error that ends them.
            changed: guards all of this; it is notified where an engine starts or stops serving.
        """
        self.start = start
        self.sessions = Sessions()
        self.serving: list[Replica] = []
        self._sink_of, self._changed = sink_of, changed
        self._replicas = [Replica(n, self.sessions) for n in range(start.config.parallel.data)]
        self._clients: list[ProcessClient] = []
        self._starting: list[EngineProcess] = []
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many there are, serving or not."""
        return len(self._replicas)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def coming(self) -> set[int]:
        """The ranks of those that serve, or are being started again."""
        return {one.rank for one in self._replicas if one.is_serving or one.is_starting}

    @property
    def any_client(self) -> ProcessClient:
        """The client of the first engine that serves; of a dead group, that of its last one."""
        serving = self.serving
        return serving[0].open_client if serving else self._clients[-1]

    def is_current(self, replica: Replica) -> bool:
        """Return whether no other engine has taken the place of one."""
        return self._replicas[replica.rank] is replica

    def open_all(self, process: EngineProcess | None) -> ProcessClient:
        """Start all engines, and return the client of the first one once all are ready.

        The first one is started first: it decides on the size of all caches, and packs the weights
        that the others map.

        Args:
            process: process of the first engine that was spawned before.

        Raises:
            HardpointError: one cannot be started; the message names it.
        """
        first, *others = self._replicas
        client = self.open(first, process, num_sharing=len(self._replicas))
        ready, config = client.ready, self.start.config
        kv_cache = msgspec.structs.replace(config.kv_cache, num_blocks=ready.num_gpu_blocks)
        config = msgspec.structs.replace(
            config, kv_cache=kv_cache, max_model_len=ready.max_model_len
        )
        self.start = dataclasses.replace(self.start, config=config)
        with ThreadPoolExecutor(max(len(others), 1)) as pool:
            opening = [pool.submit(self.open, one, num_sharing=len(others)) for one in others]
        for replica, opened in zip(others, opening, strict=True):
            if (error := opened.exception()) is not None:
                if isinstance(error, HardpointError):
                    error.args = (f"engine {replica.rank} of {len(self._replicas)}: {error}",)
                raise error
        return client

    def open(
        self, replica: Replica, process: EngineProcess | None = None, num_sharing: int = 1
    ) -> ProcessClient:
        """Start the process of an engine, which serves from then on; return its client.

        Args:
            replica: the engine.
            process: one that was spawned before.
            num_sharing: engines that are going to take of the memory that is free now.

        Raises:
            EngineClosedError: `close` was called meanwhile.
            HardpointError: the engine cannot be started.
        """
        rank = replica.rank
        start = dataclasses.replace(self.start, engine_index=rank, num_sharing=num_sharing)
        process = process or EngineProcess.spawn(start.interpreter)
        try:
            with self._changed:
                self._check_open()
                self._starting.append(process)
            client = ProcessClient(start, self._sink_of(replica), process)
        except BaseException:
            process.close(0)
            self._check_open()
            raise
        finally:
            with self._changed, contextlib.suppress(ValueError):
                self._starting.remove(process)
        with self._changed:
            failure = replica.failure
            if failure is None and not self._is_closed:
                replica.client, replica.is_serving = client, True
                self._clients.append(client)
                self._refresh()
                return client
        client.close()
        self._check_open()
        assert failure is not None
        raise failure

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine was closed while it was started")

    def succeed(self, replica: Replica) -> Replica:
        """Put another engine, which is not started yet, in the place of one; return it."""
        successor = self._replicas[replica.rank] = Replica(replica.rank, self.sessions)
        self._refresh()
        return successor

    def forget(self, client: ProcessClient) -> None:
        """Close the client of an engine that another one has succeeded."""
        client.close()
        with self._changed:
            if client is not self._clients[-1]:
                self._clients.remove(client)

    def _refresh(self) -> None:
        self.serving = [replica for replica in self._replicas if replica.is_serving]
        self._changed.notify_all()

    def close(self) -> None:
        """End all engines. Closing twice does nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            clients, self.serving = list(self._clients), []
            starting = list(self._starting)
            self._changed.notify_all()
        for process in starting:
            process.close(0)
        with ThreadPoolExecutor(max(len(clients), 1)) as pool:
            list(pool.map(ProcessClient.close, clients))
