"""The threads that compute on the CPU: how many, and how long they spin when they wait.

torch computes in the threads of an OpenMP runtime. A plugin that runs code of its own in that
runtime asks `torch.get_num_threads()` for their number, which the worker sets first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .control_groups import PROC, control_groups, read_control

_log = logging.getLogger("hardpoint")

CPUS = Path("/sys/devices/system/cpu")
"""The system's folder of CPUs."""

_SPIN = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}
"""Settings of the OpenMP runtimes of GNU (in rounds) and LLVM or Intel (in ms)."""

_POLICY = "OMP_WAIT_POLICY"
_QUOTAS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
_FASTER = 0.9  # of the time with twice as many threads; less may be chance
_MEASURED = 4  # threads from which fewer may be faster
_ROWS, _COLUMNS = 4096, 2048  # 32 MiB: more than most caches hold for one core
_REPEATS = 5
_ADAPT_INTERVAL_S = 0.25
_COMPUTES = 0.25  # CPUs on average; less is mostly waiting for requests
_FEWER, _MORE = 0.6, 0.75  # CPUs; next to two threads, a busy program gets 0.67 and more


@contextlib.contextmanager
def short_spin() -> Iterator[None]:
    """Give a runtime of OpenMP that the body loads, by importing torch, a short spin.

    Between two parallel regions the threads wait for the next one, by default in a loop of several
    milliseconds, which takes the CPU from others, and from those of their own that have work left.
    A user's own setting stays.
    """
    # A runtime reads the environment once, when it is loaded, so it is restored afterwards.
    if any(name in os.environ for name in (_POLICY, *_SPIN)):
        yield
        return
    if "torch" in sys.modules:
        _log.debug(
            "torch is loaded: its threads spin as was set before. If they take the CPU from "
            "others, open the model before torch is imported, or set GOMP_SPINCOUNT=%s for the "
            "program",
            _SPIN["GOMP_SPINCOUNT"],
        )
        yield
        return
    os.environ.update(_SPIN)
    try:
        yield
    finally:
        for name, value in _SPIN.items():
            if os.environ.get(name) == value:
                del os.environ[name]


@dataclass(frozen=True)
class ThreadCount:
    """A number of threads.

    Attributes:
        count: at least 1.
        source: origin of the number.
    """

    count: int
    source: str

    def __str__(self) -> str:
        return f"{self.count} thread{'s' if self.count > 1 else ''} ({self.source})"


class ComputeThreads:
    """Sets the number of threads that compute in this process, until it is closed."""

    # The threads of a step wait for the slowest: one that shares its core with another program
    # halves the speed of all, and one thread fewer is faster.

    def __init__(
        self,
        configured: int | Literal["auto"],
        proc: Path = PROC,
        num_ranks: int = 1,
        num_engines: int = 1,
    ) -> None:
        """Choose the number and set it; on a machine of many cores that takes some milliseconds.

        Args:
            configured: the number, or "auto" to choose it, and to leave others the CPUs they use.
            proc: the system's folder of processes.
            num_ranks: workers of the engine on this host, which compute at the same time.
            num_engines: engines on this host, each with cores of its own.
        """
        import torch  # noqa: PLC0415 - `short_spin` is imported before torch

        self._before = torch.get_num_threads()
        if configured == "auto":
            limit = shared_limit(self._before, num_ranks, proc, num_engines=num_engines)
            chosen = fastest(limit, _measure)
        else:
            chosen = ThreadCount(configured, "executor.threads")
        self._limit = chosen.count
        self._set(chosen.count)
        shared = configured == "auto" and chosen.count > 1
        self._usage = CPUUsage.now(proc) if shared else None
        self._proc = proc
        _log.info("computing with %s", chosen)

    def adapt(self) -> None:
        """Use fewer threads while other programs keep CPUs busy; call it before each step.

        The number is set again if other code has changed it.
        """
        self._set(self._count)
        before = self._usage
        if before is None or time.monotonic() - before.seconds < _ADAPT_INTERVAL_S:
            return
        after = self._usage = CPUUsage.now(self._proc)
        # The load by others while this process waited for requests is no measure of the load now.
        if after is not None and after.computed_since(before):
            self._set(min(adapted(self._count, before.free_until(after)), self._limit))

    def close(self) -> None:
        """Restore the number, unless another was set since."""
        import torch  # noqa: PLC0415

        if torch.get_num_threads() == self._count:
            self._set(self._before)

    def _set(self, count: int) -> None:
        import torch  # noqa: PLC0415

        if count != torch.get_num_threads():
            torch.set_num_threads(count)
        self._count = count


@dataclass(frozen=True)
class CPUUsage:
    """The use of the CPUs that this process may run on, in seconds since some start.

    Attributes:
        seconds: the time.
        idle: idle time of all of these CPUs together.
        used: CPU time of this process.
    """

    seconds: float
    idle: float
    used: float

    @classmethod
    def now(cls, proc: Path = PROC) -> CPUUsage | None:
        """Return the use up to now; None where the system does not show it."""
        try:
            lines = (proc / "stat").read_text().splitlines()
            names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            fields = [line.split() for line in lines if line.split(" ", 1)[0] in names]
            # After the name: user, nice, system, idle, waiting for a disk.
            ticks = sum(int(field[4]) + int(field[5]) for field in fields)
            idle = ticks / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError, AttributeError):
            return None
        return cls(time.monotonic(), idle, time.process_time()) if fields else None

    def computed_since(self, earlier: CPUUsage) -> bool:
        """Return whether this process computed most of the time, maybe next to many others."""
        return self.used - earlier.used >= _COMPUTES * (self.seconds - earlier.seconds)

    def free_until(self, later: CPUUsage) -> float:
        """Return how many CPUs were idle or used by this process, on average until `later`."""
        used = later.idle - self.idle + later.used - self.used
        return used / max(later.seconds - self.seconds, 1e-3)


def adapted(count: int, free: float) -> int:
    """Return the number of threads for a number of CPUs that others leave free, at least 1.

    Args:
        count: the present number, which changes only for a clear difference.
        free: CPUs.
    """
    if count - _FEWER < free < count + _MORE:
        return count
    return max(round(free), 1)


def thread_limit(current: int, proc: Path = PROC, cpus: Path = CPUS) -> ThreadCount:
    """Return the most threads that can run at the same time without sharing a core.

    Args:
        current: the number that is set, by torch, the program or the user.
        proc: the system's folder of processes.
        cpus: the system's folder of CPUs.
    """
    limits = [_cores(cpus), *_quotas(proc)]
    limits.append(ThreadCount(current, "set for torch, as by OMP_NUM_THREADS or set_num_threads"))
    return min(limits, key=lambda limit: limit.count)


def shared_limit(
    current: int,
    num_ranks: int,
    proc: Path = PROC,
    cpus: Path = CPUS,
    *,
    num_engines: int = 1,
) -> ThreadCount:
    """Return the most threads of one of several ranks that share the cores of this host.

    Args:
        current, proc, cpus: as for `thread_limit`; `current` is for one rank.
        num_ranks: number of ranks.
        num_engines: number of engines, which share the time that a control group has.
    """
    set_before = thread_limit(current, proc, cpus)
    if num_ranks == num_engines == 1:
        return set_before
    cores = _core_limit(proc, cpus)
    if num_engines > 1:
        quotas = (
            ThreadCount(
                max(quota.count // num_engines, 1), f"{quota.source}, for {num_engines} engines"
            )
            for quota in _quotas(proc)
        )
        cores = min([_cores(cpus), *quotas], key=lambda limit: limit.count)
        set_before = min(set_before, cores, key=lambda limit: limit.count)
    if num_ranks == 1 or set_before.count <= cores.count // num_ranks:
        return set_before
    source = f"{cores.source}: {cores.count}, divided by {num_ranks} ranks"
    return ThreadCount(max(cores.count // num_ranks, 1), source)


def crowding(num_ranks: int, proc: Path = PROC, cpus: Path = CPUS) -> str | None:
    """Return the problem with so many ranks on this host; None if each has a core."""
    cores = _core_limit(proc, cpus)
    if num_ranks <= cores.count:
        return None
    return (
        f"{num_ranks} ranks share {cores.count} cores ({cores.source}): each step waits for the "
        f"slowest rank; parallel.tensor x parallel.pipeline of at most {cores.count} is faster"
    )


def _core_limit(proc: Path, cpus: Path) -> ThreadCount:
    return min([_cores(cpus), *_quotas(proc)], key=lambda limit: limit.count)


def fastest(limit: ThreadCount, measure: Callable[[int], float]) -> ThreadCount:
    """Return the limit, or half of it, and so on down to 2, as long as that is clearly faster.

    Args:
        limit: the most threads.
        measure: returns the seconds that a number of threads takes.
    """
    # Cores may share a channel to memory, or be parts of others' that the system does not show.
    # One thread is faster than two only while another program is busy, which `adapt` sees.
    best = limit
    seconds = measure(best.count) if best.count >= _MEASURED else 0.0
    while best.count >= _MEASURED:
        fewer = ThreadCount(best.count // 2, f"measured to be faster than {best.count}")
        with_fewer = measure(fewer.count)
        if with_fewer > _FASTER * seconds:
            break
        best, seconds = fewer, with_fewer
    return best


def _cores(cpus: Path) -> ThreadCount:
    """Return the number of cores; the CPUs of a core that runs several threads count once."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # another system than Linux
        return ThreadCount(os.cpu_count() or 1, "the CPUs of this machine")
    files = (cpus / f"cpu{number}/topology/thread_siblings_list" for number in usable)
    siblings = [read_control(file) for file in files]
    count = len(set(siblings)) if None not in siblings else len(usable)
    return ThreadCount(count, "the cores that this process may use")


def _quotas(proc: Path) -> Iterator[ThreadCount]:
    for group in control_groups("cpu", proc):
        for names in _QUOTAS:
            text = " ".join(read_control(group / name) or "" for name in names)
            quota, _, period = text.partition(" ")
            if quota.isdecimal() and period.isdecimal() and int(period):
                cpus = int(quota) / int(period)
                # Rounded down: a group that has used up its quota stops until the period ends.
                yield ThreadCount(max(int(cpus), 1), f"{group / names[0]}, {cpus:g} CPUs")


def _measure(count: int) -> float:
    """Return the seconds that a product takes which reads much memory, as decoding does."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(count)
    weight, vector = torch.ones(_ROWS, _COLUMNS), torch.ones(_COLUMNS)
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        torch.mv(weight, vector)
        seconds.append(time.perf_counter() - began)
    return min(seconds)
