"""Resources that a process holds: threads, files, sockets, child processes, memory."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardpoint.testing.snapshots import snapshot

__all__ = [
    "FileWatch",
    "busy_thread",
    "child_processes",
    "grouped",
    "handles",
    "memory",
    "more_than",
    "settings",
    "traced",
]

_TASKS = "/proc/self/task"
_WINDOW_S = 0.05
_BUSY = 0.5
"""Share of a window above which the time that threads run or wait for a processor is busy."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PLACES: dict[str, int] = {"open": 0, "os.mkdir": 0, "os.rename": 1, "os.symlink": 1, "os.link": 1}
"""Audit events that make a file, with the index of its path among the arguments."""


def child_processes() -> list[str]:
    """Return descriptions of the child processes that still run; none on other systems."""
    processes: list[str] = []
    with suppress(OSError):
        for task in os.listdir(_TASKS):
            for child in Path(_TASKS, task, "children").read_text().split():
                with suppress(OSError):
                    if _state(Path("/proc", child)) not in "ZX":
                        processes.append("child process")
    return processes


def handles() -> dict[str, int]:
    """Return the number of threads, open files, sockets and child processes, by description."""
    names = [f"thread {thread.name!r}" for thread in threading.enumerate()] + child_processes()
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            for number in os.listdir(folder):
                with suppress(OSError):  # the one that listed them
                    names.append(os.readlink(f"{folder}/{number}"))
            break
    held: dict[str, int] = {}
    for name in names:
        kind = name.partition(":[")[0]  # sockets and pipes have a number each
        held[kind] = held.get(kind, 0) + 1
    return held


def grouped(held: Mapping[str, int]) -> dict[str, int]:
    """Return the number of handles by group: threads, child processes, sockets, files."""
    groups: dict[str, int] = {}
    for name, count in held.items():
        first = name.partition(" ")[0].partition(":")[0]
        named = {"thread": "threads", "child": "child processes", "socket": "sockets"}
        group = named.get(first, "open files and pipes")
        groups[group] = groups.get(group, 0) + count
    return groups


def more_than(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the increase of each resource that grew."""
    return {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}


@contextmanager
def traced() -> Iterator[None]:
    """Trace allocations in the body, so that `memory` has a value.

    Objects from before are left out of garbage collections, which take long with them. They stay
    so if the program has frozen objects itself: `gc.unfreeze` would thaw them, too.
    """
    was_tracing, has_frozen = tracemalloc.is_tracing(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    if not was_tracing:
        tracemalloc.start()
    try:
        yield
    finally:
        if not has_frozen:
            gc.unfreeze()
        if not was_tracing:
            tracemalloc.stop()


def memory() -> dict[str, int]:
    """Return the bytes of Python objects, and of tensors on any device, by description.

    Only in the body of `traced`, and of what was allocated there. The interpreter's cache of
    attributes is emptied: it holds names that C code looks up, up to thousands of equal ones.
    """
    clear_caches = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
    clear_caches()
    gc.collect()
    allocated = tracemalloc.get_traced_memory()[0]
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            with suppress(Exception):  # one without a storage
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return {"bytes of Python objects": allocated, "bytes of tensors": sum(storages.values())}


def busy_thread(known: set[threading.Thread], seconds: float) -> str | None:
    """Return the name of a thread that computes while nothing is asked of it; None if none does.

    Time in which a thread waits for a processor counts, so that a busy machine changes nothing;
    several threads that wait for one another count as one.

    Args:
        known: threads that are left out.
        seconds: threads are busy if no part of that time is quiet.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = {t: _runnable_seconds(t) for t in threading.enumerate() if t not in known}
        time.sleep(_WINDOW_S)  # in which threads of Python can run
        spent = {  # the system adds the time of a wait when it ends
            thread: _WINDOW_S if _is_runnable(thread) else _runnable_seconds(thread) - before
            for thread, before in began.items()
            if thread.is_alive()
        }
        # The time of a thread that ends before it is read is 0, less than before.
        if sum(max(0.0, time_s) for time_s in spent.values()) <= _BUSY * _WINDOW_S:
            return None
        if time.monotonic() > deadline:
            return max(spent, key=spent.__getitem__).name


def _runnable_seconds(thread: threading.Thread) -> float:
    """Return the time in which a thread ran, or waited for a processor; 0 on other systems."""
    try:
        text = Path(f"{_TASKS}/{thread.native_id}/schedstat").read_text()
        ran, waited = text.split()[:2]
    except (OSError, ValueError):
        return 0.0
    return (int(ran) + int(waited)) / 1e9


def _is_runnable(thread: threading.Thread) -> bool:
    """Return whether a thread is running or ready to run, where Linux shows it."""
    try:
        return _state(Path(f"{_TASKS}/{thread.native_id}")) == "R"
    except OSError:
        return False


def _state(folder: Path) -> str:
    """Return the letter of a process's or a thread's state."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]


def settings() -> dict[str, Any]:
    """Return the settings that all components of a process share, by name."""
    affinity = getattr(os, "sched_getaffinity", lambda _pid: None)
    return {
        "the processors that the process may run on": affinity(0),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's random state": snapshot(torch.get_rng_state()),
        "numpy's random state": snapshot(np.random.get_state()),
        "the working folder": os.getcwd(),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "the handler of SIGTERM": signal.getsignal(signal.SIGTERM),
    }


class FileWatch:
    """Watches the files and folders that Python code of this process makes or writes.

    Code in threads that were there before is somebody else's. An audit hook cannot be removed, so
    all watches share one, which is idle between them.
    """

    _active: list[FileWatch] = []
    _is_hooked = False

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._other_threads: set[int | None] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the body."""
        if not FileWatch._is_hooked:
            FileWatch._is_hooked = True
            sys.addaudithook(_on_event)
        self._other_threads = {thread.ident for thread in threading.enumerate()}
        self._other_threads.discard(threading.get_ident())
        FileWatch._active.append(self)
        try:
            yield
        finally:
            FileWatch._active.remove(self)

    def left(self, is_expected: Callable[[str], bool]) -> list[str]:
        """Return the paths that still exist, except expected ones."""
        return sorted(p for p in self._paths if os.path.lexists(p) and not is_expected(p))

    def note(self, path: str) -> None:
        """Keep a path."""
        is_other = threading.get_ident() in self._other_threads
        if not is_other and not path.endswith(".pyc") and "__pycache__" not in path:
            self._paths.add(path)


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if not FileWatch._active or event not in _PLACES:
        return
    path = args[_PLACES[event]]
    if isinstance(path, int) or (event == "open" and not _is_written(*args[1:3])):
        return
    with suppress(Exception):
        opened = os.path.abspath(os.fsdecode(path))
        if not opened.startswith(("/proc/", "/dev/", "/sys/")) or opened.startswith("/dev/shm/"):
            for watch in FileWatch._active:
                watch.note(opened)


def _is_written(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool((flags or 0) & _WRITING)
