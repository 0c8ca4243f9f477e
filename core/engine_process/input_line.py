"""The engine's end of what one client sends: bounded, and connected again when it was cut."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from hardpoint.core.wire import MOST_BYTES

__all__ = ["InputLine"]

_log = logging.getLogger("hardpoint")
_CUT, _JOINED = zmq.Event.DISCONNECTED, zmq.Event.HANDSHAKE_SUCCEEDED


class InputLine:
    """A DEALER that takes no frame of more than `MOST_BYTES`.

    ZMQ cuts a connection over which a larger one is announced, before it has memory for it, and
    leaves it cut. For one thread.

    Attributes:
        socket: to be read; `renew` may put another one in its place.
        events: to be polled beside it; readable when `renew` has something to look at.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], identity: bytes, address: str, client: int
    ) -> None:
        """Connect to a client, which may not be there yet."""
        self._context, self._identity, self._address = context, identity, address
        self._client = client
        self._was_cut = False
        self._connect()

    def renew(self) -> Iterator[list[zmq.Frame]]:
        """Look at what became of the connection; if it was cut, connect again.

        Yields:
            What came before the cut and was not read yet.
        """
        while self.events.poll(0):
            event = recv_monitor_message(self.events)["event"]
            if event == _CUT:
                yield from self._unread()
                self.close()
                self._was_cut = True
                self._connect()
            elif event == _JOINED and self._was_cut:  # where the client is gone, nobody joins
                self._was_cut = False
                _log.warning(
                    "the connection to client %d was cut, as for a frame of more than %d bytes; "
                    "it is there again, what was sent meanwhile is lost",
                    self._client,
                    MOST_BYTES,
                )

    def close(self) -> None:
        """Close the socket; what was not sent is lost."""
        self.socket.disable_monitor()
        self.events.close(0)
        self.socket.close(0)

    def _connect(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, self._identity)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self.events: zmq.Socket[bytes] = self.socket.get_monitor_socket(_CUT | _JOINED)
        self.socket.connect(self._address)

    def _unread(self) -> Iterator[list[zmq.Frame]]:
        while self.socket.poll(0):
            yield self.socket.recv_multipart(copy=False)
