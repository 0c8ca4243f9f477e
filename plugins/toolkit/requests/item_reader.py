"""Reading an iterator in a thread, for a caller that has other work while it waits for an item."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["ItemReader"]

T = TypeVar("T")


class ItemReader(Generic[T]):
    """Reads the items of an iterator in a daemon thread, each when it is asked for.

    The thread may wait for an item for ever, as for a line of a pipe, and the program ends all the
    same.
    """

    def __init__(self, items: Iterable[T]) -> None:
        """Read nothing yet; no item may be None."""
        self._asked: queue.SimpleQueue[Future[T | None] | None] = queue.SimpleQueue()
        context, arguments = contextvars.copy_context(), (iter(items), self._asked)
        self._thread = threading.Thread(
            target=context.run, args=(_read, *arguments), name="hardpoint-items", daemon=True
        )

    def ask(self) -> Future[T | None]:
        """Return the next item as a future, with None after the last item.

        The future has the error of an iterator that fails.
        """
        if self._thread.ident is None:
            self._thread.start()
        item: Future[T | None] = Future()
        self._asked.put(item)
        return item

    def close(self) -> None:
        """End the thread, after the item that it is waiting for."""
        self._asked.put(None)


def _read(items: Iterator[T], asked: queue.SimpleQueue[Future[T | None] | None]) -> None:
    while (item := asked.get()) is not None:
        if not item.set_running_or_notify_cancel():
            continue
        try:
            item.set_result(next(items, None))
        except BaseException as error:
            item.set_exception(error)
