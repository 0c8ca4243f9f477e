"""Answers lines of a batch file by the routes of a server that does not listen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from hardpoint.builtin_plugins.server.application import Application
from hardpoint.builtin_plugins.server.assembly import assemble
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.plugins.server import AsyncGenerator, Client

from .lines import BatchAnswer, BatchLine, answer_to

_CLIENT = Client(name="batch file")


async def answer_lines(
    engine: AsyncGenerator,
    version: str,
    lines: Iterable[BatchLine],
    write: Callable[[BatchLine, BatchAnswer], None],
) -> None:
    """Answer all lines; the requests are those of somebody whom the server's keys do not bind.

    Args:
        lines: taken when the engine has room for one; taking it may block.
        write: gets each answer as soon as it is there.

    Raises:
        EngineDeadError: the engine ended; the rest has no answers.
        HardpointError: the configuration of the server is wrong.
    """
    config = engine.config
    limit = config.table(ServerConfig).limits.requests
    if config.scheduler.max_waiting is not None:
        limit = min(limit, config.scheduler.max_num_seqs + config.scheduler.max_waiting)
    window = min(2 * config.scheduler.max_num_seqs, limit)
    app = assemble(engine, version, bound=None).users
    running: dict[asyncio.Task[BatchAnswer], BatchLine] = {}

    async def write_some() -> None:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if engine.dead_error is not None:
            raise engine.dead_error
        for task in done:
            write(running.pop(task), task.result())

    try:
        for line in lines:
            if line.problem is not None:
                write(line, answer_to(line))
                continue
            running[asyncio.create_task(_answer(app, line))] = line
            if len(running) >= window:
                await write_some()
        while running:
            await write_some()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _answer(app: Application, line: BatchLine) -> BatchAnswer:
    return answer_to(line, await app.ask(_CLIENT, line.url, line.body))
