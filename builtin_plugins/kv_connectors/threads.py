"""Threads for calls of stores, which may never return.

The worker half of the connector "stores" loads (moving.py) and saves (saving.py) in them, so that a
store that hangs costs a thread and no step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from hardpoint.errors import reason_of

Task = Callable[[], None]

_MOST_STUCK = 8  # as often as there are threads; calls to a store that hangs end at once by then


class TaskThreads:
    """Runs tasks in a few threads; a thread that is stuck in a task is replaced."""

    def __init__(
        self, name: str, count: int, timeout: float, report: Callable[[str], None]
    ) -> None:
        """Start no thread yet.

        Args:
            name: name of the threads.
            count: maximum number of threads, without stuck ones.
            timeout: seconds after which a task's thread is stuck.
            report: called with a message if a task raises.
        """
        self._name, self._count, self._timeout = name, count, timeout
        self._report = report
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._running: dict[threading.Thread, float | None] = {}  # when their task began
        self._stuck: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    def submit(self, task: Task, *, first: bool = False) -> None:
        """Run a task; `first` is before all others.

        Raises:
            RuntimeError: no thread can be started, and none runs that could take it.
        """
        with self._changed:
            if self._closed:
                return
            if self._idle <= len(self._tasks):  # none of them is for this task
                self._replace_stuck()
                may_start = len(self._stuck) < _MOST_STUCK * self._count
                if len(self._running) < self._count and may_start:
                    self._start_thread()
            (self._tasks.appendleft if first else self._tasks.append)(task)
            self._changed.notify()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has none left now
            if not self._running:
                raise
        else:
            self._running[thread] = None

    def _replace_stuck(self) -> None:
        now = time.monotonic()
        for thread, began in list(self._running.items()):
            if began is not None and now - began > self._timeout:
                del self._running[thread]
                self._stuck.add(thread)

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._changed:
                if thread in self._stuck:
                    self._stuck.discard(thread)
                    if len(self._running) >= self._count:  # another one has its place
                        return
                self._running[thread] = None
                self._changed.notify_all()
                self._idle += 1
                self._changed.wait_for(lambda: self._tasks or self._closed)
                self._idle -= 1
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._running[thread] = time.monotonic()
            try:
                task()
            except BaseException as cause:  # the thread is for all tasks
                self._report(f"{self._name}: {reason_of(cause)}")

    def drain(self, timeout: float) -> bool:
        """Wait until no task is left or runs; return whether that was so in time."""
        with self._changed:
            return self._changed.wait_for(self._is_done, timeout)

    def _is_done(self) -> bool:
        self._replace_stuck()
        return not self._tasks and all(began is None for began in self._running.values())

    def close(self, timeout: float) -> None:
        """End the threads after all tasks; stuck threads are left behind."""
        self.drain(timeout)
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._changed.notify_all()
            threads = list(self._running)
        for thread in threads:
            thread.join(timeout)


class PeerThreads:
    """Threads for each other engine, so that no engine delays tasks of others."""

    def __init__(self, open_threads: Callable[[str, int], TaskThreads], count: int) -> None:
        """Start no thread yet.

        Args:
            open_threads: called with a name and a number of threads.
            count: number of threads that fetch blocks from one peer.
        """
        self._open_threads, self._count = open_threads, count
        self._fetchers: dict[str, TaskThreads] = {}
        self._renewers: dict[str, TaskThreads] = {}

    def fetchers(self, peer: str) -> TaskThreads:
        """Return the threads that fetch blocks from a peer."""
        if peer not in self._fetchers:
            self._fetchers[peer] = self._open_threads("KVFetch", self._count)
        return self._fetchers[peer]

    def renew(self, peer: str, task: Task) -> None:
        """Run a task that renews the leases of a peer's blocks, whatever is fetched at the time."""
        if peer not in self._renewers:
            self._renewers[peer] = self._open_threads("KVRenew", 1)
        self._renewers[peer].submit(task)

    def close(self, timeout: float) -> None:
        """End the threads after all tasks; stuck threads are left behind."""
        for threads in (*self._renewers.values(), *self._fetchers.values()):
            threads.close(timeout)
