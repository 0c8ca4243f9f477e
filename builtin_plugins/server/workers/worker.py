"""A worker of a server: the users' application, on a socket that several processes listen on."""

from __future__ import annotations

import asyncio
import signal
import socket

from hardpoint.builtin_plugins.server.access.counts import SharedCounts
from hardpoint.builtin_plugins.server.access.keys import Stores, installed, stores_of
from hardpoint.builtin_plugins.server.assembly import assemble
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.operations.addresses import BoundAddress
from hardpoint.builtin_plugins.server.operations.loop_watch import Outliving
from hardpoint.builtin_plugins.server.serving import Serving, begin_outliving, loop_factory
from hardpoint.plugins.workers import Worker
from hardpoint.typed import Strict, convert

RUN = f"{__name__}:serve"


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
    keys = stores_of(settings, data.single_key, counts)
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

        def announce() -> None:
            begin_outliving(outliving, task, engine, applications)
            notifying.append(asyncio.ensure_future(worker.announce_ready()))

        return await Serving(applications, users).run(announce=announce)
    finally:
        await engine.aclose()
