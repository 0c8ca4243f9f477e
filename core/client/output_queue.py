"""Where the outputs of an engine process wait for the one who takes them."""

from __future__ import annotations

import threading

from hardpoint.core.wire.merge_outputs import MergedOutputs
from hardpoint.plugins import EngineCoreOutputs


class Inbox:
    """Holds outputs, and at last the error that ended them. Putting one in never waits.

    Batches that wait are merged: one entry per request, however long nobody takes them.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._changed = threading.Condition()
        self._outputs = MergedOutputs()
        self._end: Exception | None = None

    def __len__(self) -> int:
        """Return how many entries wait; a batch without any counts as one."""
        return len(self._outputs)

    def put(self, item: EngineCoreOutputs | Exception) -> None:
        """Add a batch, or say that no more will come."""
        with self._changed:
            if isinstance(item, Exception):
                self._end = item
            else:
                self._outputs.put(item)
            self._changed.notify()

    def get(self, seconds: float | None) -> EngineCoreOutputs | Exception | None:
        """Wait for outputs; once they are all taken, the error is there for whoever asks.

        Args:
            seconds: None waits as long as it takes.

        Returns:
            None if nothing came in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._outputs) or self._end, seconds)
            return self._outputs.take() or self._end
