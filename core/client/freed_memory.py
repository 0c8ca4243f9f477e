"""Memory that this process has freed, and that the C library keeps for later."""

from __future__ import annotations

import ctypes

__all__ = ["give_back"]


def give_back() -> None:
    """Return freed memory to the system, where the C library can be asked to (glibc).

    Without it, a program that has closed its engine keeps the room of weights for good.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, TypeError, AttributeError):  # another C library
        pass
