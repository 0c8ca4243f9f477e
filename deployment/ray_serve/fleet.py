"""The replicas of the engines' deployment, as the ingress sees them, and the calls to them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from hardpoint.errors import EngineClosedError, EngineDeadError
from hardpoint.plugins import HardpointError

from .router import Address

_log = logging.getLogger("hardpoint")

_ASK_S = 1.0
_CLOSE_S = 10.0


class ReplicaFleet:
    """Knows which replicas Serve runs, and calls them in an event loop of its own.

    Each replica is idle until somebody takes it.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True)
        self._changed = threading.Condition()
        self._known: frozenset[str] = frozenset()
        self._idle: list[str] = []
        self._num_takers = 0
        self._is_closed = False
        self._on_change: Callable[[frozenset[str]], None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hardpoint-ray-serve", daemon=True
        )
        self._thread.start()
        self.spawn(self._ask())

    def watch(self, on_change: Callable[[frozenset[str]], None]) -> None:
        """Call a function with the ids of all replicas whenever they change, in a thread."""
        self._on_change = on_change

    @property
    def num_wanted(self) -> int:
        """The number of idle replicas for which no caller waits."""
        with self._changed:
            return len(self._idle) - self._num_takers

    async def _ask(self) -> None:
        """Let the router report the replicas; it waits for the first one itself."""
        while not self._is_closed:
            with contextlib.suppress(Exception):
                await self._handle.hello.remote(Address(None, self._replicas_changed))
                return
            await asyncio.sleep(_ASK_S)

    def _replicas_changed(self, ids: frozenset[str]) -> None:
        with self._changed:
            added = sorted(ids - self._known)
            self._known = ids
            self._idle = [replica for replica in self._idle if replica in ids] + added
            self._changed.notify_all()
        if self._on_change is not None:
            self._on_change(ids)

    def pop_idle(self, timeout_s: float) -> str:
        """Return the id of an idle replica, once there is one.

        Raises:
            EngineDeadError: there was none in time.
            EngineClosedError: `close` was called.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._num_takers += 1
            try:
                while not self._idle:
                    left = deadline - time.monotonic()
                    if self._is_closed:
                        raise EngineClosedError("the engine is closed")
                    if left <= 0:
                        raise EngineDeadError(
                            f"Ray Serve started no engine within {timeout_s:g} s "
                            "(engine.start_timeout_seconds); `serve status` shows the reason"
                        )
                    self._changed.wait(left)
                return self._idle.pop(0)
            finally:
                self._num_takers -= 1

    def give_back(self, replica: str) -> None:
        """Make a replica idle after its engine has ended."""
        with self._changed:
            if replica in self._known and replica not in self._idle:
                self._idle.append(replica)
                self._changed.notify_all()

    def has(self, replica: str) -> bool:
        """Return whether a replica takes requests."""
        return replica in self._known

    # Calls

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the loop; log errors that no caller expects.

        Serve takes calls that are made while it answers a request as part of that one, and matches
        and cancels them by it. Those of a moved request, or of several, are none of it.
        """
        future = contextvars.Context().run(asyncio.run_coroutine_threadsafe, work, self._loop)
        future.add_done_callback(_log_fault)
        return future

    async def call(self, replica: str, method: str, *args: Any) -> Any:
        """Return the answer of a replica."""
        address = Address(replica, self._replicas_changed)
        return await getattr(self._handle, method).remote(address, *args)

    async def stream(self, replica: str, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """Yield the messages of a replica; leaving the generator cancels the call there."""
        address = Address(replica, self._replicas_changed)
        response = getattr(self._streams, method).remote(address, *args)
        has_ended = False
        try:
            async for item in response:
                yield item
            has_ended = True
        finally:
            if not has_ended:
                response.cancel()

    def close(self) -> None:
        """End all calls and the loop."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            self.spawn(end()).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)


def _log_fault(future: Future[Any]) -> None:
    if future.cancelled():
        return
    error = future.exception()
    if error is not None and not isinstance(error, HardpointError | RayError):
        _log.critical("a call of an engine of Ray Serve failed", exc_info=error)
