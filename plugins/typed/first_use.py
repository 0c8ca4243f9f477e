"""First uses of types, which no two threads may make at the same time."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_LONGEST_WAIT_S = 5.0
_lock = threading.RLock()
_prepared: set[Any] = set()


def prepared(type_: type[T]) -> type[T]:
    """Return a type that threads may use to convert and decode at the same time.

    At the first use of a struct, msgspec reads its annotations, in Python. It publishes the result
    before that is complete, for structs that hold themselves; a second thread that uses the struct
    before then ends the program with a segmentation fault (seen with 0.22). So the first use is
    made here, under a lock.
    """
    try:
        if type_ in _prepared:
            return type_
    except TypeError:  # of Annotated with data that has no hash: read each time
        _read(type_)
        return type_
    _read(type_)
    _prepared.add(type_)
    return type_


def _read(type_: Any) -> None:
    # Reading annotations may import modules, and so wait for a thread that waits here while it
    # imports one: after a time that no reading takes, a thread goes on without the lock.
    lock = _lock
    is_held = lock.acquire(timeout=_LONGEST_WAIT_S)
    try:
        # A type that cannot be read is an error of the use that follows.
        with contextlib.suppress(Exception):
            msgspec.msgpack.Decoder(type_)
    finally:
        if is_held:
            lock.release()


def _renew_lock() -> None:
    """Replace the lock in a copy of this process, where the thread that has it does not run."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
