"""The states of an AsyncEngine and the transitions between them.

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

import threading
from enum import Enum

from hardpoint.plugins.errors import EngineDeadError


class EngineState(Enum):
    """What an AsyncEngine does with requests.

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
    def has_engine(self) -> bool:
        """Return whether outputs of the current engine count."""
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
