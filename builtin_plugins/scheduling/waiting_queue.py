"""The waiting queue: groups of requests, each a heap by the policy's key."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Any

from hardpoint.plugins import SchedulingPolicy

from .live import LiveRequest

# Key, whether it never ran, order of arrival, serial of the entry, request.
_Entry = tuple[Any, bool, int, int, LiveRequest]


class WaitingQueue:
    """Waiting requests; of equal keys, preempted ones first, then in order of arrival.

    Leaving costs nothing: an entry whose serial is not the one on record is dead, and is dropped
    when it comes to the top.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        """Start empty."""
        self.policy = policy
        self._heaps: dict[Hashable, list[_Entry]] = {}
        self._serials: dict[str, int] = {}
        self._groups: dict[str, Hashable] = {}
        self._pushed = 0
        self._dead = 0

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._serials)

    def __contains__(self, request: LiveRequest) -> bool:
        """Whether a request waits here."""
        return request.request_id in self._serials

    def __iter__(self) -> Iterator[LiveRequest]:
        """Yield the requests, in no particular order."""
        for heap in self._heaps.values():
            for entry in heap:
                if self._alive(entry):
                    yield entry[4]

    def push(self, request: LiveRequest) -> None:
        """Let a request in; reads its key and its group."""
        key, group = self.policy.key(request), self.policy.group(request)
        self._pushed += 1
        self._serials[request.request_id] = self._pushed
        self._groups[request.request_id] = group
        heap = self._heaps.setdefault(group, [])
        fresh = request.num_preemptions == 0
        heapq.heappush(heap, (key, fresh, request.order, self._pushed, request))

    def remove(self, request: LiveRequest) -> None:
        """Let a request out."""
        del self._serials[request.request_id]
        del self._groups[request.request_id]
        self._dead += 1
        if self._dead > 64 + 2 * len(self._serials):
            self._sweep()

    def ahead_of(self, request: LiveRequest) -> int:
        """Return how many stand before a request in its group. Looks at all of them."""
        heap = self._heaps[self._groups[request.request_id]]
        serial = self._serials[request.request_id]
        mine = next(entry for entry in heap if entry[3] == serial)
        return sum(1 for entry in heap if entry < mine and self._alive(entry))

    def walk(self, now: float) -> Walk:
        """Begin to look at the requests in order; to be closed."""
        return Walk(self, now)

    def _alive(self, entry: _Entry) -> bool:
        return self._serials.get(entry[4].request_id) == entry[3]

    def _sweep(self) -> None:
        """Drop all dead entries."""
        self._dead = 0
        for group in list(self._heaps):
            heap = [entry for entry in self._heaps[group] if self._alive(entry)]
            heapq.heapify(heap)
            if heap:
                self._heaps[group] = heap
            else:
                del self._heaps[group]

    # The three below are for Walk.

    def heap_of(self, group: Hashable) -> list[_Entry]:
        """Return a group's heap with a living entry on top; empty if it has none."""
        heap = self._heaps.get(group)
        if heap is None:
            return []
        while heap and not self._alive(heap[0]):
            heapq.heappop(heap)
            self._dead -= 1
        if not heap:
            del self._heaps[group]
        return heap

    def groups(self) -> list[Hashable]:
        """Return the groups that may have somebody waiting."""
        return list(self._heaps)

    def restore(self, group: Hashable, entry: _Entry) -> None:
        """Put an entry back that was taken off its heap."""
        heapq.heappush(self._heaps.setdefault(group, []), entry)


class Walk:
    """One look at the queue, best first. Who is skipped goes back to its place at the end.

    The best request of the group with the smallest group key comes first; of equal groups, the
    one whose best request came first.
    """

    def __init__(self, queue: WaitingQueue, now: float) -> None:
        """`now` is what group keys are asked for."""
        self._queue = queue
        self._now = now
        groups = queue.groups()
        self._single = len(groups) == 1
        self._ranking: list[tuple[Any, int, int, Hashable]] = []
        self._skipped: list[tuple[Hashable, _Entry]] = []
        self._ranked = 0
        for group in groups:
            self._rank(group)

    def head(self) -> LiveRequest | None:
        """Return the request whose turn it is."""
        while self._ranking:
            if heap := self._queue.heap_of(self._ranking[0][3]):
                return heap[0][4]
            heapq.heappop(self._ranking)
        return None

    def take(self) -> None:
        """Let the head out of the queue; its group is ranked anew."""
        group = self._ranking[0][3]
        request = self._queue.heap_of(group)[0][4]
        self._queue.remove(request)
        self._rerank(group)

    def skip(self) -> None:
        """Set the head aside until the walk ends."""
        group = self._ranking[0][3]
        self._skipped.append((group, heapq.heappop(self._queue.heap_of(group))))
        self._rerank(group)

    def close(self) -> None:
        """Put back who was set aside."""
        for group, entry in self._skipped:
            self._queue.restore(group, entry)

    def _rerank(self, group: Hashable) -> None:
        heapq.heappop(self._ranking)
        self._rank(group)

    def _rank(self, group: Hashable) -> None:
        if heap := self._queue.heap_of(group):
            self._ranked += 1
            key = 0 if self._single else self._queue.policy.group_key(group, self._now)
            heapq.heappush(self._ranking, (key, heap[0][2], self._ranked, group))
