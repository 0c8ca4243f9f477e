"""Thread-safe queue of engine outputs for the synchronous client."""

from __future__ import annotations

import threading

from hardpoint.errors import EngineClosedError
from hardpoint.host.boundary.errors import engine_dead
from hardpoint.plugins import EngineCoreOutputs
from hardpoint.process.output_coalescer import OutputCoalescer


class OutputQueue:
    """Queue of outputs and of the error that ended them. `put` never waits.

    Unread batches are merged: one entry per request, however long nothing is read.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._outputs = OutputCoalescer()
        self._error: Exception | None = None

    def __len__(self) -> int:
        """Return the number of unread entries; a batch without any counts as one."""
        return len(self._outputs)

    def put(self, item: EngineCoreOutputs | Exception) -> None:
        """Add a batch, or the error after which no more will come."""
        with self._changed:
            if isinstance(item, Exception):
                self._error = item
            else:
                self._outputs.put(item)
            self._changed.notify()

    def get(self, timeout_s: float | None) -> EngineCoreOutputs | Exception | None:
        """Wait for outputs; once all are read, return the error, each time.

        Args:
            timeout_s: None is without limit.

        Returns:
            None if nothing came in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._outputs) or self._error, timeout_s)
            return self._outputs.pop() or self._error

    def pop(self, *, wait: bool, timeout_s: float | None) -> EngineCoreOutputs | None:
        """Return outputs; an empty batch if there are none and `wait` is false.

        Args:
            wait: whether outputs are expected.
            timeout_s: None is without limit.

        Returns:
            None if nothing came in time.

        Raises:
            EngineDeadError: the engine is gone.
            EngineClosedError: it was put here.
        """
        item = self.get(timeout_s if wait else 0)
        if isinstance(item, EngineClosedError):
            raise item
        if isinstance(item, Exception):
            raise engine_dead(item)
        return EngineCoreOutputs() if item is None and not wait else item
