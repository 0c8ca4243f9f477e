"""The requests that a server is answering, at most so many, and how fast they end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from hardpoint.builtin_plugins.server.access.counts import Counts, held
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.streaming import ended_early

_ENDS_REMEMBERED = 64
_LONGEST_RETRY = 60.0
_ANSWERING, _OF_KEY = held("requests"), held("requests of ")
_SHARE_OF_KEY = 0.75


class InFlightRequests:
    """The requests that are being answered, and how fast they end.

    Those that other workers of the server answer count, too.
    """

    def __init__(
        self,
        limit: int,
        running: int,
        clock: Callable[[], float] = time.monotonic,
        counts: Counts | None = None,
        *,
        limit_of_key: int | None = None,
        current_key: Callable[[], str] = str,
    ) -> None:
        """Start without requests.

        Args:
            limit: further requests are refused.
            limit_of_key: further requests of one key are refused; None is three quarters of
                `limit`.
            current_key: returns the name of the key whose request is being answered; empty without
                a key.
            running: requests that the engine runs at once; further ones wait.
            clock: seconds.
            counts: None are those of this process alone.
        """
        self._counts = counts or Counts()
        self._limit, self._running = limit, running
        self._limit_of_key = limit_of_key or math.ceil(limit * _SHARE_OF_KEY)
        self._current_key = current_key
        self._clock = clock
        self._ends: collections.deque[float] = collections.deque(maxlen=_ENDS_REMEMBERED)
        self._busy_since = 0.0
        self._seconds = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_over = False

    @property
    def open(self) -> int:
        """The number of requests that are being answered, by all workers."""
        return self._counts.total(_ANSWERING)

    @property
    def num_own(self) -> int:
        """The number of requests that this process answers."""
        return len(self._tasks)

    @contextlib.contextmanager
    def one_more(self, *, generates: bool = True) -> Iterator[None]:
        """Count a request while it is answered.

        Args:
            generates: whether its time is a measure of how long others will wait.

        Raises:
            AnswerError: there are too many, or `end_all` was called.
        """
        key = self._current_key()
        if key and not self._counts.add_below(_OF_KEY + key, self._limit_of_key):
            limit = f"{self._limit_of_key} requests of this key, its maximum"
            raise self._full(f"{limit} (server.limits.requests_per_key)")
        if not self._counts.add_below(_ANSWERING, self._limit):
            self._release(key)
            raise self._full(f"{self._limit} requests, its maximum (server.limits.requests)")
        began = self._clock()
        if not self._tasks:
            self._busy_since = began
            self._ends.clear()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ran = generates
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            task.uncancel()
            raise ended_early() from None
        except Exception:
            ran = False  # most are refused, and would make requests look quick
            raise
        finally:
            self._counts.add(_ANSWERING, -1)
            self._release(key)
            self._tasks.discard(task)
            if ran:
                self._record(began)

    def _release(self, key: str) -> None:
        if key:
            self._counts.add(_OF_KEY + key, -1)

    def _full(self, maximum: str) -> AnswerError:
        return AnswerError(
            429,
            f"the server answers {maximum}; try again later",
            code="overloaded",
            headers={"retry-after": str(math.ceil(self.retry_after()))},
        )

    def _record(self, began: float) -> None:
        now = self._clock()
        self._ends.append(now)
        seconds = now - began
        self._seconds += (seconds - self._seconds) / _ENDS_REMEMBERED if self._seconds else seconds

    def end_all(self) -> None:
        """End all requests; their clients get an error."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()

    def retry_after(self) -> float:
        """Return in how many seconds the requests that wait now will run.

        It follows from the rate at which requests have ended lately, while there were always some;
        before two have, from the time that earlier ones took.
        """
        waiting = max(self.open - self._running, 1) / self._counts.num_processes
        ends = len(self._ends)
        if ends >= 2:
            is_full = ends == _ENDS_REMEMBERED
            since = self._ends[0] if is_full else self._busy_since
            seconds = waiting * (self._clock() - since) / (ends - is_full)
        else:
            rounds = waiting * self._counts.num_processes / self._running
            seconds = math.ceil(rounds) * self._seconds
        return min(max(seconds, 1.0), _LONGEST_RETRY)
