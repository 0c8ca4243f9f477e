"""Interrupts that a library loses: a bare `except` around an import swallows the exception."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["no_lost_interrupts"]


@contextlib.contextmanager
def no_lost_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT, and again at the end of the block if it was lost there.

    For the main thread alone, unless the program has a handler of its own or ignores SIGINT.
    """
    usual = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if usual is not signal.default_int_handler or not in_main_thread:
        yield
        return
    was_interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if was_interrupted:
            raise KeyboardInterrupt
