"""Runs a load in this process, or in several."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from http_load.drive import Client, Load, Outcome, Part
from http_load.target import Target
from http_load.workload import Workload

_PROGRESS_PERIOD_S = 0.5
_READY_TIMEOUT_S = 600.0

T = TypeVar("T")


def run_on_uvloop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop's event loop."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def run_load(
    target: Target,
    headers: dict[str, str],
    workload: Workload,
    load: Load,
    *,
    processes: int = 1,
) -> list[Outcome]:
    """Send a load, and show its progress if standard error is a terminal.

    Args:
        target: the server.
        headers: headers of each request.
        workload: what is asked.
        load: how.
        processes: number of processes that send it, at most one per stream.

    Returns:
        What each process measured.
    """
    allow_descriptors(load.concurrency + 256)
    processes = min(processes, load.concurrency or processes)
    if processes == 1:
        counters = [0, 0]
        client = Client(target, headers, workload, load, Part(), counters)
        with progress(load, counters):
            return [run_on_uvloop(client.run(lambda: None))]
    context = multiprocessing.get_context("spawn")
    shared = context.Array("q", 2 * processes, lock=False)
    barrier = context.Barrier(processes)
    with (
        progress(load, shared),
        context.Pool(processes, _share, (shared, barrier)) as pool,
    ):
        parts = [Part(index, processes) for index in range(processes)]
        arguments = [(target, headers, workload, load, part) for part in parts]
        return pool.starmap(_run_part, arguments, chunksize=1)


_shared: list[Any] = []
"""Of a child process: counters of all, and the barrier before the load."""


def _share(counters: Any, barrier: Any) -> None:
    _shared[:] = [counters, barrier]


def _run_part(
    target: Target, headers: dict[str, str], workload: Workload, load: Load, part: Part
) -> Outcome:
    counters, barrier = _shared
    allow_descriptors(load.concurrency + 256)
    client = Client(target, headers, workload, load, part, counters)
    ready: Callable[[], object] = lambda: barrier.wait(_READY_TIMEOUT_S)  # noqa: E731
    return run_on_uvloop(client.run(ready))


def allow_descriptors(count: int) -> None:
    """Raise the limit of open files to a number, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def progress(load: Load, counters: Sequence[int]) -> Iterator[None]:
    """Show how many requests ended, on a line of standard error, if it is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    start = time.perf_counter()
    of = "" if load.requests is None else f" of {load.requests}"

    def show() -> None:
        while not ended.wait(_PROGRESS_PERIOD_S):
            good, failed = sum(counters[0::2]), sum(counters[1::2])
            line = f"{load.name}: {good + failed}{of} requests, {failed} failed"
            sys.stderr.write(f"\r\033[K{line}, {time.perf_counter() - start:.0f} s")
            sys.stderr.flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.stderr.write("\r\033[K")
