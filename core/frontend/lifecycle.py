"""The states of an AsyncEngine, the transitions between them, and the restart of a dead engine.

    SERVING ---(a send finds the engine dead)-------> DRAINING
    DRAINING --(no end is delivered in time)--------> SERVING
    SERVING, DRAINING --(died, may restart)---------> RESTARTING
    RESTARTING --(the new engine is ready)----------> SERVING
    SERVING, DRAINING, RESTARTING --(died for good)-> DEAD
    SERVING, DRAINING, RESTARTING, DEAD --(close)---> CLOSED

                 +----------------- no end in time ----------------+
                 v                                                 |
           +-----------+     a send finds it dead           +------+-----+
    start  |           |----------------------------------->|            |
    ------>|  SERVING  |                                    |  DRAINING  |
           |           |----------------+-------------------|            |
           +-----------+   its end is   |                   +------------+
                 ^         delivered    |
                 |                +-----+------------------+
           ready |    may restart |        died for good   |
                 |                v                        v
                 |          +------------+  failed   +----------+
                 +----------| RESTARTING |---------->|   DEAD   |
                            +------------+           +----------+

                   every state --- close() ---> CLOSED

An engine that died before its first use is SERVING until that use, for only an event loop that is
known can restart it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from enum import Enum

from hardpoint.core.client.event_loop import EventLoopBridge
from hardpoint.core.client.process_client import ProcessClient
from hardpoint.core.client.restarts import RestartBudget
from hardpoint.errors import EngineClosedError, EngineDeadError

from .engine_parts import EngineParts

_log = logging.getLogger("hardpoint")

class EngineState(Enum):
    """States of an AsyncEngine: how it treats requests.

    Attributes:
        SERVING: it sends them to the engine.
        DRAINING: the engine is dead, and its last outputs are on their way; requests wait for its
            end to be delivered after them.
        RESTARTING: another engine process is being started; requests wait for it.
        DEAD: it refuses them with the error that ended the engine.
        CLOSED: it refuses them, since it was closed.
    """

    SERVING = "serving"
    DRAINING = "draining"
    RESTARTING = "restarting"
    DEAD = "dead"
    CLOSED = "closed"


_TRANSITIONS = {
    EngineState.SERVING: {
        EngineState.DRAINING,
        EngineState.RESTARTING,
        EngineState.DEAD,
        EngineState.CLOSED,
    },
    EngineState.DRAINING: {
        EngineState.SERVING,
        EngineState.RESTARTING,
        EngineState.DEAD,
        EngineState.CLOSED,
    },
    EngineState.RESTARTING: {EngineState.SERVING, EngineState.DEAD, EngineState.CLOSED},
    EngineState.DEAD: {EngineState.CLOSED},
    EngineState.CLOSED: set(),
}


class EngineLifecycle:
    """The state of an AsyncEngine. `close` may be called in any thread, so all of it may.

    Attributes:
        state: the current one.
        dead_error: the error that ended the engine for good; None if it has not died.
    """

    def __init__(self) -> None:
        """Start serving."""
        self.state = EngineState.SERVING
        self.dead_error: EngineDeadError | None = None
        self._lock = threading.Lock()

    @property
    def takes_outputs(self) -> bool:
        """Return whether outputs are delivered: those of a dead engine are until its end is."""
        return self.state in (EngineState.SERVING, EngineState.DRAINING)

    def move(self, state: EngineState) -> bool:
        """Enter a state if a transition leads there from the current one; return whether it did."""
        with self._lock:
            if state not in _TRANSITIONS[self.state]:
                return False
            self.state = state
            return True

    def die(self, error: EngineDeadError) -> bool:
        """Enter DEAD because of an error, as `move` does."""
        with self._lock:
            if EngineState.DEAD not in _TRANSITIONS[self.state]:
                return False
            self.dead_error, self.state = error, EngineState.DEAD
            return True


Connect = Callable[[EngineParts], tuple[ProcessClient, EventLoopBridge]]
"""Starts an engine process for the parts of a dead one; blocks until it is ready."""


class Restarter:
    """Decides whether a dead engine is restarted, and restarts it.

    Attributes:
        budget: how often it may.
    """

    def __init__(self, connect: Connect, budget: RestartBudget) -> None:
        """Start without an attempt.

        Args:
            connect: starts an engine process.
            budget: counts the restarts.
        """
        self.budget = budget
        self._connect = connect
        self._lock = threading.Lock()
        self._closed = False

    @property
    def enabled(self) -> bool:
        """Whether it restarts any engine."""
        return self.budget.enabled

    @property
    def count(self) -> int:
        """Number of restarts so far."""
        return self.budget.count

    def may_restart(self) -> bool:
        """Return whether one more restart is allowed now, and count it."""
        return not self._closed and self.budget.may_restart()

    def give_up(self, error: EngineDeadError) -> None:
        """Add to an error that the limit prevented a restart, and log it.

        If something else prevented it, the error stays as it is.
        """
        if self.budget.is_spent and not self._closed:
            error.args = (f"{error}; {self.budget.limit_text}",)
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
                self.budget.count += 1
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
