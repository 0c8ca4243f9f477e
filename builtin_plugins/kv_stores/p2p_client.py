"""Questions to another engine for blocks."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import zmq

from .p2p_messages import OTHER, YES, Question, encode

Socket = zmq.Socket[bytes]
Connect = Callable[[], Socket]

_SLICE_S = 0.2  # so that closing does not wait for an answer
_STATUS_FRAMES = 3  # of an answer with a payload


class OtherModelError(Exception):
    """A peer has blocks of another model, or in another layout."""


class PeerClient:
    """Asks one peer; for any thread.

    A peer that did not answer in time is not asked again for a while, but by `ask` with
    `even_if_silent`.
    """

    def __init__(self, name: str, connect: Connect, retry_seconds: float) -> None:
        """Connect later.

        Args:
            name: of the peer.
            connect: returns a DEALER socket that is connected to it, in the background.
            retry_seconds: for which it is not asked after it did not answer.
        """
        self.name = name
        self._connect = connect
        self._retry_seconds = retry_seconds
        self._silent_until = 0.0
        self._serials = itertools.count(1)
        self._free: list[Socket] = []
        self._num_used = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextmanager
    def _socket(self) -> Iterator[Socket]:
        """Lend a socket to a thread."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the store is closed")
            self._num_used += 1
            socket = self._free.pop() if self._free else None
        try:
            if socket is None:
                socket = self._connect()
            yield socket
        finally:
            with self._changed:
                self._num_used -= 1
                if socket is not None:
                    self._free.append(socket)
                self._changed.notify_all()

    def ask(
        self,
        question: Question,
        seconds: float,
        *,
        connect_seconds: float,
        even_if_silent: bool = False,
    ) -> zmq.Frame | None:
        """Return the payload of the answer; None if there is none.

        Args:
            seconds: to wait for it.
            connect_seconds: how much of it to wait for a peer that is not connected.
            even_if_silent: ask a peer that did not answer a moment ago.

        Raises:
            OtherModelError: the peer has blocks of another model.
        """
        now = time.monotonic()
        if now < self._silent_until and not even_if_silent:
            return None
        serial = next(self._serials).to_bytes(8, "big")
        with self._socket() as socket:
            connected_by = now + min(seconds, connect_seconds)
            if not self._send(socket, [serial, encode(question)], connected_by):
                return None
            return self._answer(socket, serial, now + seconds)

    def notify(self, question: Question, seconds: float) -> None:
        """Send what has no answer."""
        serial = next(self._serials).to_bytes(8, "big")
        with self._socket() as socket:
            self._send(socket, [serial, encode(question)], time.monotonic() + seconds)

    def _send(self, socket: Socket, frames: Sequence[bytes], until: float) -> bool:
        """Send frames once the peer is connected; return whether it was in time."""
        while not self._closed:
            try:
                socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                if not self._wait(socket, zmq.POLLOUT, until):
                    return False
            else:
                return True
        return False

    def _answer(self, socket: Socket, serial: bytes, until: float) -> zmq.Frame | None:
        """Return the payload of the answer with this serial; others come too late."""
        while not self._closed:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if not self._wait(socket, zmq.POLLIN, until):
                    return None
                continue
            if time.monotonic() >= until:  # of a peer that floods
                return None
            if frames[0].bytes != serial or not 2 <= len(frames) <= _STATUS_FRAMES:
                continue
            self._silent_until = 0.0
            status = frames[1].bytes
            if status == OTHER:
                raise OtherModelError(
                    f"peer {self.name!r} has blocks of another model, or in another layout"
                )
            return frames[2] if status == YES and len(frames) == _STATUS_FRAMES else None
        return None

    def _wait(self, socket: Socket, event: int, until: float) -> bool:
        """Wait for a socket; return False when the time is over, or the peer went."""
        left = until - time.monotonic()
        if left > 0:
            if socket.poll(math.ceil(min(left, _SLICE_S) * 1000), event):
                return True
            if event == zmq.POLLOUT or socket.poll(0, zmq.POLLOUT):
                return True
        self._silent_until = time.monotonic() + self._retry_seconds
        return False

    def close(self, seconds: float) -> None:
        """Close the sockets, once threads do not use them any more."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._num_used, seconds)
            free, self._free = self._free, []
        for socket in free:
            socket.close(linger=0)
