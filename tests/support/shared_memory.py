"""The shared memory of a test run, without other programs' memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

_SHM = Path("/dev/shm")
_SHARED = ("hardpoint", "psm_", "sem.", "torch_")
"""Beginnings of names in it: the engine's own, of Python's multiprocessing, and of torch."""


def our_shared_memory() -> list[str]:
    """Names of shared memory that an engine may have left, and no other program of this machine."""
    names = [path.name for path in _SHM.iterdir() if path.name.startswith(_SHARED)]
    if not names:
        return []
    ours = psutil.Process()
    family = {ours.pid, *(child.pid for child in ours.children(recursive=True))}
    others = [pid for pid in psutil.pids() if pid not in family]
    return [name for name in names if not any(_has_open(pid, f"{_SHM}/{name}") for pid in others)]


def _has_open(pid: int, path: str) -> bool:
    """Whether a process has a file mapped or open."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        if path in process.joinpath("maps").read_text():
            return True
        return any(os.readlink(link) == path for link in process.joinpath("fd").iterdir())
    return False
