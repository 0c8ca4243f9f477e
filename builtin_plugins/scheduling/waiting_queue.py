"""The waiting queue: one heap per group, ordered by the policy's key."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Any

from hardpoint.plugins import SchedulingPolicy

from .live_request import LiveRequest

# Key, whether it was never preempted, order of arrival, serial number of the entry, request.
_Entry = tuple[Any, bool, int, int, LiveRequest]


class WaitingQueue:
    """Waiting requests in the policy's order; ties: preempted requests first, then by arrival.

    Removal is lazy: an entry whose serial number is not the recorded one is stale, and is dropped
    when it reaches the top of its heap.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        """Create an empty queue."""
        self.policy = policy
        self._has_groups = "group" in policy.overridden
        self._heaps: dict[Hashable, list[_Entry]] = {}
        self._serials: dict[str, int] = {}
        self._groups: dict[str, Hashable] = {}
        self._num_pushed = 0
        self._num_stale = 0

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._serials)

    def __contains__(self, request: LiveRequest) -> bool:
        """Return whether a request is in the queue."""
        return request.request_id in self._serials

    def __iter__(self) -> Iterator[LiveRequest]:
        """Yield the requests, in no particular order."""
        for heap in self._heaps.values():
            for entry in heap:
                if self._is_current(entry):
                    yield entry[4]

    def push(self, request: LiveRequest) -> None:
        """Add a request, under the key and group that the policy gives it now."""
        key = self.policy.key(request)
        group = self.policy.group(request) if self._has_groups else None
        self._num_pushed += 1
        self._serials[request.request_id] = self._num_pushed
        self._groups[request.request_id] = group
        heap = self._heaps.setdefault(group, [])
        fresh = request.num_preemptions == 0
        heapq.heappush(heap, (key, fresh, request.order, self._num_pushed, request))

    def remove(self, request: LiveRequest) -> None:
        """Remove a request."""
        del self._serials[request.request_id]
        del self._groups[request.request_id]
        self._num_stale += 1
        if self._num_stale > 64 + 2 * len(self._serials):
            self._drop_stale()

    def num_ahead(self, request: LiveRequest) -> int:
        """Return how many requests of its group come before a request, in linear time."""
        heap = self._heaps[self._groups[request.request_id]]
        serial = self._serials[request.request_id]
        own = next(entry for entry in heap if entry[3] == serial)
        return sum(1 for entry in heap if entry < own and self._is_current(entry))

    def cursor(self, now: float) -> QueueCursor:
        """Return a cursor at the first request; the caller closes it."""
        return QueueCursor(self, now)

    def _is_current(self, entry: _Entry) -> bool:
        return self._serials.get(entry[4].request_id) == entry[3]

    def _drop_stale(self) -> None:
        """Rebuild the heaps without stale entries."""
        self._num_stale = 0
        for group in list(self._heaps):
            heap = [entry for entry in self._heaps[group] if self._is_current(entry)]
            heapq.heapify(heap)
            if heap:
                self._heaps[group] = heap
            else:
                del self._heaps[group]

    # Used by QueueCursor.

    def heap_of(self, group: Hashable) -> list[_Entry]:
        """Return a group's heap with a current entry on top; an empty list if it has none."""
        heap = self._heaps.get(group)
        if heap is None:
            return []
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
            self._num_stale -= 1
        if not heap:
            del self._heaps[group]
        return heap

    def groups(self) -> list[Hashable]:
        """Return the groups that may have waiting requests."""
        return list(self._heaps)

    def restore(self, group: Hashable, entry: _Entry) -> None:
        """Push an entry back that the cursor popped off its heap."""
        heapq.heappush(self._heaps.setdefault(group, []), entry)


class QueueCursor:
    """One pass over the queue, best request first; skipped requests keep their place in it.

    The best request of the group with the smallest group key comes first; of equal group keys, the
    group whose best request arrived first.
    """

    def __init__(self, queue: WaitingQueue, now: float) -> None:
        """Rank the groups by their keys at `now`."""
        self._queue = queue
        self._now = now
        groups = queue.groups()
        self._single = len(groups) == 1
        self._ranking: list[tuple[Any, int, int, Hashable]] = []
        self._skipped: list[tuple[Hashable, _Entry]] = []
        self._num_ranked = 0
        for group in groups:
            self._rank(group)

    def head(self) -> LiveRequest | None:
        """Return the next request; None at the end."""
        while self._ranking:
            if heap := self._queue.heap_of(self._ranking[0][3]):
                return heap[0][4]
            heapq.heappop(self._ranking)
        return None

    def pop(self) -> None:
        """Remove the head from the queue."""
        group = self._ranking[0][3]
        request = self._queue.heap_of(group)[0][4]
        self._queue.remove(request)
        self._rerank(group)

    def skip(self) -> None:
        """Skip the head; it is back in its place when the cursor is closed."""
        group = self._ranking[0][3]
        self._skipped.append((group, heapq.heappop(self._queue.heap_of(group))))
        self._rerank(group)

    def close(self) -> None:
        """Restore the skipped requests."""
        for group, entry in self._skipped:
            self._queue.restore(group, entry)

    def _rerank(self, group: Hashable) -> None:
        heapq.heappop(self._ranking)
        self._rank(group)

    def _rank(self, group: Hashable) -> None:
        if heap := self._queue.heap_of(group):
            self._num_ranked += 1
            key = 0 if self._single else self._queue.policy.group_key(group, self._now)
            heapq.heappush(self._ranking, (key, heap[0][2], self._num_ranked, group))
