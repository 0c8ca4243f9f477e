"""The end of a child that cannot see its parent's death, because it is stopped or hangs.

A child ends by a thread of its own, in order. That thread does not run in a process that is
stopped, or in which native code keeps the interpreter's lock. So the system sends such a child a
signal at the death of its parent, which wakes a stopped process; its handler is `alarm` of the
C library, called with the signal's number: as many seconds later, the child is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_WAKES = getattr(signal, "SIGCONT", 0)
SECONDS = 18
"""The number of SIGCONT on Linux: time that the child has to end by itself."""


def end_with_parent() -> None:
    """Let the system end this process some time after its parent's death; only on Linux.

    A parent that has died before is not noticed. The system also takes the end of the thread that
    started this process for a death, and anybody may send the signal: so the alarm is to be taken
    back by `withdraw` while the parent lives. A copy of this process has no thread that would, and
    no alarm: a shell that continues a program sends the signal to all of its processes.
    """
    if sys.platform == "linux":
        number, libc = _WAKES, ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(number, ctypes.cast(libc.alarm, ctypes.c_void_p))
        os.register_at_fork(after_in_child=lambda: libc.signal(number, None))
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), *[ctypes.c_ulong(0)] * 3)


def withdraw() -> None:
    """Take back an alarm, as the parent lives. An alarm with a handler is a plugin's."""
    is_set = signal.getitimer(signal.ITIMER_REAL)[0]
    if is_set and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.alarm(0)


def demand() -> None:
    """Let the system end this process some time later, where it did not see the parent's death."""
    if not signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.alarm(SECONDS)
