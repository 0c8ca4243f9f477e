"""A lock that is fair between the owners of the threads that wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

__all__ = ["FairLock"]


class FairLock:
    """Lock that goes to the owner with the earliest last turn.

    A thread at the head of its owner's queue waits for at most one turn of each other owner.
    """

    def __init__(self) -> None:
        self._lock, self._is_taken = threading.Lock(), False
        self._waiting: dict[str, deque[threading.Lock]] = {}  # a lock opens when its turn comes
        self._began: dict[str, int] = {}  # number of each owner's last turn
        self._count = 0

    @property
    def num_waiting(self) -> int:
        """Number of threads that wait."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    @contextlib.contextmanager
    def turn(self, owner: str) -> Iterator[None]:
        """Wait for a turn; it ends with the body.

        Args:
            owner: whom the thread works for.
        """
        self._wait(owner)
        try:
            yield
        finally:
            self._give()

    def _wait(self, owner: str) -> None:
        with self._lock:
            if not self._is_taken:
                self._begin(owner)
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.setdefault(owner, deque()).append(ticket)
        try:
            ticket.acquire()
        except BaseException:  # an interrupt of the main thread
            with self._lock:
                is_next = ticket not in self._waiting.get(owner, ())
                if not is_next:
                    self._waiting[owner].remove(ticket)
            if is_next:
                self._give()
            raise

    def _begin(self, owner: str) -> None:
        self._is_taken = True
        self._count += 1
        self._began[owner] = self._count

    def _give(self) -> None:
        """Give the turn to the next thread."""
        with self._lock:
            self._waiting = {owner: queue for owner, queue in self._waiting.items() if queue}
            if not self._waiting:
                self._is_taken = False
                self._began.clear()
                return
            owner = min(self._waiting, key=lambda owner: self._began.get(owner, 0))
            self._begin(owner)
            self._waiting[owner].popleft().release()
