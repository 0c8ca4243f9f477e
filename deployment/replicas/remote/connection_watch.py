"""Monitoring of engines' connections: failures, and bytes sent since the last whole message.

libzmq keeps the frames of a message until its last one has come, without a limit. A connection
that sends too much before that is cut.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from .admission import Admission
from .connection import UNEXPLAINED_FAILURES

MOST_BYTES = 256 << 20
"""Of the connection of an engine; its frames are sent in pieces if they are large."""
MOST_BYTES_WITHOUT_SESSION = 4 << 20
INTERVAL_S = 0.1
"""Between two looks at the connections."""
_MOST_AT_ONCE = 256  # events that are read before others get a turn
_EVENTS = UNEXPLAINED_FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_TCP_INFO = getattr(socket, "TCP_INFO", None)  # Linux
_INFO_BYTES, _RECEIVED_AT = 192, 128  # `tcpi_bytes_received` in struct tcp_info


@dataclass
class _Connection:
    """A connection that was accepted.

    Attributes:
        peer: address of the other end, because descriptors are used again.
        read: bytes that had come when its last message was read.
        has_message: whether a message was read since `cut_flooding`.
        has_session: whether that message was of an engine that has joined.
    """

    peer: object
    read: int = 0
    has_message: bool = False
    has_session: bool = False


class ConnectionWatch:
    """Watches the connections of the socket where engines join. For one thread.

    Attributes:
        events: to be polled; `read_events` reads it.
    """

    def __init__(self, router: zmq.Socket[bytes], admission: Admission) -> None:
        """Watch a socket that is not bound yet.

        Args:
            router: the socket.
            admission: counts the connections that failed or were cut.
        """
        self._router, self._admission = router, admission
        self._connections: dict[int, _Connection] = {}  # by descriptor of libzmq
        self._next_check = 0.0
        self.events: zmq.Socket[bytes] = router.get_monitor_socket(_EVENTS)

    def read_events(self) -> None:
        """Read the events of connections."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_MOST_AT_ONCE):
                message = recv_monitor_message(self.events, zmq.NOBLOCK)
                event, descriptor = int(message["event"]), int(message["value"])
                if event == zmq.EVENT_ACCEPTED:
                    self._accepted(descriptor)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._connections.pop(descriptor, None)
                else:
                    self._admission.refused("a handshake that failed")

    def message_read(self, frame: zmq.Frame, *, has_session: bool) -> None:
        """Note that a whole message was read, with a frame of it."""
        connection = self._connections.get(int(frame.get(zmq.SRCFD)))
        if connection is not None:
            connection.has_message, connection.has_session = True, has_session

    def cut_flooding(self, now: float) -> None:
        """Cut the connections with too large a message, if it is time to look."""
        if now < self._next_check:
            return
        self._next_check = now + INTERVAL_S
        for descriptor, connection in list(self._connections.items()):
            try:
                with _opened(descriptor) as opened:
                    is_cut = self._is_cut(connection, opened)
            except OSError:  # it has ended
                is_cut = True
            if is_cut:
                self._connections.pop(descriptor)

    def cut(self, frame: zmq.Frame) -> None:
        """Cut the connection of a frame, if it is still there."""
        descriptor = int(frame.get(zmq.SRCFD))
        connection = self._connections.get(descriptor)
        with contextlib.suppress(OSError):
            if connection is not None:
                with _opened(descriptor) as opened:
                    if opened.getpeername() == connection.peer:
                        _reset(opened)

    def close(self) -> None:
        """Watch no more."""
        self._router.disable_monitor()
        self.events.close(0)

    def _accepted(self, descriptor: int) -> None:
        port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        with contextlib.suppress(OSError), _opened(descriptor) as opened:
            if opened.getsockname()[1] == port:
                self._connections[descriptor] = _Connection(opened.getpeername())

    def _is_cut(self, connection: _Connection, opened: socket.socket) -> bool:
        """Cut a connection if its message is too large; return whether it is not watched now."""
        if opened.getpeername() != connection.peer:
            return True
        received = _num_received(opened)
        if connection.has_message:
            connection.read, connection.has_message = received, False
        limit = MOST_BYTES if connection.has_session else MOST_BYTES_WITHOUT_SESSION
        if received - connection.read <= limit:
            return False
        _reset(opened)
        self._admission.refused(f"a message without an end, of more than {limit} bytes")
        return True


def _opened(descriptor: int) -> socket.socket:
    """Return a socket with a copy of a descriptor, which is closed alone."""
    return socket.socket(fileno=os.dup(descriptor))


def _reset(connection: socket.socket) -> None:
    # A reset, because its sender would wait for an end that the kernel delays.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RDWR)


def _num_received(connection: socket.socket) -> int:
    if _TCP_INFO is None:
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    if len(info) < _RECEIVED_AT + 8:  # of an older kernel
        return 0
    return int(struct.unpack_from("<Q", info, _RECEIVED_AT)[0])
