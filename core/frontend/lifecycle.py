"""Restarts of a dead engine: how many, and in another thread."""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
from collections.abc import Callable

from hardpoint.core.client.event_loop import EventLoopBridge
from hardpoint.core.client.process_client import ProcessClient
from hardpoint.plugins.errors import EngineClosedError, EngineDeadError

from .frontend import EngineParts

_log = logging.getLogger("hardpoint")
_WINDOW_S = 60.0

Connect = Callable[[EngineParts], tuple[ProcessClient, EventLoopBridge]]
"""Starts an engine process for the parts of a dead one; blocks until it is ready."""


class Restarter:
    """Decides whether a dead engine is restarted, and restarts it.

    Attributes:
        enabled: whether it restarts any.
        count: of restarts so far.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        enabled: bool,
        max_per_minute: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without an attempt.

        Args:
            connect: starts an engine process.
            enabled: whether dead engines are restarted.
            max_per_minute: the limit.
            clock: seconds.
        """
        self.enabled = enabled
        self.count = 0
        self._connect = connect
        self._limit = max_per_minute
        self._clock = clock
        self._attempts: collections.deque[float] = collections.deque()
        self._lock = threading.Lock()
        self._closed = False

    def may_restart(self) -> bool:
        """Return whether one more restart is allowed now, and count it."""
        now = self._clock()
        while self._attempts and now - self._attempts[0] >= _WINDOW_S:
            self._attempts.popleft()
        if not self.enabled or self._closed or len(self._attempts) >= self._limit:
            return False
        self._attempts.append(now)
        return True

    def give_up(self, error: EngineDeadError) -> None:
        """Add to an error that the limit prevented a restart, and log it.

        If something else prevented it, the error stays as it is.
        """
        if self.enabled and not self._closed and len(self._attempts) >= self._limit:
            limit = f"{self._limit} restart{'s' if self._limit > 1 else ''} within a minute"
            error.args = (f"{error}; not restarted: {limit} (engine.max_restarts_per_minute)",)
            _log.error("%s", error)

    async def restart(self, parts: EngineParts) -> tuple[ProcessClient, EventLoopBridge]:
        """Start an engine; retry one that dies while it starts, as often as is allowed.

        Raises:
            HardpointError: it cannot be built, dies too often, or was closed in the meantime.
        """
        while True:
            try:
                started = await asyncio.to_thread(self._start, parts)
            except EngineDeadError as error:
                if not self.may_restart():
                    self.give_up(error)
                    raise
                _log.warning("the engine died while it was restarted: %s", error)
            else:
                self.count += 1
                _log.warning("the engine was restarted (pid %d)", started[0].pid)
                return started

    def close(self) -> None:
        """Start no more engines; close one that is being started once it is ready."""
        with self._lock:
            self._closed = True

    def _start(self, parts: EngineParts) -> tuple[ProcessClient, EventLoopBridge]:
        started = self._connect(parts)
        with self._lock:
            closed = self._closed
        if closed:
            started[0].close()
            raise EngineClosedError("the engine was closed while it was restarted")
        return started
