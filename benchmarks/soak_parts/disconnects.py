"""Clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import random
from enum import Enum

from http_streams import Client, Connection, Timeline, read_stream

_HALF_CLOSED_S = 2.0
_LONGEST_S = 60.0


class Point(Enum):
    """Where a client goes away."""

    IN_BODY = "in the request's body"
    BEFORE_HEADERS = "before the answer's head"
    FIRST_TOKEN = "at the first token"
    MID_STREAM = "mid stream"
    HALF_CLOSED = "half-closed"


async def disconnect(
    client: Client, request: bytes, point: Point, rng: random.Random, chunks: int
) -> None:
    """Send a request and go away before its end.

    Args:
        client: opens a connection of its own for this.
        request: bytes of it.
        point: where.
        rng: chooses details, such as how many milliseconds or chunks later.
        chunks: number of chunks that an answer may have.
    """
    connection = await client.connect()
    writer = connection[1]
    try:
        match point:
            case Point.IN_BODY:
                writer.write(request[: rng.randrange(1, len(request))])
                await asyncio.sleep(rng.random() * 0.02)
            case Point.BEFORE_HEADERS:
                writer.write(request)
                await asyncio.sleep(rng.random() * 0.005)
            case Point.FIRST_TOKEN:
                await _leave_after(connection, request, 1)
            case Point.MID_STREAM:
                await _leave_after(connection, request, rng.randint(2, max(2, chunks - 1)))
            case Point.HALF_CLOSED:
                writer.write(request)
                if writer.can_write_eof():
                    writer.write_eof()
                await asyncio.sleep(rng.random() * _HALF_CLOSED_S)
    finally:
        if rng.random() < 0.5:
            writer.close()
        else:
            writer.transport.abort()


async def _leave_after(connection: Connection, request: bytes, chunks: int) -> None:
    """Send a request, and return after a number of chunks, or at the end of the answer."""
    timeline = Timeline()

    def leave() -> None:
        if timeline.chunks >= chunks:
            asking.cancel()

    asking = asyncio.ensure_future(read_stream(connection, request, timeline, leave))
    with contextlib.suppress(asyncio.CancelledError, OSError, EOFError):
        async with asyncio.timeout(_LONGEST_S):
            await asking
