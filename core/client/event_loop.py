"""From the threads that hear of an engine to the event loop that waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import msgspec

from hardpoint.core.wire.merge_outputs import MergedOutputs
from hardpoint.plugins import EngineCoreOutputs

from .sockets import SEND_TIMEOUT_S, send_timeout

_CHUNK = 64
"""Outputs that are handed over at a time; others have the loop before the next ones."""

Item = EngineCoreOutputs | Exception


class Relay:
    """Hands outputs, and the error that ends them, to a method in an event loop's thread.

    It does not keep the method's object alive. What comes before a loop is known, or while the
    loop is busy, waits here, merged: one entry per request.
    """

    def __init__(self) -> None:
        """Connect to nothing yet."""
        self._lock = threading.Lock()
        self._waiting = MergedOutputs()
        self._rest: EngineCoreOutputs | None = None  # of a batch that is handed over in chunks
        self._end: Exception | None = None
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._method: weakref.WeakMethod[Callable[[Item], None]] | None = None

    @property
    def num_waiting(self) -> int:
        """How many entries wait."""
        return len(self._waiting) + (len(self._rest.outputs) if self._rest is not None else 0)

    @property
    def failure(self) -> Exception | None:
        """The end of the engine, if it came before `connect`."""
        with self._lock:
            return self._end if self._loop is None else None

    def connect(self, loop: asyncio.AbstractEventLoop, method: Callable[[Item], None]) -> None:
        """Hand over to a bound method."""
        with self._lock:
            self._loop, self._method = loop, weakref.WeakMethod(method)
            wake = self._scheduled = self._has_more()
        if wake:
            loop.call_soon(self._deliver)

    def disconnect(self) -> None:
        """Hand over nothing more, also nothing that waits. In the loop's thread."""
        self._method = None

    def __call__(self, item: Item) -> None:
        """Take an item, in any thread."""
        with self._lock:
            if isinstance(item, Exception):
                self._end = item
            else:
                self._waiting.put(item)
            loop = None if self._scheduled else self._loop
            self._scheduled = self._loop is not None
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed, so nobody waits any more
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        method = self._method() if self._method is not None else None
        if method is None:  # nobody is there to take anything, and nobody will be
            return
        with self._lock:
            item = self._next()
            more = self._scheduled = self._has_more()
        try:
            if item is not None:
                method(item)
        finally:
            if more and self._loop is not None:
                self._loop.call_soon(self._deliver)  # behind those whom this woke

    def _has_more(self) -> bool:
        return self._rest is not None or len(self._waiting) > 0 or self._end is not None

    def _next(self) -> Item | None:
        """Return some outputs; the end once there are none any more."""
        batch = self._waiting.take() if self._rest is None else self._rest
        self._rest = None
        if batch is None:
            end, self._end = self._end, None
            return end
        if len(batch.outputs) > _CHUNK:
            self._rest = msgspec.structs.replace(batch, outputs=batch.outputs[_CHUNK:])
            batch = msgspec.structs.replace(batch, outputs=batch.outputs[:_CHUNK])
        return batch


_SHORTEST_S, _LONGEST_S = 0.001, 0.05


class _Waiting:
    """One who waits for the turn."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self.ended = ended
        self.turn = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        if not self.turn.done():
            self.turn.set_result(None)


class Turns:
    """Lets tasks of one event loop try to send, in the order in which they came."""

    def __init__(self, seconds: float = SEND_TIMEOUT_S) -> None:
        """`seconds` is how long each of them tries."""
        self._seconds = seconds
        self._waiting: deque[_Waiting] = deque()

    @property
    def num_waiting(self) -> int:
        """How many could not send at once."""
        return len(self._waiting)

    async def sent(self, attempt: Callable[[], bool], ended: Callable[[], bool]) -> None:
        """Try until an attempt returns true; only who came first tries again.

        Args:
            ended: whether there is nothing left to send.

        Raises:
            EngineTimeoutError: no attempt did in time.
            Exception: what an attempt raised.
        """
        if ended() or (not self._waiting and attempt()):
            return
        until = time.monotonic() + self._seconds
        me = _Waiting(ended)
        self._waiting.append(me)
        try:
            if self._waiting[0] is not me:
                await me.turn
            pause = _SHORTEST_S
            while not ended() and not attempt():
                if time.monotonic() >= until:
                    raise send_timeout()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_S)
        finally:
            self._waiting.remove(me)
            if self._waiting:
                self._waiting[0].wake()

    def look(self) -> None:
        """Let those go who have nothing left to send."""
        for each in self._waiting:
            if each.ended():
                each.wake()
