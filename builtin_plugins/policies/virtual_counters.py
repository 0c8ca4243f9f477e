"""Virtual token counters of the service that clients have received."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True, eq=False)
class ClientCounter:
    """A client with requests, or with a counter above the level.

    Attributes:
        counter: received service as cost over weight; lifted when it begins to wait again.
        waiting: number of its waiting requests.
        live: number of its live requests.
        in_heap: whether `VirtualCounters` has an entry of it in its heap.
    """

    name: str
    weight: float
    counter: float
    waiting: int = 0
    live: int = 0
    in_heap: bool = False


class VirtualCounters:
    """The counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

    A client gets no credit for time without waiting requests: when it has one again, its counter
    is lifted to the *level*, the smallest counter of the waiting clients, or the counter of the
    client that waited last if none waits.
    """

    # The level never falls: counters only rise, a client that begins to wait is at the level or
    # above, and the last one to wait had the smallest counter. So a client without requests is
    # dropped once its counter is not above the level: it would be lifted to the level anyway. Kept
    # are clients with requests, and clients above the level.

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` are by client name; the default is 1."""
        self._weights = weights
        self._clients: dict[str, ClientCounter] = {}
        self._last = ClientCounter("", 1.0, 0.0)
        self._num_backlogged = 0
        # Clients that wait or have no requests, and some that only run, by a counter that may be
        # outdated.
        self._heap: list[tuple[float, int, ClientCounter]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._clients)

    def counter(self, name: str) -> float:
        """Return the counter of a client that has requests."""
        return self._clients[name].counter

    def add(self, name: str) -> ClientCounter:
        """Add a request of a client, which does not wait yet; return the client."""
        client = self._clients.get(name)
        if client is None:
            client = self._new(name, 0.0)
        client.live += 1
        return client

    def wait(self, client: ClientCounter, *, lift: bool = True) -> None:
        """Count a waiting request; `lift` is False for a request that has waited all along."""
        if not client.waiting:
            if lift:
                client.counter = max(client.counter, self.level())
            self._num_backlogged += 1
            self._push(client)
        client.waiting += 1

    def run(self, client: ClientCounter) -> None:
        """Uncount a waiting request that starts to run or ends."""
        client.waiting -= 1
        if not client.waiting:
            self._num_backlogged -= 1
            self._last = client

    def remove(self, client: ClientCounter) -> None:
        """Remove a request that does not wait any more."""
        client.live -= 1
        if not client.live:
            self._push(client)
            self.level()

    def level(self) -> float:
        """Return the level; drop clients without requests that are not above it."""
        while self._heap:
            counter, _, client = self._heap[0]
            if client.counter > counter:
                heapq.heapreplace(self._heap, self._entry(client))
            elif client.waiting:
                return counter
            elif client.live:
                self._pop()
            elif self._num_backlogged or counter <= self._last.counter:
                del self._clients[self._pop().name]
            else:
                break
        return self._last.counter

    def export(self) -> dict[str, float]:
        """Return the counters by name."""
        self.level()
        return {client.name: client.counter for client in self._clients.values()}

    def restore(self, counters: Mapping[str, float], level: float) -> None:
        """Start from exported counters; requests of these clients are added later."""
        self._last.counter = level
        for name, counter in counters.items():
            self._push(self._new(name, counter))

    def _new(self, name: str, counter: float) -> ClientCounter:
        client = ClientCounter(name, self._weights.get(name, 1.0), counter)
        self._clients[name] = client
        return client

    def _push(self, client: ClientCounter) -> None:
        if not client.in_heap:
            client.in_heap = True
            heapq.heappush(self._heap, self._entry(client))

    def _pop(self) -> ClientCounter:
        _, _, client = heapq.heappop(self._heap)
        client.in_heap = False
        return client

    def _entry(self, client: ClientCounter) -> tuple[float, int, ClientCounter]:
        return client.counter, next(self._serial), client
