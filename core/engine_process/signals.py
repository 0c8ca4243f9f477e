"""What signals do to an engine process, whenever they come."""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType

from .loop import EngineLoop

__all__ = ["handle_signals", "restore_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def handle_signals(loop: EngineLoop) -> None:
    """Have the loop end in order at the first signal, soon at the second; a third one kills.

    Only in the main thread, whose loop it is. Python runs handlers there between two instructions.
    A signal that comes just before the thread waits for input, or in another thread, does not end
    that waiting: so a thread beside it is told of each signal by Python's own C code, and wakes
    the loop.
    """
    seen = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            restore_signals()
        loop.request_shutdown()

    told, tell = socket.socketpair()
    tell.setblocking(False)
    threading.Thread(
        target=_wake, args=(loop, told, tell), name="EngineSignals", daemon=True
    ).start()
    signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, handle)


def restore_signals() -> None:
    """Have each signal end the process at once."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _wake(loop: EngineLoop, told: socket.socket, _tell: socket.socket) -> None:
    """Wake the loop after each signal; holds both sockets, for the system knows but a number."""
    while told.recv(64):
        loop.wake_up()
