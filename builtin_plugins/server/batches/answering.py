"""Answers lines of a batch file by the routes of a server that does not listen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from hardpoint.builtin_plugins.server.assembly import assemble
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.plugins.server import (
    AsyncGenerator,
    Authenticator,
    Client,
    InstalledExtension,
)

from .lines import BatchAnswer, BatchLine, BatchResponse, answer_to

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
    own = InstalledExtension("batch file", "batch file", Authenticator(authenticate=_client))
    app = assemble(engine, version, bound=None, authenticators=[own]).users
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


async def _client(headers: Any, path: str) -> Client:  # noqa: ARG001
    return _CLIENT


async def _answer(app: ASGIApp, line: BatchLine) -> BatchAnswer:
    return answer_to(line, await post(app, line.url, line.body))


async def post(app: ASGIApp, path: str, body: bytes) -> BatchResponse:
    """Return the answer of an application to a POST of JSON."""
    status, request_id = 0, ""
    parts: list[bytes] = []
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:  # the client stays
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = dict(message["headers"])
            request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        else:
            parts.append(message.get("body", b""))

    await app(_scope(path, body), receive, send)
    return BatchResponse(status, request_id, msgspec.json.decode(b"".join(parts)))


def _scope(path: str, body: bytes) -> dict[str, Any]:
    length = str(len(body)).encode()
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", length)],
        "client": None,
        "server": None,
    }
