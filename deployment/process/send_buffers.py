"""Frames that ZMQ does not copy, and the reuse of their buffers once they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

COPY_BELOW = 1 << 18
"""Bytes; up to about twice as many, a copy costs less than a completion notice."""


def to_frames(buffers: Sequence[Any], copy_below: int = COPY_BELOW) -> list[zmq.Frame]:
    """Return frames to send with `copy=False`; ZMQ keeps alive the buffers that it does not copy.

    Keep no frame after sending it: it holds its buffer.

    Args:
        buffers: bytes-like; not to be changed until sent.
        copy_below: bytes; smaller frames are copied.
    """
    return [zmq.Frame(data, copy_threshold=copy_below) for data in buffers]


class SendTracker:
    """Provides bytearrays for `Encoder.encode_into`, and reuses them once they are sent.

    One thread at a time::

        buffer = tracker.buffer()
        frames = encoder.encode_into(outputs, buffer)
        socket.send_multipart(tracker.frames(frames, buffer), copy=False)

    Works with synchronous and asynchronous sockets, also if sending fails.
    """

    def __init__(
        self,
        *,
        max_free: int = 4,
        max_buffer: int = 1 << 20,
        copy_below: int = COPY_BELOW,
    ) -> None:
        """Create a tracker without buffers.

        Args:
            max_free: buffers to keep for later.
            max_buffer: bytes; a buffer that grew larger is not kept.
            copy_below: bytes; smaller frames are copied and so done at once.
        """
        self._max_free = max_free
        self._max_buffer = max_buffer
        self._copy_below = copy_below
        self._free: list[bytearray] = []
        self._sent: list[tuple[zmq.MessageTracker, bytearray]] = []

    @property
    def num_free(self) -> int:
        """The number of buffers that can be reused."""
        return len(self._free)

    @property
    def num_pending(self) -> int:
        """The number of buffers that were not sent at the last `collect`."""
        return len(self._sent)

    def buffer(self) -> bytearray:
        """Return a free buffer."""
        if self._sent:
            self.collect()
        return self._free.pop() if self._free else bytearray()

    def frames(self, buffers: Sequence[Any], reuse: bytearray) -> list[zmq.Frame]:
        """Return frames to send, as `to_frames` does, of a message with the main frame `reuse`.

        Args:
            buffers: `reuse`, which came from `buffer`, and the further frames.
            reuse: is free again once it was sent or copied.
        """
        # Only the buffer that is to be reused is tracked: a notice of completion costs more than
        # all the rest of sending.
        if len(reuse) < self._copy_below:
            frames = to_frames(buffers, self._copy_below)
            self._keep(reuse)
            return frames
        main = zmq.Frame(reuse, track=True, copy_threshold=self._copy_below)
        self._sent.append((main.tracker, reuse))
        return [main, *to_frames(buffers[1:], self._copy_below)]

    def collect(self) -> None:
        """Collect the buffers that have been sent, in any order."""
        waiting = []
        for tracker, buffer in self._sent:
            if tracker.done:
                self._keep(buffer)
            else:
                waiting.append((tracker, buffer))
        self._sent = waiting

    def _keep(self, buffer: bytearray) -> None:
        if len(self._free) < self._max_free and len(buffer) <= self._max_buffer:
            self._free.append(buffer)
