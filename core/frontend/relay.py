"""From the threads that hear of an engine to the event loop that waits for it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable

from hardpoint.plugins import EngineCoreOutputs

__all__ = ["Relay"]

Item = EngineCoreOutputs | Exception


class Relay:
    """Hands outputs and errors to a method in an event loop's thread.

    It does not keep the method's object alive. What comes before a loop is known waits for one.
    """

    def __init__(self) -> None:
        """Connect to nothing yet."""
        self._lock = threading.Lock()
        self._early: list[Item] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._method: weakref.WeakMethod[Callable[[Relay, Item], None]] | None = None

    @property
    def failure(self) -> Exception | None:
        """The end of the engine, if it came before `connect`."""
        with self._lock:
            return next((item for item in self._early if isinstance(item, Exception)), None)

    def connect(
        self, loop: asyncio.AbstractEventLoop, method: Callable[[Relay, Item], None]
    ) -> None:
        """Hand over to a bound method, called with this relay and the item."""
        with self._lock:
            self._loop, self._method = loop, weakref.WeakMethod(method)
            early, self._early = self._early, []
        for item in early:
            self(item)

    def __call__(self, item: Item) -> None:
        """Take an item, in any thread."""
        with self._lock:
            loop = self._loop
            if loop is None:
                self._early.append(item)
                return
        try:
            loop.call_soon_threadsafe(self._deliver, item)
        except RuntimeError:  # the loop is closed, so nobody waits any more
            pass

    def _deliver(self, item: Item) -> None:
        method = self._method() if self._method is not None else None
        if method is not None:
            method(self, item)
