"""HTTP/1.1 over connections that are kept: requests out, bodies in as they arrive.

Bodies are given to a receiver inside the event loop's read callback, so that a chunk of a stream
costs no task switch, and its time is that of the read.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from .target import Target


class AnswerReceiver(Protocol):
    """Reads an answer."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Read the status, and the headers, whose names are in lower case."""

    def body(self, data: bytes, now: float) -> None:
        """Read a part of the body that arrived at a time of `time.perf_counter`."""


class CutError(ConnectionError):
    """The server closed the connection before its answer ended."""


class ClientConnection(asyncio.Protocol):
    """A connection, for one request at a time.

    Attributes:
        transport: set once it is connected.
        used: whether a request was answered on it.
        reusable: whether another request may be sent on it.
    """

    def __init__(self) -> None:
        """Make one that is not connected."""
        self.transport: asyncio.Transport | None = None
        self.used = False
        self.reusable = True
        self._parser: httptools.HttpResponseParser | None = None
        self._receiver: AnswerReceiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self._now = 0.0
        self._until_eof = False
        self.any_bytes = False

    async def ask(self, request: bytes, receiver: AnswerReceiver) -> None:
        """Send a request and read its answer to the end.

        Raises:
            CutError: the connection was closed before.
            ConnectionError: the answer is not HTTP/1.1.
        """
        if self.transport is None or not self.reusable:
            raise CutError("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._receiver, self._headers, self._until_eof = receiver, {}, False
        self.any_bytes = False
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self._done
            self.used = True
        except BaseException:
            self.close()
            raise
        finally:
            self._receiver = self._done = None

    def close(self) -> None:
        """Close it at once."""
        self.reusable = False
        if self.transport is not None:
            self.transport.abort()

    # The event loop calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        if self._parser is None or self._done is None:
            self.close()  # bytes that no request asked for
            return
        self.any_bytes = True
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = (
                error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            )
            self._fail(cause or ConnectionError("the answer is not HTTP/1.1"))

    def connection_lost(self, error: Exception | None) -> None:
        """End the request."""
        self.reusable = False
        if self._done is None or self._done.done():
            return
        if self._until_eof and error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(CutError("closed before the answer's end"))

    # The parser calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Report the head."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status >= 200 and self._receiver is not None:
            headers = self._headers
            chunked = "chunked" in headers.get("transfer-encoding", "").lower()
            self._until_eof = not chunked and "content-length" not in headers
            self._receiver.head(status, headers)

    def on_body(self, data: bytes) -> None:
        """Report a part of the body."""
        if self._receiver is not None:
            self._receiver.body(data, self._now)

    def on_message_complete(self) -> None:
        """End the request, unless this was an interim answer."""
        assert self._parser is not None
        if self._parser.get_status_code() < 200:
            self._headers = {}
            return
        self.reusable = bool(self._parser.should_keep_alive()) and not self._until_eof
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class Pool:
    """The connections to a server.

    Attributes:
        opened: number of connections that were opened.
    """

    def __init__(self, target: Target, headers: dict[str, str] | None = None) -> None:
        """Make one without connections.

        Args:
            target: the server.
            headers: sent with every request.
        """
        self._target = target
        self._tls: ssl.SSLContext | None = target.tls()
        self._idle: list[ClientConnection] = []
        lines = {"Host": target.host_header, **(headers or {})}
        self._fixed = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.opened = 0

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request."""
        head = f"{method} {self._target.prefix}{path} HTTP/1.1\r\n{self._fixed}"
        if method != "GET":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + body

    async def connect(self) -> ClientConnection:
        """Open a connection."""
        loop = asyncio.get_running_loop()
        factory: Callable[[], ClientConnection] = ClientConnection
        target = self._target
        if target.uds:
            _, made = await loop.create_unix_connection(
                factory,
                target.uds,
                ssl=self._tls,
                server_hostname=target.host if self._tls else None,
            )
        else:
            _, made = await loop.create_connection(factory, target.host, target.port, ssl=self._tls)
        self.opened += 1
        return made

    async def ask(self, request: bytes, receiver: AnswerReceiver) -> None:
        """Send a request on an idle connection, or a new one.

        One that the server closed while it was idle is replaced, which costs the request time but
        is no error.
        """
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            try:
                return await self._ask(connection, request, receiver)
            except CutError:
                if connection.any_bytes:
                    raise
                break
        await self._ask(await self.connect(), request, receiver)

    async def _ask(
        self, connection: ClientConnection, request: bytes, receiver: AnswerReceiver
    ) -> None:
        await connection.ask(request, receiver)
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
