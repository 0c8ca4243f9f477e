"""The thread that answers other engines' questions for blocks."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils import z85

from .p2p_messages import NO, OTHER, YES, Get, Has, Renew, Take, decode
from .p2p_pool import PeerBlocks

Socket = zmq.Socket[bytes]

_log = logging.getLogger(__name__)
_MOST_WAITING = 256  # questions of one client that wait for a block
_MOST_WAITING_OF_ALL = 16384
_BURST = 64  # questions in a row, before leases are swept
_SWEEP_S = 0.5
_SERIAL_BYTES = 8


@dataclass(slots=True, frozen=True)
class _Waiting:
    """A question for a block that is not offered yet."""

    client: bytes
    serial: bytes
    until: float


class BlockServer:
    """Answers questions from a pool, in a thread that owns the socket.

    A client that does not read its answers loses them. Invalid questions get no answer. The server
    waits for no client.
    """

    def __init__(
        self,
        listening: Socket,
        keys: Socket | None,
        allowed: frozenset[bytes],
        pool: PeerBlocks,
        identity: str,
        report_fault: Callable[[str], None],
    ) -> None:
        """Start the thread.

        Args:
            listening: ROUTER socket, bound; owned from now on.
            keys: bound to ZeroMQ's authentication, where clients need keys; owned from now on.
            allowed: public keys of the clients that may connect, in Z85.
            pool: borrowed.
            identity: identity of the pool's blocks.
            report_fault: called if the thread fails.
        """
        self._listening, self._keys = listening, keys
        self._allowed = frozenset(map(z85.decode, allowed))
        self._pool, self._identity = pool, identity
        self._report_fault = report_fault
        self._waiting: dict[bytes, _Waiting] = {}
        self._num_waiting: Counter[bytes] = Counter()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="KVPeerServer", daemon=True)
        self._thread.start()

    def offered(self) -> None:
        """Look whether somebody waits for a block that is new; for any thread."""
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            pass  # it wakes anyway, or is closed

    def close(self) -> None:
        """End the thread and close the sockets."""
        self._closing = True
        self.offered()
        self._thread.join()
        self._wake_sender.close()
        self._wake_receiver.close()

    def _run(self) -> None:
        sockets = [self._listening] if self._keys is None else [self._listening, self._keys]
        poller = zmq.Poller()
        for zmq_socket in (*sockets, self._wake_receiver):
            poller.register(zmq_socket, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll(math.ceil(self._timeout() * 1000)))
                if self._keys in ready:
                    self._check_key(self._keys)
                if self._wake_receiver.fileno() in ready:
                    self._wake_receiver.recv(4096)
                if self._listening in ready:
                    self._answer_some()
                self._answer_waiting()
                self._pool.sweep()
        except Exception as error:
            _log.error("blocks are not given to other engines any more", exc_info=error)
            self._report_fault(f"blocks are not given to other engines any more: {error}")
        finally:
            for zmq_socket in sockets:
                zmq_socket.close(linger=0)

    def _timeout(self) -> float:
        """Return the seconds until something has to be looked after."""
        first = min((waiting.until for waiting in self._waiting.values()), default=None)
        if first is None:
            return _SWEEP_S
        return min(max(first - time.monotonic(), 0.001), _SWEEP_S)

    def _check_key(self, keys: Socket | None) -> None:
        assert keys is not None
        version, serial, _domain, _address, _name, mechanism, *rest = keys.recv_multipart()
        is_known = mechanism == b"CURVE" and len(rest) == 1 and rest[0] in self._allowed
        status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
        keys.send_multipart([version, serial, *status, b"", b""])

    def _answer_some(self) -> None:
        for _ in range(_BURST):
            try:
                client, *frames = self._listening.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2 or len(frames[0]) != _SERIAL_BYTES:
                continue
            serial, body = frames
            try:
                question = decode(body)
            except (msgspec.MsgspecError, ValueError, RecursionError):  # a str may be no UTF-8
                continue
            if isinstance(question, Take):
                self._answer_take(client, serial, question)
            elif isinstance(question, Get):
                self._send(client, serial, self._pool.get(question.key))
            elif isinstance(question, Has):
                flags = bytes(key in self._pool for key in question.keys)
                self._send(client, serial, flags)
            else:
                assert isinstance(question, Renew)
                self._pool.renew(question.keys)

    def _answer_take(self, client: bytes, serial: bytes, question: Take) -> None:
        key = question.key
        if question.identity != self._identity:
            self._send(client, serial, None, OTHER)
        elif self._pool.offered(key) is not None:
            self._give(client, serial, key)
        elif (
            self._pool.has_ended(key)
            or key in self._waiting
            or self._num_waiting[client] >= _MOST_WAITING
            or len(self._waiting) >= _MOST_WAITING_OF_ALL
            or not question.seconds
        ):
            self._send(client, serial, None)
        else:
            until = time.monotonic() + question.seconds
            self._waiting[key] = _Waiting(client, serial, until)
            self._num_waiting[client] += 1

    def _give(self, client: bytes, serial: bytes, key: bytes) -> None:
        """Send a block that is offered, if it still is; it is offered no more."""
        block = self._pool.offered(key)
        if self._send(client, serial, block) and block is not None:
            self._pool.end(key)

    def _answer_waiting(self) -> None:
        now = time.monotonic()
        for key, waiting in list(self._waiting.items()):
            is_there = self._pool.offered(key) is not None
            if is_there or now >= waiting.until or self._pool.has_ended(key):
                del self._waiting[key]
                self._num_waiting[waiting.client] -= 1
                if not self._num_waiting[waiting.client]:
                    del self._num_waiting[waiting.client]
                if is_there:
                    self._give(waiting.client, waiting.serial, key)
                else:
                    self._send(waiting.client, waiting.serial, None)

    def _send(
        self, client: bytes, serial: bytes, payload: bytes | None, status: bytes = NO
    ) -> bool:
        frames = [client, serial, status] if payload is None else [client, serial, YES, payload]
        try:
            self._listening.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # it is gone, or does not read
            return False
        return True
