"""The client's side of an asyncio event loop: outputs into the loop, requests out of it in turn."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import msgspec

from hardpoint.plugins import EngineCoreOutputs
from hardpoint.process.output_coalescer import OutputCoalescer

from .sockets import SEND_TIMEOUT_S, send_timeout

_CHUNK_SIZE = 64  # outputs per callback; other callbacks of the loop run between two chunks

Item = EngineCoreOutputs | Exception


class EventLoopBridge:
    """Passes engine outputs, and the error that ends them, from any thread to a method in a loop.

    The method's object is held weakly. Items that come before `connect`, or while the loop is
    busy, wait here, merged: one entry per request.
    """

    # `_lock` guards all but `_rest`, which belongs to the loop's thread after `connect`.
    # `_scheduled` is true from the first undelivered item until a callback leaves none, so that
    # at most one `_deliver` is scheduled at a time.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs = OutputCoalescer()
        self._rest: EngineCoreOutputs | None = None  # of a batch that is delivered in chunks
        self._error: Exception | None = None
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._method: weakref.WeakMethod[Callable[[Item], None]] | None = None

    @property
    def num_waiting(self) -> int:
        """The number of undelivered entries."""
        return len(self._outputs) + (len(self._rest.outputs) if self._rest is not None else 0)

    @property
    def failure(self) -> Exception | None:
        """The error that ended the engine, if it came before `connect`."""
        with self._lock:
            return self._error if self._loop is None else None

    def connect(self, loop: asyncio.AbstractEventLoop, method: Callable[[Item], None]) -> None:
        """Deliver to a bound method, in the loop's thread."""
        with self._lock:
            self._loop, self._method = loop, weakref.WeakMethod(method)
            wake = self._scheduled = self._has_more()
        if wake:
            loop.call_soon(self._deliver)

    def disconnect(self) -> None:
        """Deliver nothing more, waiting items included. In the loop's thread."""
        self._method = None

    def __call__(self, item: Item) -> None:
        """Accept an item, in any thread."""
        with self._lock:
            if isinstance(item, Exception):
                self._error = item
            else:
                self._outputs.put(item)
            loop = None if self._scheduled else self._loop
            self._scheduled = self._loop is not None
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed; no task waits any more
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        method = self._method() if self._method is not None else None
        if method is None:  # the receiver was collected, or disconnected
            return
        with self._lock:
            item = self._next()
            more = self._scheduled = self._has_more()
        try:
            if item is not None:
                method(item)
        finally:
            if more and self._loop is not None:
                self._loop.call_soon(self._deliver)  # after the tasks that the method woke up

    def _has_more(self) -> bool:
        return self._rest is not None or len(self._outputs) > 0 or self._error is not None

    def _next(self) -> Item | None:
        batch = self._outputs.pop() if self._rest is None else self._rest
        self._rest = None
        if batch is None:
            error, self._error = self._error, None
            return error
        if len(batch.outputs) > _CHUNK_SIZE:
            self._rest = msgspec.structs.replace(
                batch, outputs=batch.outputs[_CHUNK_SIZE:], load=None, cache_changes=None
            )
            batch = msgspec.structs.replace(batch, outputs=batch.outputs[:_CHUNK_SIZE])
        return batch


_MIN_RETRY_S, _MAX_RETRY_S = 0.001, 0.05


class _Sender:
    """A task that waits until it is the first of the queue."""

    def __init__(self, has_ended: Callable[[], bool]) -> None:
        self.has_ended = has_ended
        self.is_first = asyncio.get_running_loop().create_future()

    def wake_up(self) -> None:
        if not self.is_first.done():
            self.is_first.set_result(None)


class SendQueue:
    """Lets the tasks of one event loop send requests in the order in which they came.

    For an engine that accepts no messages at the moment: only the first task retries.
    """

    def __init__(self, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Create an empty queue; `timeout_s` holds for each task from its call on."""
        self._timeout_s = timeout_s
        self._senders: deque[_Sender] = deque()

    @property
    def num_waiting(self) -> int:
        """The number of tasks that could not send at once."""
        return len(self._senders)

    async def send(self, attempt: Callable[[], bool], has_ended: Callable[[], bool]) -> None:
        """Call `attempt` until it returns true, or there is nothing left to send.

        Args:
            attempt: tries to send without waiting.
            has_ended: returns whether the request has ended before it was sent.

        Raises:
            EngineTimeoutError: no attempt succeeded in time.
            Exception: what an attempt raised.
        """
        if has_ended() or (not self._senders and attempt()):
            return
        deadline = time.monotonic() + self._timeout_s
        sender = _Sender(has_ended)
        self._senders.append(sender)
        try:
            if self._senders[0] is not sender:
                await sender.is_first
            pause = _MIN_RETRY_S
            while not has_ended() and not attempt():
                if time.monotonic() >= deadline:
                    raise send_timeout()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_RETRY_S)
        finally:
            self._senders.remove(sender)
            if self._senders:
                self._senders[0].wake_up()

    def wake_ended(self) -> None:
        """Wake up the tasks of ended requests, so that they leave the queue."""
        for sender in self._senders:
            if sender.has_ended():
                sender.wake_up()
