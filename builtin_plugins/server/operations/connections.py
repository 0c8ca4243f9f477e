"""Connections: uvicorn's HTTP protocol, with limits on sizes, times and numbers."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.errors import AnswerError, error_response, unavailable
from hardpoint.builtin_plugins.server.receiving import BodyReceiver

from .malformed_http import malformed
from .slow_readers import WriteWatch
from .traffic import TrafficRecorder, request_id_of
from .websockets import WebSocketConnection

_LINGER_SECONDS = 2.0
_HEADER_SEPARATORS = 4
_UPGRADING = (b"upgrade", b"http2-settings")
_MOST_WAITING = 16
_MOST_REFUSED = 64
_ENDED_SHARE = 16  # one part in so many idle connections is closed at once, as it takes a sort
_PIECE_BYTES = 4096  # are parsed at a time, so that few requests begin before others have a turn
_FRAME_BYTES = 8  # of chunk sizes and extensions may come with each byte of a body
_MOST_PARTS, _PART_BYTES = 1 << 15, 64
"""Chunks of a body that may be smaller than that, as each costs as much time as a large one."""
_WITHOUT_CHUNKS = ("0.9", "1.0")


class ServerConnection(HttpToolsProtocol):
    """One connection; it ends with the reason for a client that is too slow, or sends no HTTP.

    Requests for another protocol, such as HTTP/2, are answered as if they did not ask for it. So
    are those for a WebSocket where no route is one.
    """

    def __init__(
        self,
        settings: ServerConfig,
        traffic: TrafficRecorder,
        receiver: BodyReceiver,
        takes_websocket: Callable[[str], bool] = lambda _: False,
        **kwargs: Any,
    ) -> None:
        """Serve a connection.

        Args:
            takes_websocket: returns whether a path is that of a WebSocket.
            kwargs: arguments of uvicorn's protocol.
        """
        super().__init__(**kwargs)
        self._settings, self._traffic, self._receiver = settings, traffic, receiver
        self._takes_websocket, self._kwargs = takes_websocket, kwargs
        self._websocket: WebSocketConnection | None = None
        self._in_head = True
        self._idle_since: float | None = None  # without a request that is being answered
        self._head_bytes = 0
        self._frame_bytes = 0
        self._parts = 0.0  # of a body, less one for each _PART_BYTES
        self._rest = b""
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_watch: WriteWatch | None = None
        self._upgrading = (b"", "")
        self._reads = True
        self._running: RequestResponseCycle | None = None
        self._refusal: tuple[AnswerError, str] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Expect a request, or refuse it if there are too many connections."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._writer = _Writer(self.transport, self._finish)
        self._write_watch = WriteWatch(
            self.transport, self.loop, self._settings.send_seconds, self._is_writing, self._end_slow
        )
        self._traffic.connected(1)
        open_now = len(self.connections) + self._traffic.connections_elsewhere  # of this address
        beyond = open_now - self._settings.limits.connections
        if beyond > 0:
            beyond -= self._close_idle()
        self._idle_since = time.monotonic()
        if beyond > _MOST_REFUSED:
            self._traffic.refused(self.client, None, "connections")
            self.transport.close()
            return
        if beyond > 0:
            self.app = self._refuse_connection
        self._await_head()

    def _close_idle(self) -> int:
        """Close the connections that have been idle for the longest time; return their number.

        So connections that are open and send nothing do not keep other clients out.
        """
        idle = [
            (connection._idle_since, connection)
            for connection in self.connections
            if isinstance(connection, ServerConnection) and connection._idle_since is not None
        ]
        idle.sort(key=lambda item: item[0])
        oldest = idle[: -(-len(idle) // _ENDED_SHARE)]
        for _, connection in oldest:
            connection._idle_since = None
            self._traffic.refused(connection.client, None, "idle_connections")
            connection._close()
        return len(oldest)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._idle_since = None
        self._traffic.connected(-1)
        self._stop_head_timer()
        if self._write_watch is not None:
            self._write_watch.stop()
            self._write_watch = None  # it holds methods of the connection
        super().connection_lost(exc)
        # Without these it would be held in a circle, with all that it has, until a collection.
        self._rest = b""
        self.pipeline.clear()
        self.app = self.config.loaded_app
        self._writer.close = self.transport.close
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True  # uvicorn notifies the latest request alone
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Read bytes of the client."""
        if not self._reads:
            return
        self._unset_keepalive_if_required()
        if self._rest:
            self._rest += data
            self.flow.pause_reading()
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Parse data; leave a rest for later if as much waits as may."""
        for start in range(0, len(data), _PIECE_BYTES):
            if self._websocket is not None:
                self._websocket.data_received(data[start:])
                return
            if not self._reads:
                return
            if not self._has_room():
                self._rest = data[start:]
                self._stop_head_timer()  # it is not the client that is late
                self.flow.pause_reading()
                return
            self._parse(data[start : start + _PIECE_BYTES])

    def _has_room(self) -> bool:
        waiting = self.pipeline
        if len(waiting) >= _MOST_WAITING:
            return False
        return sum(len(cycle.body) for cycle, _ in waiting) <= HIGH_WATER_LIMIT

    def _read_rest(self) -> None:
        rest, self._rest = self._rest, b""
        if rest and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._read(rest)

    def _parse(self, data: bytes) -> None:
        in_head = self._in_head
        if in_head:
            self._head_bytes += len(data)
        else:
            self._frame_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._asks_for_websocket():
                    self._become_websocket(data[upgrade.args[0] :])
                    return
                head = self._without_upgrade()  # which makes another parser
                self.parser.feed_data(head + data[upgrade.args[0] :])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as wrong:
            error, reason = self._refusal or (malformed(wrong, data), "malformed")
            self._refuse(error, reason)
            return
        limit = self._header_limit
        if in_head and self._in_head and self._head_bytes:
            if self._head_bytes > limit:
                self._refuse(self._too_long(), "header_size")
            elif self._head_timer is None:
                self._await_head()
        elif not self._in_head and self._frame_bytes > limit:
            frames = "body: expected at most {} bytes of chunk extensions and trailers"
            self._refuse(self._too_long(frames), "header_size")
        elif not self._in_head and self._parts > _MOST_PARTS:
            message = f"body: expected chunks of {_PART_BYTES} bytes or more on average"
            self._refuse(AnswerError(400, message), "small_chunks")

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the request's; leave out the trailers of its body."""
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Add to the body of a request."""
        self._frame_bytes -= min(self._frame_bytes, (1 + _FRAME_BYTES) * len(body))
        self._parts = max(self._parts + 1 - len(body) / _PART_BYTES, 0.0)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Answer a request after its headers.

        Raises:
            ValueError: they are too long, which ends the parser.
        """
        if self.parser.should_upgrade():
            self._upgrading = self.parser.get_method(), self.parser.get_http_version()
            return
        self._in_head = False
        self._idle_since = None
        self._frame_bytes, self._parts = 0, 0.0
        self._stop_head_timer()
        if self._head_size() > self._header_limit:
            self._refusal = self._too_long(), "header_size"
            raise ValueError("the headers are too long")
        super().on_headers_complete()
        self.cycle.transport = self._writer  # type: ignore[assignment]
        if self.pipeline and self._has_room():
            self.flow.resume_reading()  # else it is not noticed that the client is gone

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def until_cut(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["http_version"] in _WITHOUT_CHUNKS:
                send = _without_chunks(cycle, send)
            await app(scope, receive, send)
            if cycle.response_started and not (cycle.response_complete or cycle.disconnected):
                cycle.disconnected = True  # why the answer is cut is logged where it is
                self._close()

        self._running = cycle
        super()._start_asgi_task(cycle, until_cut)  # type: ignore[arg-type]

    def _asks_for_websocket(self) -> bool:
        """Return whether a head opens a WebSocket that there is; else it is answered in HTTP."""
        if self._upgrading != (b"GET", "1.1") or self._head_size() > self._header_limit:
            return False
        if self.app is not self.config.loaded_app:  # which refuses the connection
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            return False  # requests before it are not answered yet
        headers = dict(self.headers)
        is_asked = headers.get(b"upgrade", b"").lower() == b"websocket"
        is_complete = headers.get(b"sec-websocket-version") == b"13" and (
            b"sec-websocket-key" in headers and b"content-length" not in headers
        )
        path = urllib.parse.unquote(self.url.partition(b"?")[0].decode("ascii", "replace"))
        return is_asked and is_complete and self._takes_websocket(path)

    def _become_websocket(self, rest: bytes) -> None:
        """Let another protocol go on with the connection.

        Args:
            rest: what has come after the head.
        """
        self._stop_head_timer()
        if self._write_watch is not None:
            self._write_watch.stop()
        self.connections.discard(self)
        self._websocket = WebSocketConnection(
            self._settings, self._traffic, self._receiver, **self._kwargs
        )
        self._websocket.take_over(self.transport, self.url, self.headers)
        self.transport.set_protocol(self._websocket)
        if rest:
            self._websocket.data_received(rest)

    def _head_size(self) -> int:
        names = sum(len(n) + len(v) + _HEADER_SEPARATORS for n, v in self.headers)
        return len(self.url) + names

    @property
    def _header_limit(self) -> int:
        return self._settings.limits.header_bytes

    def _without_upgrade(self) -> bytes:
        """Return the head of a request again, without its wish for another protocol.

        The parser takes everything after such a head for the other protocol, but clients that would
        like HTTP/2, such as Java's, send the body of a usual request.

        Raises:
            HttpParserError: it is a CONNECT, which has no body.
        """
        method, version = self._upgrading
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT")
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        for name, value in self.headers:
            remaining = value
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                remaining = b", ".join(o for o in options if o.lower() not in _UPGRADING)
            if name not in _UPGRADING:
                lines.append(b"%b: %b" % (name, remaining))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_complete(self) -> None:
        """End a request; another one may follow."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0
        self._stop_head_timer()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of this one."""
        if not self._reads and not self.pipeline:
            return
        super().on_response_complete()
        if not self.transport.is_closing():
            if self.cycle.response_complete and not self.pipeline:
                self._idle_since = time.monotonic()
            if self._rest and len(self.pipeline) < _MOST_WAITING:
                self.loop.call_soon(self._read_rest)
            if not self._in_head:
                self._await_head()
            if self.transport.get_write_buffer_size():
                self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        if not self.transport.is_closing():
            self._close()

    def pause_writing(self) -> None:
        """Let the application wait until the client has read more, for a while."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """Let the application write."""
        super().resume_writing()
        if self._write_watch is not None:
            self._write_watch.stop()

    def _await_head(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self._settings.header_seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._in_head and self._head_bytes:
            seconds = self._settings.header_seconds
            message = f"headers: expected them within {seconds:g} s (server.header_seconds)"
            self._refuse(AnswerError(408, message), "header_time")
        elif self.cycle is None or self.cycle.response_complete:
            self._close()

    def _too_long(self, expected: str = "headers: expected at most {} bytes") -> AnswerError:
        limit = self._header_limit
        return AnswerError(431, f"{expected.format(limit)} (server.limits.header_bytes)")

    def _refuse(self, error: AnswerError, reason: str) -> None:
        self._stop_head_timer()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body or self.pipeline:
                self._traffic.refused(self.client, None, reason)
                self._reads = False
                cycle.keep_alive = False
                return
            cycle.disconnected = True
            cycle.message_event.set()
        elif cycle is not None and not self._in_head:  # the request that is wrong has its answer
            self._traffic.refused(self.client, None, reason)
            self._linger()
            return
        self._traffic.refused(self.client, error.status, reason)
        self.transport.write(self._answer(error))
        self._linger()

    def _answer(self, error: AnswerError) -> bytes:
        response = error_response(error, "")
        headers = [
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return STATUS_LINE[HTTPStatus(error.status)] + lines + b"\r\n" + bytes(response.body)

    async def _refuse_connection(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._settings.limits.connections
        error = unavailable(
            f"the server has {limit} connections, its maximum (server.limits.connections); "
            "try again later"
        )
        request_id = request_id_of(scope)
        error.headers.update({"connection": "close", "x-request-id": request_id})
        self._traffic.refused(self.client, error.status, "connections", request_id)
        await error_response(error, scope["path"])(scope, receive, send)

    def _finish(self) -> None:
        if self._in_head and self._reads and not self._rest:
            self._close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Close the connection once the client has stopped sending, or soon.

        Closing it while more comes would reset it, and so take the answer from the client.
        """
        self._reads = False
        self._rest = b""
        self.pipeline.clear()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(_LINGER_SECONDS, self._close)

    def _close(self) -> None:
        """Close the connection after the client has read the pending bytes."""
        if self.transport.get_write_buffer_size():
            self._watch_writing()
        self.transport.close()

    def _watch_writing(self) -> None:
        if self._write_watch is not None:
            self._write_watch.start()

    def _is_writing(self) -> bool:
        return not self.flow.write_paused and not self.cycle.response_complete

    def _end_slow(self) -> None:
        self._traffic.refused(self.client, None, "slow_reader")
        self.transport.abort()


class _Writer:
    """The transport, as the answer to a request sees it: with another way to close it."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Any) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def _without_chunks(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return a `send` without chunks, for HTTP/1.0 clients; it closes the connection at the end.

    Args:
        cycle: the answer's, which would else have chunks where there is no content-length.
    """
    cycle.chunked_encoding = False

    async def plain(message: Message) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length += len(message.get("body", b""))
        await send(message)

    return plain
