"""The sending half of a client's socket to an engine process. Nothing here waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import zmq

from hardpoint.core.wire import Encoder, RequestType, SendTracker, TensorConsumer, WireError
from hardpoint.plugins import EngineDeadError, RequestError

__all__ = ["MOST_UNREAD", "Attempt", "Outgoing", "checked"]

MOST_UNREAD = 256
"""Messages that ZMQ keeps for an engine that reads none."""

Attempt = Callable[[], bool]
"""Sends a message now or not at all; returns whether it was sent. For one message, once sent."""

_Frames = Sequence[zmq.Frame]


def checked(check: Callable[[], None], attempt: Attempt) -> Attempt:
    """Return an attempt that asks first whether there is any use in it."""

    def after_check() -> bool:
        check()
        return attempt()

    return after_check


@dataclass(frozen=True)
class _Waiting:
    """A message that the engine has not taken yet.

    Attributes:
        future: whoever waits for the answer to it.
    """

    frames: _Frames
    future: Future[Any] | None

    @property
    def wanted(self) -> bool:
        return self.future is None or not self.future.cancelled()


class Outgoing:
    """Sends messages in order, from any thread.

    While the engine takes none, small ones that must not be lost (aborts and calls) wait here,
    and requests, which may be large and many, are turned away.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        identity: bytes,
        consumer: TensorConsumer | None = None,
    ) -> None:
        """Send over a ROUTER with ROUTER_MANDATORY; the caller closes it.

        Large tensors are offered to `consumer`.
        """
        self._socket = socket
        self._identity = identity
        self._lock = threading.Lock()
        self._encoder, self._tracker = Encoder(consumer=consumer), SendTracker()
        self._backlog: deque[_Waiting] = deque()

    def attempt(self, kind: RequestType, message: Any) -> Attempt:
        """Return what tries to send a message; what tries again does not encode it again.

        Raises:
            EngineDeadError: when it is called: the engine cannot be reached.
            RequestError: the message cannot travel.
        """
        with self._lock:
            frames = self._frames(kind, message)

        def attempt() -> bool:
            with self._lock:
                return self._flushed() and self._sent(frames)

        return attempt

    def post(self, kind: RequestType, message: Any, future: Future[Any] | None = None) -> bool:
        """Send a message now, or later when `flush` is called.

        Args:
            future: of the answer; a message that waits is dropped once it is cancelled.

        Returns:
            Whether it is the first one that waits.

        Raises:
            EngineDeadError: the engine cannot be reached.
            RequestError: the message cannot travel.
        """
        with self._lock:
            frames = self._frames(kind, message)
            behind = not self._flushed()
            if not behind and self._sent(frames):
                return False
            if future is not None:  # so that calls which are given up do not pile up
                self._backlog = deque(each for each in self._backlog if each.wanted)
            self._backlog.append(_Waiting(frames, future))
            return not behind

    def flush(self) -> bool:
        """Send what waits as far as the engine takes it; return whether nothing waits any more.

        Raises:
            EngineDeadError: the engine cannot be reached.
        """
        with self._lock:
            return self._flushed()

    def drop(self) -> None:
        """Forget what waits; the engine is gone."""
        with self._lock:
            self._backlog.clear()

    def close(self) -> None:
        """Close the socket; nothing is sent any more."""
        with self._lock:
            self._socket.close(0)

    def _flushed(self) -> bool:
        while self._backlog:
            if self._backlog[0].wanted and not self._sent(self._backlog[0].frames):
                return False
            self._backlog.popleft()
        return True

    def _frames(self, kind: RequestType, message: Any) -> _Frames:
        self._tracker.collect()
        try:
            frames = self._encoder.encode(message)
        except WireError as cause:
            raise RequestError(str(cause)) from None
        return [zmq.Frame(kind), *self._tracker.frames(frames)]

    def _sent(self, frames: _Frames) -> bool:
        """Send all frames, or none if the engine takes no more now."""
        try:
            self._socket.send_multipart([self._identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as cause:
            self._backlog.clear()
            raise EngineDeadError(f"the engine cannot be reached: {cause}") from cause
        return True
