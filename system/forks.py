"""The forks that lead to this process: a copy of a process of Hardpoint must not go on as it."""

from __future__ import annotations

import os

FORKS = [0]
"""The forks that lead to this process, since it watches. A call that ends with another number than
it began with ends in a copy; a list, since reading its item costs least.
"""


def end_copy() -> None:
    """End this process, which is a copy, without any cleanup of what is its parent's."""
    os._exit(0)
