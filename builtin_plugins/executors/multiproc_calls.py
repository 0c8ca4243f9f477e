"""How calls reach all workers of the executor "multiproc": encoded once, sent to all of them."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence

from hardpoint.kernels.cpu import KernelsUnavailableError
from hardpoint.kernels.shared_memory import MAX_MEMBERS, AbortedError, BroadcastRing, NoMemoryError

from .multiproc_messages import Setup, exactly

_log = logging.getLogger("hardpoint")

_RING_BYTES = 4 << 20  # larger calls stream through it
_HEADER = struct.Struct("!Q?")
_LENGTH = struct.Struct("!Q")


class CallsEndedError(Exception):
    """No further call comes, or none can be sent."""


class CallSender(ABC):
    """The executor's side: sends each call to all workers."""

    describes: str
    """Name of the call, for the log."""
    uses_ring: bool
    sends_to_all_or_none: bool
    """Whether a `send` that an interrupt ends has reached all workers, or none."""

    @abstractmethod
    def descriptors(self, rank: int) -> list[int]:
        """Return the descriptors that a worker's process needs."""

    def started(self) -> None:  # noqa: B027 - optional on purpose
        """Close the workers' ends once all workers have theirs."""

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Send a message to all."""

    def send(self, number: int, call: bytes, *, all_answer: bool) -> None:
        """Send a call.

        Args:
            number: number of the call, for its answers.
            call: encoded.
            all_answer: whether each rank answers, instead of the sampling rank and failing
                ranks.

        Raises:
            CallsEndedError: a worker does not take it any more.
        """
        self._write(_HEADER.pack(number, all_answer) + call)

    @abstractmethod
    def end(self) -> None:
        """Let the workers see that no further call comes. In any thread, more than once."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, after the workers have ended."""


class CallReceiver(ABC):
    """A worker's side."""

    @abstractmethod
    def _read(self, timeout_s: float | None) -> bytes | None:
        """Return the next message, None after the timeout."""

    def receive(self, timeout_s: float | None = None) -> tuple[int, bool, memoryview] | None:
        """Return the next call: number, whether all ranks answer, and the call; see `send`.

        Args:
            timeout_s: after which it returns None; None is no limit.

        Raises:
            CallsEndedError: no further call comes.
        """
        data = self._read(timeout_s)
        if data is None:
            return None
        number, all_answer = _HEADER.unpack_from(data)
        return number, all_answer, memoryview(data)[_HEADER.size :]


class SocketSender(CallSender):
    """Sends calls through a socket per worker."""

    describes = "sockets"
    uses_ring = False
    sends_to_all_or_none = False

    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self._ours = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]

    def descriptors(self, rank: int) -> list[int]:
        """Return the worker's end of its socket."""
        return [self._theirs[rank].fileno()]

    def started(self) -> None:
        """Close the workers' ends."""
        for theirs in self._theirs:
            theirs.close()

    def _write(self, data: bytes) -> None:
        message = _LENGTH.pack(len(data)) + data
        try:
            for ours in self._ours:
                ours.sendall(message)
        except OSError as cause:
            raise CallsEndedError(str(cause)) from cause

    def end(self) -> None:
        """End the sockets' streams, which ends a `send` that waits as well."""
        for ours in self._ours:
            try:
                ours.shutdown(socket.SHUT_WR)
            except OSError:  # the worker has ended
                continue

    def close(self) -> None:
        """Close the sockets."""
        for end in (*self._ours, *self._theirs):
            end.close()


class SocketReceiver(CallReceiver):
    """Receives calls through a socket."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._socket = socket.socket(fileno=descriptors[0])
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)

    def _read(self, timeout_s: float | None) -> bytes | None:
        if not self._poller.poll(None if timeout_s is None else timeout_s * 1000):
            return None
        try:
            (length,) = _LENGTH.unpack(exactly(self._socket, _LENGTH.size))
            return exactly(self._socket, length)
        except (OSError, EOFError) as cause:
            raise CallsEndedError("the executor sends no further calls") from cause


class RingSender(CallSender):
    """Sends calls through shared memory, which all workers read."""

    describes = "shared memory"
    uses_ring = True
    sends_to_all_or_none = True  # an interrupt ends a write only before it has begun

    def __init__(self, count: int) -> None:
        """Allocate the memory for `count` workers.

        Raises:
            KernelsUnavailableError: the compiled kernels are not there.
            NoMemoryError: there is too little memory.
        """
        self._ring = BroadcastRing.create(_RING_BYTES, count)

    def descriptors(self, rank: int) -> list[int]:  # noqa: ARG002
        """Return the descriptor of the memory, the same for all."""
        return [self._ring.fileno()]

    def _write(self, data: bytes) -> None:
        try:
            self._ring.write(data)
        except AbortedError as cause:
            raise CallsEndedError(str(cause)) from cause

    def end(self) -> None:
        """Let all reads and writes fail."""
        self._ring.abort("the executor sends no further calls")

    def close(self) -> None:
        """Release the memory."""
        self._ring.close()


class RingReceiver(CallReceiver):
    """Receives calls through shared memory."""

    def __init__(self, rank: int, descriptors: Sequence[int]) -> None:
        self._ring = BroadcastRing.open(descriptors[0], rank)
        os.close(descriptors[0])

    def _read(self, timeout_s: float | None) -> bytes | None:
        try:
            return self._ring.read(timeout_s)
        except AbortedError as cause:
            raise CallsEndedError(str(cause)) from cause


def make_sender(count: int) -> CallSender:
    """Return a sender of calls to `count` workers: shared memory where there are kernels for it."""
    if count >= MAX_MEMBERS:
        return SocketSender(count)
    try:
        return RingSender(count)
    except (KernelsUnavailableError, NoMemoryError) as cause:
        _log.warning("calls of workers go through sockets, not through shared memory: %s", cause)
        return SocketSender(count)


def open_receiver(setup: Setup, rank: int, descriptors: Sequence[int]) -> CallReceiver:
    """Return the receiver of calls in the process of a worker."""
    return RingReceiver(rank, descriptors) if setup.uses_ring else SocketReceiver(descriptors)
