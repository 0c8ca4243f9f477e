"""Sending to an engine that takes nothing now, without holding up the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from .sockets import SEND_SECONDS, behind

__all__ = ["Turns"]

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

    def __init__(self, seconds: float = SEND_SECONDS) -> None:
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
                    raise behind()
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
