"""The waiting queue: per group, the requests in the order of the policy's key."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from hardpoint.plugins import SchedulingPolicy

from .live_request import SchedulerRequest

_CHUNK_SIZE = 256
"""Requests; a longer chunk is split. A change moves the requests of one chunk, and `num_ahead` adds
up the sizes of all, so both are short with a hundred thousand requests."""


@dataclass(slots=True, eq=False)
class _Chunk:
    """Consecutive requests of a group, in order; at least one."""

    group: Hashable
    requests: list[SchedulerRequest]


def _place(request: SchedulerRequest) -> tuple[Any, bool, int]:
    """Return the key of a request's place; ties: preempted requests first, then by arrival."""
    return request.queue_key, request.num_preemptions == 0, request.order


def _last_place(chunk: _Chunk) -> tuple[Any, bool, int]:
    return _place(chunk.requests[-1])


class WaitingQueue:
    """Waiting requests in the policy's order; ties: preempted requests first, then by arrival."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self._has_groups = "group" in policy.overridden
        self._groups: dict[Hashable, list[_Chunk]] = {}
        self._chunk_of: dict[str, _Chunk] = {}

    def __len__(self) -> int:
        return len(self._chunk_of)

    def __contains__(self, request: SchedulerRequest) -> bool:
        return request.request_id in self._chunk_of

    def __iter__(self) -> Iterator[SchedulerRequest]:
        for chunks in self._groups.values():
            for chunk in chunks:
                yield from chunk.requests

    def push(self, request: SchedulerRequest) -> None:
        """Add a request, under the key and group that the policy gives it now."""
        request.queue_key = self.policy.key(request)
        group = self.policy.group(request) if self._has_groups else None
        chunks = self._groups.setdefault(group, [])
        if not chunks:
            chunks.append(_Chunk(group, [request]))
            self._chunk_of[request.request_id] = chunks[0]
            return
        place = _place(request)
        if _last_place(chunks[-1]) < place:  # as most do
            index = len(chunks) - 1
            chunks[index].requests.append(request)
        else:
            index = bisect_left(chunks, place, hi=len(chunks) - 1, key=_last_place)
            insort(chunks[index].requests, request, key=_place)
        self._chunk_of[request.request_id] = chunks[index]
        if len(chunks[index].requests) > _CHUNK_SIZE:
            self._split(chunks, index)

    def remove(self, request: SchedulerRequest) -> None:
        """Remove a request."""
        chunk = self._chunk_of.pop(request.request_id)
        chunk.requests.remove(request)
        request.queue_key = None
        if not chunk.requests:
            chunks = self._groups[chunk.group]
            chunks.remove(chunk)
            if not chunks:
                del self._groups[chunk.group]

    def num_ahead(self, request: SchedulerRequest) -> int:
        """Return how many requests of its group come before a request."""
        chunk_of_request = self._chunk_of[request.request_id]
        chunks = self._groups[chunk_of_request.group]
        before = chunks[: chunks.index(chunk_of_request)]
        return sum(len(chunk.requests) for chunk in before) + chunk_of_request.requests.index(
            request
        )

    def cursor(self, now: float) -> QueueCursor:
        """Return a cursor at the first request."""
        return QueueCursor(self, now)

    def _split(self, chunks: list[_Chunk], index: int) -> None:
        """Move the second half of a chunk into one of its own."""
        requests = chunks[index].requests
        half = len(requests) // 2
        later = _Chunk(chunks[index].group, requests[half:])
        del requests[half:]
        chunks.insert(index + 1, later)
        for request in later.requests:
            self._chunk_of[request.request_id] = later

    # Used by QueueCursor.

    def groups(self) -> list[Hashable]:
        """Return the groups that have waiting requests."""
        return list(self._groups)

    def in_order(self, group: Hashable) -> Iterator[SchedulerRequest]:
        """Yield the requests of a group in order, except requests removed in the meantime."""
        for chunk in tuple(self._groups[group]):
            for request in tuple(chunk.requests):
                if request in self:
                    yield request


class QueueCursor:
    """One pass over the queue, best request first; skipped requests keep their place in it.

    The best request of the group with the smallest group key comes first; of equal group keys, the
    group with the earliest best request. Nothing is added to the queue during the pass.
    """

    def __init__(self, queue: WaitingQueue, now: float) -> None:
        self._queue = queue
        self._now = now
        self._rest = {group: queue.in_order(group) for group in queue.groups()}
        self._single = len(self._rest) == 1
        self._ranking: list[tuple[Any, int, int, Hashable, SchedulerRequest]] = []
        self._num_ranked = 0
        for group in self._rest:
            self._rank(group)

    def head(self) -> SchedulerRequest | None:
        """Return the next request; None at the end."""
        while self._ranking:
            key, order, number, group, request = self._ranking[0]
            if request in self._queue:
                return request
            # It has ended; the next one of its group takes its place.
            following = next(self._rest[group], None)
            if following is None:
                heapq.heappop(self._ranking)
            else:
                self._ranking[0] = key, order, number, group, following
        return None

    def pop(self) -> None:
        """Remove the head from the queue."""
        self._queue.remove(self._ranking[0][4])
        self.skip()

    def skip(self) -> None:
        """Skip the head."""
        group = heapq.heappop(self._ranking)[3]
        self._rank(group)

    def _rank(self, group: Hashable) -> None:
        best = next(self._rest[group], None)
        if best is not None:
            self._num_ranked += 1
            key = 0 if self._single else self._queue.policy.group_key(group, self._now)
            heapq.heappush(self._ranking, (key, best.order, self._num_ranked, group, best))
