"""WebSockets: uvicorn's protocol on the library websockets, within the server's limits."""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from collections.abc import Sequence
from typing import Any

from starlette.types import Message
from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State

from hardpoint.builtin_plugins.server.access.counts import key_of
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.receiving import SMALL_BYTES, BodyReceiver
from hardpoint.builtin_plugins.server.streaming import ClientGoneError

from .traffic import TrafficRecorder

_log = logging.Logger("hardpoint.websockets", logging.WARNING)
"""Without uvicorn's lines for each handshake, which have the query."""
_log.parent = logging.getLogger("hardpoint")

_OF_HANDSHAKE = (b"host", b"upgrade", b"connection")
_PREFIX = b"sec-websocket-"


_PIECE_BYTES = 4096  # are parsed at a time, so that few frames come before the limits are checked
_SMALL_FRAME = 1024
_FRAMES, _KEY_FRAMES = 1000, 15_000
"""Small frames in a minute: of a connection, and of all connections of a key."""

_INVALID, _POLICY, _LATER = 1007, 1008, 1013


class WebSocketConnection(WebSocketsSansIOProtocol):
    """One connection after its handshake was asked for.

    It ends if the client stops reading, does not go on with a message, or sends too many frames
    that are small: pings, pongs, and fragments of less than 1 KiB. Messages that are not whole
    count as bodies do.
    """

    def __init__(
        self,
        settings: ServerConfig,
        traffic: TrafficRecorder,
        receiver: BodyReceiver,
        **kwargs: Any,
    ) -> None:
        """Serve a connection that the traffic counts already; arguments as of `Connection`."""
        super().__init__(**kwargs)
        self._settings, self._traffic, self._receiver = settings, traffic, receiver
        self.logger = _log
        self._rest = b""
        self._held = 0
        self._begun: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._frames, self._counted_at = float(_FRAMES), self.loop.time()
        self._is_failed = False

    def take_over(
        self, transport: asyncio.Transport, url: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> None:
        """Go on with the connection of a request that asks for a WebSocket.

        Args:
            url: target of the request.
            headers: its headers, which are within their limits.
        """
        self.connection_made(transport)
        # The library has limits of its own for heads, so it gets what it reads of this one.
        needed = [(n, v) for n, v in headers if n in _OF_HANDSHAKE or n.startswith(_PREFIX)]
        lines = [b"%b: %b\r\n" % header for header in needed]
        path, _, query = url.partition(b"?")
        self.data_received(b"GET / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n")
        if hasattr(self, "scope"):  # else the library has refused the handshake
            self.scope["headers"] = list(headers)
            self.scope["query_string"] = query
            self.scope["raw_path"] = path
            self.scope["path"] = urllib.parse.unquote(path.decode("ascii", "replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._traffic.connected(-1)
        self._rest = b""
        self._is_failed = True
        self._release()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the client until there is a message for the application."""
        if self._is_failed:
            return
        data = self._rest + data
        self._rest = b""
        for start in range(0, len(data), _PIECE_BYTES):
            if self.read_paused and not self.close_sent:
                self._rest = data[start:]
                return
            super().data_received(data[start : start + _PIECE_BYTES])
            if self._is_failed:
                return
        self._check_message()

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next message; go on with reading once there is no further one."""
        message = await super().receive()
        if not self.read_paused:
            self.data_received(b"")
        return message

    def handle_events(self) -> None:
        """Handle the frames that have come, if they are not too many."""
        for event in self.conn.events:
            if isinstance(event, Frame) and self._is_small(event) and not self._takes_frame():
                self.conn.events_received()
                self._fail(_POLICY, "expected fewer small frames in a minute", "websocket_frames")
                return
        super().handle_events()

    def send_receive_event_to_app(self) -> None:
        """Give a whole message to the application; invalid UTF-8 ends the connection."""
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self._fail(_INVALID, "expected a text in UTF-8", "websocket_text")
                return
        super().send_receive_event_to_app()

    def _is_small(self, frame: Frame) -> bool:
        if frame.opcode is Opcode.PONG:
            return bytes(frame.data) != self.pending_ping_payload
        if frame.opcode is Opcode.PING:
            return True
        is_part = frame.opcode is Opcode.CONT or not frame.fin
        return is_part and len(frame.data) < _SMALL_FRAME

    def _takes_frame(self) -> bool:
        now = self.loop.time()
        grown = (now - self._counted_at) * _FRAMES / 60
        self._frames, self._counted_at = min(_FRAMES, self._frames + grown) - 1, now
        if self._frames < 0:
            return False
        name = f"frames of {self._key}"
        return not self._traffic.counts.take_from_rate(name, _KEY_FRAMES, now)

    @property
    def _key(self) -> str:
        return key_of(self.scope["state"]) if hasattr(self, "scope") else ""

    def _check_message(self) -> None:
        """Count the bytes of a message that is not whole, and expect its next part in time."""
        size = sum(map(len, self.frames)) + len(self.conn.reader.buffer)
        if not size:
            self._release()
            return
        if self._begun is None:
            self._begun = self.loop.time()
        held = size if size > SMALL_BYTES else 0
        has_room = self._receiver.hold(held - self._held, self._key)
        self._held = held
        if held and not has_room:
            self._fail(_LATER, "the server holds as many bytes as it may", "websocket_bytes")
            return
        if self._timer is not None:
            self._timer.cancel()
        if self.read_paused:  # it is not the client that is late
            return
        deadline = self._receiver.deadline(self._begun, size)
        self._timer = self.loop.call_at(deadline, self._is_late)

    def _is_late(self) -> None:
        seconds = self._settings.body_seconds
        self._fail(_POLICY, f"expected the rest of a message within {seconds:g} s", "body_time")

    def _release(self) -> None:
        self._receiver.hold(-self._held, self._key)
        self._held, self._begun = 0, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fail(self, code: int, reason: str, counted: str) -> None:
        self._is_failed = True
        self._rest, self.frames = b"", []
        self._release()
        self._traffic.refused(self.client, None, counted)
        if self.conn.state is not State.OPEN:
            self.transport.abort()
            return
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    async def send(self, message: Message) -> None:  # type: ignore[override]
        """Send a message; wait for the client to read, for a while.

        Raises:
            ClientGoneError: the client is gone, or reads nothing.
        """
        try:
            async with asyncio.timeout(self._settings.send_seconds):
                await super().send(message)  # type: ignore[arg-type]
            if self.initial_response is not None and self.close_sent:
                self.handshake_complete = True  # it was refused, which is no failure
        except TimeoutError:
            self._traffic.refused(self.client, None, "slow_reader")
            self.transport.abort()
            raise ClientGoneError from None
        except ClientDisconnected:
            raise ClientGoneError from None
