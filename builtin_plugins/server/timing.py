"""The time that coroutines of plugins take from the event loop, and the time that they may wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Inner(threading.local):
    """Time of the coroutines that the one which runs has called, in its present turn."""

    seconds = 0.0


_inner = _Inner()


class Timed(Generic[T]):
    """Runs a coroutine; `check` is called after each of its turns with the time that it took.

    The time of another `Timed` inside of it does not count.
    """

    __slots__ = ("_check", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, T], check: Callable[[float], object]) -> None:
        self._coroutine, self._check = coroutine, check

    def __await__(self) -> Generator[Any, Any, T]:
        """Run it.

        Raises:
            BaseException: raised by the coroutine.
        """
        coroutine, value = self._coroutine, None
        error: BaseException | None = None
        while True:
            outer, _inner.seconds = _inner.seconds, 0.0
            began = time.perf_counter()
            try:
                waited = coroutine.send(value) if error is None else coroutine.throw(error)
            except StopIteration as ended:
                result: T = ended.value
                return result
            finally:
                taken = time.perf_counter() - began
                outer_seconds = taken - _inner.seconds
                _inner.seconds = outer + taken
                self._check(outer_seconds)
            value = error = None
            try:
                value = yield waited
            except BaseException as raised:
                error = raised


def untimed(coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
    """Return a coroutine that does not count for the time of its awaiting coroutine."""
    return Timed(coroutine, lambda _: None)


class RouteLimit:
    """The time that the route of a plugin may take until its answer begins."""

    def __init__(self, seconds: float) -> None:
        """Allow a number of seconds, without the seconds of `paused`."""
        self.timeout = asyncio.timeout(seconds)
        self._seconds = seconds
        self._pauses = 0

    def stop(self) -> None:
        """Set no limit any more."""
        self._pauses += 1
        self._set(None)

    def resume(self) -> None:
        """Start the time again after the last of several `stop`."""
        self._pauses -= 1
        if not self._pauses:
            self._set(asyncio.get_running_loop().time() + self._seconds)

    def _set(self, when: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended, and a task of the route goes on
            self.timeout.reschedule(when)


ROUTE_LIMIT: ContextVar[RouteLimit | None] = ContextVar("hardpoint_route_limit", default=None)
"""That of the route of a plugin that runs."""


@contextlib.contextmanager
def without_limit() -> Iterator[None]:
    """Let the route of a plugin wait without a limit, if one runs."""
    limit = ROUTE_LIMIT.get()
    if limit is None:
        yield
        return
    limit.stop()
    try:
        yield
    finally:
        limit.resume()
