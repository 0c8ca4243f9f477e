"""Copies of a process of Hardpoint, which must not go on as it, and signals that end them."""

from __future__ import annotations

import os
import signal
import threading


def end_copy() -> None:
    """End this process, which is a copy, without any cleanup of what is its parent's."""
    os._exit(0)


def reset_signals(*numbers: int) -> None:
    """Restore the default handlers: these signals end the process at once."""
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


def let_signals_end_copies(*numbers: int) -> None:
    """Let signals that this process handles end its copies, and not wake it up.

    Args:
        numbers: numbers of the signals; SIGTERM, for example.
    """
    held = threading.local()

    def hold() -> None:
        # Python drops a signal that a copy gets before it is set up.
        held.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.before)

    def end() -> None:
        signal.set_wakeup_fd(-1)
        reset_signals(*numbers)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=end)
