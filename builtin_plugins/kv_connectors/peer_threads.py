"""Threads for what other engines are asked, so that none delays what has nothing to do with it."""

from __future__ import annotations

from collections.abc import Callable

from .threads import Task, TaskThreads


class PeerThreads:
    """Some threads for each peer; they are started when there is something to do."""

    def __init__(self, open_threads: Callable[[str, int], TaskThreads], count: int) -> None:
        """Start no thread yet.

        Args:
            open_threads: called with a name and a number of threads.
            count: of threads that fetch blocks from one peer.
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
        """Run a task that renews the leases of a peer's blocks, whatever is fetched meanwhile."""
        if peer not in self._renewers:
            self._renewers[peer] = self._open_threads("KVRenew", 1)
        self._renewers[peer].submit(task)

    def close(self, timeout: float) -> None:
        """End the threads, once they have run all tasks; those that are stuck are left behind."""
        for threads in (*self._renewers.values(), *self._fetchers.values()):
            threads.close(timeout)
