"""Looks at what a process holds."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 1 << 20


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, without its children.

    It is the sum over the threads that live, in nanoseconds where Linux has it so.
    """
    folder = Path(f"/proc/{pid}/task")
    if not folder.exists():
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    nanoseconds = 0
    for task in folder.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


@dataclass(frozen=True)
class Holdings:
    """The resources that a server's process and its children hold.

    Attributes:
        processes, descriptors, threads: numbers of them.
        memory_mib: resident.
    """

    processes: int
    descriptors: int
    threads: int
    memory_mib: float

    @classmethod
    def of(cls, pid: int) -> Holdings:
        """Return the resources that a process and its children hold now."""
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return cls(
            len(family),
            sum(member.num_fds() for member in family),
            sum(member.num_threads() for member in family),
            sum(member.memory_info().rss for member in family) / MIB,
        )

    def leaks(self, before: Holdings, memory_mib: float) -> list[str]:
        """Return the resources that grew, in plain sentences.

        Args:
            before: the same process before the load.
            memory_mib: how much its memory may have grown by.
        """
        found = []
        for name in ("processes", "descriptors", "threads"):
            old, new = getattr(before, name), getattr(self, name)
            if new > old:
                found.append(f"{name}: {old} before the load, {new} after it")
        if self.memory_mib > before.memory_mib + memory_mib:
            grown = self.memory_mib - before.memory_mib
            found.append(f"memory: grew by {grown:.0f} MiB, more than {memory_mib:g}")
        return found
