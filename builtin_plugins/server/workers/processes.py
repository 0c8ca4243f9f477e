"""The processes of a server with several workers, and their supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import msgspec

from hardpoint.builtin_plugins.server.access.counts import SharedCounts
from hardpoint.builtin_plugins.server.access.keys import Stores, installed, stores_of
from hardpoint.builtin_plugins.server.assembly import Applications, assemble
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.operations.addresses import BoundAddress
from hardpoint.builtin_plugins.server.operations.loop_watch import Outliving
from hardpoint.builtin_plugins.server.operations.notify import ServiceManager
from hardpoint.builtin_plugins.server.service import ServerPhase
from hardpoint.builtin_plugins.server.serving import (
    Serving,
    announce,
    begin_outliving,
    loop_factory,
)
from hardpoint.plugins import CommandContext
from hardpoint.plugins.server import WorkerPlan
from hardpoint.typed import Strict, convert

if TYPE_CHECKING:
    from hardpoint.plugins.server.generator import Worker, WorkerGroup


_log = logging.getLogger("hardpoint")

_POLL_SECONDS = 0.02


class WorkerData(Strict):
    """Inputs of the workers of a server.

    Attributes:
        host, url, is_encrypted: as in BoundAddress.
        single_key: the key that is in no file; None without one.
        num_processes: columns of the shared counts.
    """

    host: str | None
    url: str
    is_encrypted: bool
    single_key: str | None
    num_processes: int


def serve(worker: Worker) -> int:
    """Serve users until a signal, or until the engine is dead; return the exit code."""
    data = convert(worker.data, WorkerData, path="data")
    memory, listening = worker.files
    counts = SharedCounts(memory, worker.index, data.num_processes)
    settings = worker.engine.config.table(ServerConfig)
    keys = stores_of(settings, data.single_key)
    users = BoundAddress(
        socket.socket(fileno=listening), data.host, data.url, is_encrypted=data.is_encrypted
    )
    outliving = Outliving[int]()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return outliving.run(runner, _serve(worker, users, keys, counts, outliving))


async def _serve(
    worker: Worker,
    users: BoundAddress,
    keys: Stores,
    counts: SharedCounts,
    outliving: Outliving[int],
) -> int:
    engine, loop = worker.engine, asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    notifying: list[asyncio.Future[None]] = []
    try:
        loop.add_signal_handler(signal.SIGHUP, keys.reload)
        applications = assemble(
            engine,
            worker.version,
            bound=users.host,
            authenticators=[] if keys.users is None else [installed(keys.users)],
            counts=counts,
        )

        def begin() -> None:
            begin_outliving(outliving, task, engine, applications)
            notifying.append(asyncio.ensure_future(worker.announce_ready()))

        return await Serving(applications, users).run(announce=begin)
    finally:
        await engine.aclose()


class Supervisor:
    """Starts the workers of a server, passes signals on, and serves administrators."""

    def __init__(
        self,
        workers: WorkerGroup,
        context: CommandContext,
        users: BoundAddress,
        admin: BoundAddress | None,
        keys: Stores,
        single_key: str | None,
        manager: ServiceManager,
    ) -> None:
        """Supervise workers that are not started yet.

        Args:
            single_key: the key that is in no file; None without one.
            manager: is notified, if there is one.
        """
        self._manager = manager
        self._workers, self._context = workers, context
        self._users, self._admin, self._keys = users, admin, keys
        self._single_key = single_key
        settings = workers.engine.config.table(ServerConfig)
        self._num_workers = settings.workers
        self._memory = SharedCounts.create(settings.workers + 1)
        self._counts = SharedCounts(self._memory, settings.workers, settings.workers + 1)

    async def run(self) -> int:
        """Serve until the workers have ended; return the exit code.

        Raises:
            HardpointError: an extension is wrong, or a worker cannot start.
        """
        workers, loop = self._workers, asyncio.get_running_loop()
        applications = assemble(
            workers.engine,
            self._context.version,
            bound=self._users.host,
            authenticators=[] if self._keys.users is None else [installed(self._keys.users)],
            admin=self._admin,
            admin_authenticators=[] if self._keys.admin is None else [installed(self._keys.admin)],
            counts=self._counts,
            of_admin=True,
        )
        self._service = applications.service
        with self._handled_signals(loop):
            await workers.start(self._plan())
            async with self._serving_administrators(applications):
                self._announce()
                self._manager.ready()
                watching = asyncio.ensure_future(self._watch())
                try:
                    return await workers.wait()
                finally:
                    watching.cancel()

    @contextlib.asynccontextmanager
    async def _serving_administrators(self, applications: Applications) -> AsyncIterator[None]:
        if self._admin is None:
            yield
            return
        serving = Serving(applications, None, self._admin)
        task = asyncio.ensure_future(serving.run(handle_signals=False))
        try:
            yield
        finally:
            serving.stop()
            await task

    def _plan(self) -> WorkerPlan:
        data = WorkerData(
            host=self._users.host,
            url=self._users.url,
            is_encrypted=self._users.is_encrypted,
            single_key=self._single_key,
            num_processes=self._num_workers + 1,
        )
        return WorkerPlan(
            run=f"{__name__}:serve",
            num_workers=self._num_workers,
            files=[self._memory, self._users.socket.fileno()],
            data=msgspec.to_builtins(data),
        )

    def _announce(self) -> None:
        if not self._context.quiet:
            announce(self._service, self._users, self._admin)

    @contextlib.contextmanager
    def _handled_signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        yield

    def _signalled(self, number: signal.Signals) -> None:
        self._manager.stopping()
        self._service.phase = ServerPhase.LEAVING
        self._workers.send_signal(number)

    def _reload(self) -> None:
        self._keys.reload()
        self._workers.send_signal(signal.SIGHUP)

    async def _watch(self) -> None:
        """Release the held counts of dead workers; end the server on request."""
        is_draining = False
        while True:
            self._manager.ping()
            for index in self._workers.replaced():
                self._counts.clear(index)
            if self._service.drain_asked and not is_draining:
                is_draining = True
                self._signalled(signal.SIGTERM)
            if not self._workers.engine.is_running:
                self._service.paused = None  # engines that were restarted are not paused
            await asyncio.sleep(_POLL_SECONDS)
