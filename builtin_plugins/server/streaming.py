"""Server-sent events: sent as they come, with heartbeats while there are none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import AnswerError, unavailable

_HEADERS = {
    "cache-control": "no-cache",
    "content-type": "text/event-stream; charset=utf-8",
    "x-accel-buffering": "no",  # nginx would collect events otherwise
}
T = TypeVar("T")

COMMENT = b": waiting\n\n"


class ClientGoneError(Exception):
    """The client closed its connection."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it when the client is gone.

    Raises:
        ClientGoneError: the client is gone.
        AnswerError: the server's end cancelled `work`.
        Exception: raised by `work`.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        if working.cancelled():
            raise ended_early()
        working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def ended_early() -> AnswerError:
    """Return the error of a request that ends with the server."""
    return unavailable(
        "the server ended before the answer did; send the request again", code="draining"
    )


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work for a request; cancel it when the client is gone.

    Raises:
        ClientGoneError: the client is gone.
        Exception: raised by `work`.
    """
    results: list[T] = []
    ended: list[BaseException] = []

    async def collect() -> None:
        try:
            results.append(await work)
        except (KeyboardInterrupt, SystemExit) as error:  # out of a task they end the event loop
            ended.append(error)

    await until_disconnect(request.receive, collect())
    if ended:
        raise ended[0]
    return results[0]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer that is a stream of server-sent events.

    The headers wait for the first event, so that a request which is refused is answered with an
    error status, but not longer than the time of a heartbeat.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        heartbeat_seconds: float,
        failed: Callable[[BaseException], bytes],
        heartbeat: bytes = COMMENT,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Own the events.

        Args:
            events: each ends with an empty line.
            heartbeat_seconds: time without an event before a heartbeat; 0 is never.
            failed: returns the last events of a stream that an error ends.
            heartbeat: the sign that the stream lives.
            headers: further ones.
        """
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._heartbeat_seconds = heartbeat_seconds
        self._failed = failed
        self._heartbeat = heartbeat
        self._begun = self._started = False
        self._starting = asyncio.Lock()
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events; end them when the client is gone."""
        try:
            async with contextlib.aclosing(self._events):
                await until_disconnect(receive, self._run(send))
        except ClientGoneError:
            pass

    async def _run(self, send: Send) -> None:
        beating = asyncio.ensure_future(self._beat(send)) if self._heartbeat_seconds else None
        try:
            await self._send_events(send)
        finally:
            if beating is not None:
                beating.cancel()
                # No heartbeat comes after the end.
                await asyncio.gather(beating, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        try:
            async for event in self._events:
                if not self._started:
                    await self._start(send)
                self._sent_at = now()
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not self._begun:
                raise
            await self._start(send)
            last = self._failed(error)
            await send({"type": "http.response.body", "body": last, "more_body": True})
        if not self._begun:
            raise AnswerError(500, "the engine ended the request without an answer")
        await self._start(send)

    async def _start(self, send: Send) -> None:
        """Send the headers, once; return when they are sent, since middleware may take its time."""
        self._begun = True
        async with self._starting:
            if not self._started:
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(start)
                self._started = True

    async def _beat(self, send: Send) -> None:
        """Send a heartbeat whenever there was no event for a while."""
        now = asyncio.get_running_loop().time
        self._sent_at = now()
        while True:
            await asyncio.sleep(self._sent_at + self._heartbeat_seconds - now())
            if now() - self._sent_at < self._heartbeat_seconds:
                continue
            if not self._started:
                await self._start(send)
            self._sent_at = now()
            await send({"type": "http.response.body", "body": self._heartbeat, "more_body": True})
