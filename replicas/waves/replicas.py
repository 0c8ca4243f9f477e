"""The engines that share experts, and their processes."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from hardpoint.core.engine_process.process import EngineHost, EngineProcess
from hardpoint.errors import CommunicationAbortedError, EngineDeadError
from hardpoint.plugins import EngineCoreOutputs, HardpointError
from hardpoint.plugins.parallel import Placement
from hardpoint.replicas.hosts import LocalHosts
from hardpoint.replicas.replicas import Replica, ReplicaClient, Replicas
from hardpoint.system.process.launch import Interpreter

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
    """Runs each engine in a process that steps together with those of the others."""

    def open(self, rank: int, interpreter: Interpreter) -> EngineHost:  # noqa: ARG002
        """Spawn a process; one that was spawned before steps alone, and ends."""
        self.close()
        return WaveProcess.spawn(interpreter)


class WaveReplicas(Replicas):
    """Engines that share experts: none serves without the others.

    Attributes:
        coordinator: coordinates the waves of those that were started last.
    """

    coordinator: Coordinator

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
        return [one for one in self._replicas.values() if one is not replica]

    def ending_with(self, replica: Replica) -> list[Replica]:
        """Return all engines, as those that wait for a dead one do not go on."""
        others = [one for one in self._replicas.values() if one is not replica]
        self._give_up(others, replica)
        return [replica, *others]

    def _give_up(self, replicas: Sequence[Replica], dead: Replica) -> None:
        """Let the starts of engines fail that need a dead one."""
        for replica in replicas:
            if replica.client is None:
                replica.failure = EngineDeadError(f"engine {dead.rank}, which it needs, has died")

    def reopen(self, replicas: Sequence[Replica]) -> None:
        """Start all engines at the same time; they meet in a folder of their own.

        Raises:
            HardpointError: one cannot be started; the others are closed.
        """
        self.coordinator = Coordinator()
        folder = tempfile.mkdtemp(prefix="hardpoint-engines-")
        try:
            hosts = ("",) * len(replicas)
            placement = Placement(hosts=hosts, folder=folder)
            with self._changed:
                self.start = dataclasses.replace(self.start, engines=placement)
            for replica in replicas:
                replica.failure = None
            self._open_at_once(replicas)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _open_at_once(self, replicas: Sequence[Replica]) -> None:
        count = len(replicas)
        with ThreadPoolExecutor(count) as pool:
            opening = {pool.submit(self.open, one, num_sharing=count): one for one in replicas}
            wait(opening, return_when=FIRST_EXCEPTION)
            if (failed := _first_failed(opening)) is None:
                return
            self._give_up(replicas, opening[failed])
            while wait(opening, _POLL_S).not_done:  # they would wait for the one that failed
                with self._changed:
                    starting = list(self._starting)
                for process in starting:
                    process.close(0)
        for replica in replicas:
            self._close(replica)
        error = failed.exception()
        assert error is not None
        if isinstance(error, HardpointError):
            error.args = (f"engine {opening[failed].rank} of {count}: {error}",)
        raise error

    def _close(self, replica: Replica) -> None:
        """Close an engine that was started, so that it can be started again."""
        with self._changed:
            client, replica.client, replica.is_serving = replica.client, None, False
            self._refresh()
        if client is not None:
            self.forget(client)

    def _refresh(self) -> None:
        super()._refresh()
        if len(self.serving) < len(self._replicas):
            self.serving = []


def _first_failed(opening: Collection[Future[ReplicaClient]]) -> Future[ReplicaClient] | None:
    """Return a start that has failed, if possible one that does not follow from another's."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        failed = {one: error for one in opening if one.done() and (error := one.exception())}
        causes = [one for one, error in failed.items() if not follows_another(error)]
        if causes or not failed or time.monotonic() > deadline:
            return next(iter([*causes, *failed]), None)
        time.sleep(_POLL_S)
