"""What an engine process has to say to its clients, until it is sent."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from hardpoint.core.wire import UtilityOutput
from hardpoint.core.wire.merge_outputs import MergedOutputs
from hardpoint.plugins import EngineCoreOutputs

__all__ = ["Outbox"]

_log = logging.getLogger("hardpoint")
_LOOK_AGAIN_S = 0.01  # how often it is asked whether a client that was behind can take more
_MOST_HELD = 8192

Message = EngineCoreOutputs | UtilityOutput


class Outbox:
    """Holds messages by client. Putting one in never waits, and does not fill memory.

    What a client has not taken is merged: one entry per request, however many steps it came from.
    So what is held is at most the outputs of the requests that the client sent, and its answers;
    once they are many, `is_full` says that no more of its messages should be read.
    """

    def __init__(self, num_clients: int = 1) -> None:
        """Start empty."""
        self._held = [_Held() for _ in range(num_clients)]
        self._changed = threading.Condition()
        self._ends_at: float | None = None

    def put(self, client: int, message: Message) -> None:
        """Add a message; one for a client that there is not is dropped, and logged."""
        if not 0 <= client < len(self._held):
            _log.warning("dropped a message for client %d: there are %d", client, len(self._held))
            return
        with self._changed:
            self._held[client].put(message)
            self._changed.notify()

    def is_full(self, client: int) -> bool:
        """Whether a client is so far behind that it should send nothing more."""
        return len(self._held[client]) > _MOST_HELD

    def take(self, can_take: Callable[[int], bool]) -> tuple[int, Message] | None:
        """Wait for a message to a client that can take one.

        Returns:
            The client and the message; None when everything is taken after `end`, or its time is
            over.
        """
        with self._changed:
            while True:
                waiting = [client for client, held in enumerate(self._held) if len(held)]
                for client in waiting:
                    if can_take(client):
                        return client, self._held[client].take()
                ends_at = self._ends_at
                if ends_at is not None and (not waiting or time.monotonic() >= ends_at):
                    return None
                self._changed.wait(_LOOK_AGAIN_S if waiting else None)

    def end(self, seconds: float) -> None:
        """Let `take` return None once everything is taken, or after so many seconds."""
        with self._changed:
            self._ends_at = time.monotonic() + seconds
            self._changed.notify()


class _Held:
    """What waits for one client, in order; outputs stand where the first of them came."""

    def __init__(self) -> None:
        self._answers: deque[UtilityOutput] = deque()
        self._before = 0  # answers that came before the outputs
        self._outputs = MergedOutputs()

    def __len__(self) -> int:
        return len(self._answers) + len(self._outputs)

    def put(self, message: Message) -> None:
        if isinstance(message, EngineCoreOutputs):
            self._outputs.put(message)
        else:
            self._answers.append(message)
            self._before += not self._outputs

    def take(self) -> Message:
        outputs = None if self._before else self._outputs.take()
        if outputs is None:
            self._before -= 1
            return self._answers.popleft()
        self._before = len(self._answers)
        return outputs
