"""Messages between the executor "multiproc" and its workers.

Calls go to all workers at once (see `multiproc_calls`). Everything else goes over each worker's
channel, in frames: answers and progress to the executor, the setup and an abort to the worker.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum

import msgspec

_HEADER = struct.Struct("!IBQ")


class FrameKind(IntEnum):
    """Kinds of frames."""

    SETUP = 0
    """To the worker, first: a Setup."""
    READY = 1
    """The worker is open."""
    PROGRESS = 2
    """How far a worker's loading is: a LoadingProgress."""
    RESULT = 3
    """Result or exception of a call; the frame has its number."""
    ABORT = 4
    """To the worker: calls that wait for other ranks fail, with the reason that follows."""


class Setup(msgspec.Struct, array_like=True, frozen=True):
    """Configuration of a worker's process.

    Attributes:
        uses_ring: whether calls come through shared memory.
        watchdog_seconds: duration of a call after which stacks are written; 0 is never.
        samples: whether this rank answers the calls that one rank answers.
        overlaps: whether the next step may be launched before the tokens of a step are read.
    """

    uses_ring: bool
    watchdog_seconds: float
    samples: bool
    overlaps: bool = False


class LoadingProgress(msgspec.Struct, array_like=True, frozen=True):
    """How far the loading of a worker is."""

    what: str
    done: int
    total: int


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """A frame of a channel.

    Attributes:
        number: number of the call that it answers.
    """

    kind: FrameKind
    number: int
    data: bytes


def send(channel: socket.socket, kind: FrameKind, data: bytes = b"", number: int = 0) -> None:
    """Send a frame; wait until it is sent."""
    channel.sendall(_HEADER.pack(len(data), kind, number) + data)


def receive(channel: socket.socket) -> Frame | None:
    """Wait for a frame; return None at the end of the channel."""
    try:
        length, kind, number = _HEADER.unpack(exactly(channel, _HEADER.size))
        return Frame(FrameKind(kind), number, exactly(channel, length))
    except (OSError, EOFError):
        return None


def exactly(channel: socket.socket, size: int) -> bytes:
    """Wait for so many bytes.

    Raises:
        EOFError: the other end is closed.
        OSError: it was lost.
    """
    data = b""
    while len(data) < size:
        part = channel.recv(size - len(data), socket.MSG_WAITALL)
        if not part:
            raise EOFError
        data = data + part if data else part
    return data


class FrameReader:
    """Reads the frames of a channel without waiting for the rest of one."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._received = bytearray()
        self.is_at_end = False
        """Whether the other end is closed."""

    def read(self) -> list[Frame]:
        """Return the frames that are complete."""
        try:
            part = self._channel.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            part = b""
        self.is_at_end = not part
        self._received += part
        frames = []
        while len(self._received) >= _HEADER.size:
            length, kind, number = _HEADER.unpack_from(self._received)
            end = _HEADER.size + length
            if len(self._received) < end:
                break
            frames.append(Frame(FrameKind(kind), number, bytes(self._received[_HEADER.size : end])))
            del self._received[:end]
        return frames
