"""The states of an AsyncEngine, and the transitions between them.

    SERVING -------(died for good)--> DEAD
    SERVING, DEAD -(close)----------> CLOSED

It serves, too, while dead engine processes are restarted: requests wait for them. An engine that
died before its first use is SERVING until that use.
"""

from __future__ import annotations

import threading
from enum import Enum

from hardpoint.errors import EngineDeadError


class EngineState(Enum):
    """States of an AsyncEngine: how it treats requests.

    Attributes:
        SERVING: it sends them to the engine.
        DEAD: it refuses them with the error that ended the engine.
        CLOSED: it refuses them, since it was closed.
    """

    SERVING = "serving"
    DEAD = "dead"
    CLOSED = "closed"


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

    def close(self) -> bool:
        """Enter CLOSED; return whether it was not closed before."""
        with self._lock:
            was_open = self.state is not EngineState.CLOSED
            self.state = EngineState.CLOSED
            return was_open

    def die(self, error: EngineDeadError) -> bool:
        """Enter DEAD because of an error, unless it is dead or closed; return whether it did."""
        with self._lock:
            if self.state is not EngineState.SERVING:
                return False
            self.dead_error, self.state = error, EngineState.DEAD
            return True
