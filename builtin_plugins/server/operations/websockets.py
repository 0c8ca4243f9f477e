"""WebSockets: uvicorn's protocol on the library websockets, within the server's limits."""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from collections.abc import Sequence
from typing import Any

from starlette.types import Message
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.streaming import ClientGoneError

from .traffic import Traffic

_log = logging.Logger("hardpoint.websockets", logging.WARNING)
"""Without uvicorn's lines for each handshake, which have the query."""
_log.parent = logging.getLogger("hardpoint")

_OF_HANDSHAKE = (b"host", b"upgrade", b"connection")
_PREFIX = b"sec-websocket-"


class WebSocketConnection(WebSocketsSansIOProtocol):
    """One connection after its handshake was asked for; it ends if the client stops reading."""

    def __init__(self, settings: ServerConfig, traffic: Traffic, **kwargs: Any) -> None:
        """Serve a connection that the traffic counts already; arguments as of `Connection`."""
        super().__init__(**kwargs)
        self._settings, self._traffic = settings, traffic
        self.logger = _log

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
        super().connection_lost(exc)

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
