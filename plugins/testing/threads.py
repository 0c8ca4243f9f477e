"""Calls in threads, and waiting for their effects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_thread", "until"]

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread of its own, which is left behind if it does not end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="Suite", daemon=True).start()
    return future


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; return whether it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
