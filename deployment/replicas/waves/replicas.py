"""The engines that share experts, and their processes."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from hardpoint.errors import CommunicationAbortedError
from hardpoint.host.system.arrivals import Arrivals
from hardpoint.plugins import EngineCoreOutputs, HardpointError
from hardpoint.plugins.parallel import Placement
from hardpoint.process.child_processes.launch import Interpreter
from hardpoint.process.client.process_client import EngineStart
from hardpoint.process.engine_process import EngineHost, EngineProcess
from hardpoint.replicas.hosts import LocalHosts
from hardpoint.replicas.replica import Replica, ReplicaClient
from hardpoint.replicas.replicas import Replicas

from .coordinator import Coordinator

_SETTLE_S = 1.0
"""How long the first error of a start waits for one that it follows from."""

_POLL_S = 0.05


def follows_another(error: BaseException) -> bool:
    """Return whether an engine ended for the reason that another one has."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CommunicationAbortedError):
        cause = cause.__cause__
    return cause is not None


class WaveProcess(EngineProcess):
    """A process of an engine that steps together with others."""

    run = "hardpoint.replicas.waves.run:run_engine"


class WaveHosts(LocalHosts):
    """Runs each engine in a process that steps together with the other engines."""

    def open(self, rank: int, interpreter: Interpreter) -> EngineHost:  # noqa: ARG002
        """Spawn a process; an earlier one steps alone, and ends."""
        self.close()
        return WaveProcess.spawn(interpreter)


@dataclass(frozen=True)
class Started:
    """Engines that have started together.

    Attributes:
        clients: client of each.
        arrivals: shows which of them the others wait for.
    """

    clients: Mapping[Replica, ReplicaClient]
    arrivals: Arrivals


class WaveReplicas(Replicas):
    """Engines that share experts: none serves without the others.

    Attributes:
        coordinator: coordinates the waves of those that were started last.
        arrivals: shows which of these the others wait for.
    """

    coordinator: Coordinator
    arrivals: Arrivals

    def open_all(self) -> ReplicaClient:
        """Start all engines; return the client of the first one once all are ready.

        Raises:
            HardpointError: one cannot be started; the message names it.
        """
        every = list(self._replicas.values())
        self.reopen(every)
        return every[0].open_client

    def coordinate(self, replica: Replica, item: EngineCoreOutputs) -> list[Replica]:
        """Note the waves that an engine reports; return the engines that have to join one."""
        complete, start = item.wave_complete, item.start_wave
        item.wave_complete = item.start_wave = None
        if not self.is_current(replica):
            return []
        if complete is not None:
            self.coordinator.completed(complete)
        if start is None or not self.coordinator.started(start):
            return []
        return [other for other in self._replicas.values() if other is not replica]

    def ending_with(self, replica: Replica) -> list[Replica]:
        """Return all engines: while they wait for a dead one, none goes on."""
        return [replica, *(other for other in self._replicas.values() if other is not replica)]

    def reopen(self, replicas: Sequence[Replica]) -> None:
        """Start all engines at the same time, and let them serve.

        Raises:
            HardpointError: one cannot be started; the others are closed.
        """
        while True:
            begun = self.start
            started = self.start_together(begun, replicas)
            with closed_unless_used(started), self._changed:
                self.check_started(started)
                if begun is self.start:  # else their settings were changed during the start
                    self._use(started)
                    return

    def succeeding(self, count: int) -> list[Replica]:
        """Return so many engines that may take the place of all that there are."""
        return [self._replica(rank) for rank in range(count)]

    def start_together(
        self,
        start: EngineStart,
        replicas: Sequence[Replica],
        check: Callable[[], None] = lambda: None,
    ) -> Started:
        """Start engines at the same time, which meet in a folder of their own; none serves yet.

        Args:
            start: parameters of all.
            replicas: the engines.
            check: called every now and then; raises an error to give up.

        Raises:
            HardpointError: one cannot be started; the others are closed.
        """
        count = len(replicas)
        folder = tempfile.mkdtemp(prefix="hardpoint-engines-")
        placement = Placement(hosts=("",) * count, folder=folder) if count > 1 else None
        start = dataclasses.replace(start, engines=placement)
        for replica in replicas:
            replica.failure = None
        try:
            with ThreadPoolExecutor(count) as pool:
                opening = {
                    pool.submit(self._started, start, replica_to_open, count): replica_to_open
                    for replica_to_open in replicas
                }
                error = _until_over(opening, check)
                while error is not None and wait(opening, _POLL_S).not_done:
                    self._end_starting(replicas)  # they would wait for the one that failed
            arrivals = Arrivals(Path(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if error is None:
            return Started(
                {replica_to_open: opened.result() for opened, replica_to_open in opening.items()},
                arrivals,
            )
        _close([opened.result() for opened in opening if opened.exception() is None])
        raise error

    def _end_starting(self, replicas: Sequence[Replica]) -> None:
        with self._changed:
            starting = [
                host for replica in replicas if (host := self._starting.get(replica)) is not None
            ]
        for process in starting:
            process.close(0)

    def check_started(self, started: Started) -> None:
        """Check that engines that have started together can serve.

        Raises:
            EngineClosedError: `close` was called in the meantime.
            HardpointError: one of them has died.
        """
        self._check_open()
        for replica in started.clients:
            if replica.failure is not None:
                raise replica.failure

    def _use(self, started: Started) -> None:
        self.coordinator, self.arrivals = Coordinator(), started.arrivals
        for replica, client in started.clients.items():
            self._serve(replica, client)
        self._refresh()

    def take_over(self, started: Started, start: EngineStart) -> list[Replica]:
        """Replace all present engines by new ones; return the old ones, which serve no more.

        Args:
            started: engines that have started together.
            start: what they were started with.
        """
        before = list(self._replicas.values())
        for replica in before:
            replica.is_serving = False
            self.totals.end(replica.rank, replica.stats)
            if self.index is not None:
                self.index.remove_engine(replica.rank)
        self.start = start
        self._replicas = {replica.rank: replica for replica in started.clients}
        self._use(started)
        return before

    def _refresh(self) -> None:
        super()._refresh()
        if len(self.serving) < len(self._replicas):
            self.serving = []


@contextlib.contextmanager
def closed_unless_used(started: Started) -> Iterator[None]:
    """Close engines at the end, unless they serve."""
    try:
        yield
    finally:
        _close([client for replica, client in started.clients.items() if not replica.client])


def _close(clients: Collection[ReplicaClient]) -> None:
    with ThreadPoolExecutor(max(len(clients), 1)) as pool:
        list(pool.map(lambda client: client.close(), clients))


def _until_over(
    opening: Mapping[Future[ReplicaClient], Replica], check: Callable[[], None]
) -> BaseException | None:
    """Wait until engines are ready; return the error as soon as one fails, or `check` does."""
    is_over = False
    while not is_over:
        done, missing = wait(opening, _POLL_S)
        try:
            check()
        except HardpointError as error:
            return error
        is_over = not missing or any(future.exception() for future in done)
    if (failed := _first_failed(opening)) is None:
        return None
    cause = failed.exception()
    if isinstance(cause, HardpointError):
        cause.args = (f"engine {opening[failed].rank} of {len(opening)}: {cause}",)
    return cause


def _first_failed(opening: Collection[Future[ReplicaClient]]) -> Future[ReplicaClient] | None:
    deadline = time.monotonic() + _SETTLE_S
    while True:
        failed = {
            future: error for future in opening if future.done() and (error := future.exception())
        }
        causes = [future for future, error in failed.items() if not follows_another(error)]
        if causes or not failed or time.monotonic() > deadline:
            return next(iter([*causes, *failed]), None)
        time.sleep(_POLL_S)
