"""Questions to other engines for blocks."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from .p2p_messages import OTHER, YES, Question, encode

Socket = zmq.Socket[bytes]

_SLICE_S = 0.2  # so that closing does not wait for an answer
_STATUS_FRAMES = 3  # of an answer with a payload


class Connect(Protocol):
    """Returns a DEALER socket that is connected to a peer, in the background."""

    def __call__(self, *, queues: bool = False) -> Socket | None:
        """Connect.

        Args:
            queues: whether messages wait for the connection; else they cannot be sent before.

        Returns:
            The socket; None if no one listens there.
        """


class PeerExchange:
    """A question to a peer and its answer.

    Attributes:
        client: client of the peer.
        socket: lent by the client.
        is_probe: whether the peer did not answer a moment ago.
        is_sent: whether the peer was connected.
        payload: payload of the answer; None if there is none.
    """

    def __init__(
        self, client: PeerClient, socket: Socket, frames: list[bytes], *, is_probe: bool
    ) -> None:
        """Send the frames later."""
        self.client = client
        self.socket = socket
        self._frames = frames
        self.is_probe = is_probe
        self.is_sent = False
        self.payload: zmq.Frame | None = None

    def advance(self, connected_by: float, until: float) -> bool:
        """Send and receive without waiting; return whether the exchange has ended."""
        try:
            if not self.is_sent:
                self.socket.send_multipart(self._frames, zmq.NOBLOCK)
                self.is_sent = True
            while time.monotonic() < until:  # a peer may send others without end
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                if frames[0].bytes == self._frames[0] and 2 <= len(frames) <= _STATUS_FRAMES:
                    self._read(frames)
                    return True
        except zmq.Again:
            if time.monotonic() < (until if self.is_sent else connected_by):
                return False
        except zmq.ZMQError as error:
            self.client.failed(str(error))
            return True
        self.client.fell_silent()
        return True

    def _read(self, frames: Sequence[zmq.Frame]) -> None:
        status = frames[1].bytes
        if status == OTHER:
            self.client.failed("it has blocks of another model, or in another layout")
            return
        self.client.answered()
        if status == YES and len(frames) == _STATUS_FRAMES:
            self.payload = frames[2]

    def has_lost_peer(self) -> bool:
        """Return whether a peer that was asked is not connected any more."""
        return self.is_sent and not self.socket.poll(0, zmq.POLLIN | zmq.POLLOUT)


class PeerClient:
    """Asks one peer; for any thread.

    A peer that did not answer in time is not asked again for a while, but as a probe.
    """

    def __init__(
        self, name: str, connect: Connect, retry_seconds: float, report_fault: Callable[[str], None]
    ) -> None:
        """Connect later.

        Args:
            retry_seconds: for which the peer is not asked after it did not answer.
            report_fault: called with a message each time that the peer is tried without success,
                and once until it answers again if its answers cannot be used.
        """
        self._name = name
        self._connect = connect
        self._retry_seconds = retry_seconds
        self._report_fault = report_fault
        self._reported = ""
        self._silent_until = 0.0
        self._absent_until = 0.0  # for which it was reported that no one listens
        self._is_probed = False
        self._serials = itertools.count(1)
        self._free: list[Socket] = []
        self._notifier: Socket | None = None
        self._num_used = 0
        self.is_closed = False
        self._changed = threading.Condition()

    def begin(self, question: Question, *, even_if_silent: bool = False) -> PeerExchange | None:
        """Return an exchange, which `end` ends; None if the peer is not to be asked.

        Args:
            question: to the peer.
            even_if_silent: ask a peer that did not answer a moment ago, but one question at a time.
        """
        with self._changed:
            self._check_open()
            is_silent = time.monotonic() < self._silent_until
            if is_silent and (not even_if_silent or self._is_probed):
                return None
            socket = self._free.pop() if self._free else self._try_to_connect(queues=False)
            if socket is None:
                return None
            self._num_used += 1
            self._is_probed = self._is_probed or is_silent
        serial = next(self._serials).to_bytes(8, "big")
        return PeerExchange(self, socket, [serial, encode(question)], is_probe=is_silent)

    def end(self, exchange: PeerExchange) -> None:
        """Take the socket back."""
        with self._changed:
            self._num_used -= 1
            self._free.append(exchange.socket)
            if exchange.is_probe:
                self._is_probed = False
            self._changed.notify_all()

    def notify(self, question: Question) -> None:
        """Send a message without an answer if there is room for it; never wait."""
        with self._changed:
            self._check_open()
            if self._notifier is None:
                self._notifier = self._try_to_connect(queues=True)
            if self._notifier is not None:
                serial = next(self._serials).to_bytes(8, "big")
                try:
                    self._notifier.send_multipart([serial, encode(question)], zmq.NOBLOCK)
                except zmq.ZMQError:
                    pass  # the lease ends early, at worst

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the store is closed")

    def _try_to_connect(self, *, queues: bool) -> Socket | None:
        try:
            socket = self._connect(queues=queues)
        except (OSError, zmq.ZMQError) as error:
            self.failed(str(error))
            return None
        if socket is None and time.monotonic() >= self._absent_until:
            self._absent_until = time.monotonic() + self._retry_seconds
            self._report_loss("no engine listens at its address")
        return socket

    def answered(self) -> None:
        """Record an answer."""
        self._silent_until, self._reported = 0.0, ""

    def fell_silent(self) -> None:
        """Record that the peer did not answer in time, and report it."""
        if time.monotonic() >= self._silent_until:
            self._report_loss("it does not answer")
        self._silent_until = time.monotonic() + self._retry_seconds

    def _report_loss(self, reason: str) -> None:
        message = f"peer {self._name!r}: {reason}; its blocks are computed here"
        self._report_fault(message)

    def failed(self, message: str) -> None:
        """Report why the peer cannot be used, and do not ask it for a while."""
        self._silent_until = time.monotonic() + self._retry_seconds
        if message != self._reported:
            self._reported = message
            self._report_fault(f"peer {self._name!r}: {message}")

    def close(self, seconds: float) -> None:
        """Close the sockets, once threads do not use them any more."""
        with self._changed:
            self.is_closed = True
            self._changed.wait_for(lambda: not self._num_used, seconds)
            free, self._free = self._free, []
            if self._notifier is not None:
                free.append(self._notifier)
                self._notifier = None
        for socket in free:
            socket.close(linger=0)


def ask(
    questions: Sequence[tuple[PeerClient, Question]],
    seconds: float,
    *,
    connect_seconds: float,
    even_if_silent: bool = False,
) -> list[zmq.Frame | None]:
    """Ask peers at the same time; return the payloads of their answers.

    Args:
        questions: to each peer.
        seconds: to wait for all answers.
        connect_seconds: how much of it to wait for peers that are not connected.
        even_if_silent: see `PeerClient.begin`.
    """
    began = time.monotonic()
    exchanges: list[PeerExchange | None] = []
    try:
        for client, question in questions:
            exchanges.append(client.begin(question, even_if_silent=even_if_silent))
        going = [exchange for exchange in exchanges if exchange is not None]
        _run(going, began + min(seconds, connect_seconds), began + seconds)
    finally:
        for exchange in exchanges:
            if exchange is not None:
                exchange.client.end(exchange)
    return [None if exchange is None else exchange.payload for exchange in exchanges]


def _run(exchanges: Sequence[PeerExchange], connected_by: float, until: float) -> None:
    """Let exchanges end, each with an answer or without; or none if the store is closed."""
    going = [exchange for exchange in exchanges if not exchange.advance(connected_by, until)]
    while going and not any(exchange.client.is_closed for exchange in exchanges):
        poller = zmq.Poller()
        for exchange in going:
            poller.register(exchange.socket, zmq.POLLIN if exchange.is_sent else zmq.POLLOUT)
        ends = min(until if exchange.is_sent else connected_by for exchange in going)
        wait = min(max(ends - time.monotonic(), 0.0), _SLICE_S)
        ready = dict(poller.poll(math.ceil(wait * 1000)))
        for exchange in list(going):
            if exchange.socket not in ready and exchange.has_lost_peer():
                exchange.client.fell_silent()
                going.remove(exchange)
        going = [exchange for exchange in going if not exchange.advance(connected_by, until)]
