"""Reuse of send buffers that ZMQ does not copy, once it has sent them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

COPY_BELOW = 1 << 18
"""Bytes; up to about twice as many, a copy costs less than a completion notice."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message that ZMQ has not finished sending.

    Attributes:
        trackers: of those of its frames that were not copied.
        buffer: to be reused afterwards.
    """

    trackers: Sequence[zmq.MessageTracker]
    buffer: bytearray | None

    @property
    def done(self) -> bool:
        return all(tracker.done for tracker in self.trackers)


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
        self._sent: list[_Sent] = []

    @property
    def num_free(self) -> int:
        """The number of buffers that can be reused."""
        return len(self._free)

    @property
    def num_pending(self) -> int:
        """The number of messages that were not sent at the last `collect`."""
        return len(self._sent)

    def buffer(self) -> bytearray:
        """Return a free buffer."""
        if self._sent:
            self.collect()
        return self._free.pop() if self._free else bytearray()

    def frames(self, buffers: Sequence[Any], reuse: bytearray | None = None) -> list[zmq.Frame]:
        """Return frames to send with `copy=False`, in place of the buffers that they hold.

        Keep no frame after sending it: it holds its buffer. The memory that the buffers view is
        kept alive until ZMQ has sent them.

        Args:
            buffers: bytes-like; not to be changed until sent.
            reuse: one of them that came from `buffer`.
        """
        frames = [zmq.Frame(data, track=True, copy_threshold=self._copy_below) for data in buffers]
        # All frames are checked: the last one may be small, then it is copied and done at once.
        trackers = [frame.tracker for frame in frames if not frame.tracker.done]
        if trackers:
            self._sent.append(_Sent(trackers, reuse))
        else:
            self._keep(reuse)
        return frames

    def collect(self) -> None:
        """Collect the buffers of all messages that have been sent, in any order."""
        waiting = []
        for sent in self._sent:
            if sent.done:
                self._keep(sent.buffer)
            else:
                waiting.append(sent)
        self._sent = waiting

    def _keep(self, buffer: bytearray | None) -> None:
        if (
            buffer is not None
            and len(self._free) < self._max_free
            and len(buffer) <= self._max_buffer
        ):
            self._free.append(buffer)
