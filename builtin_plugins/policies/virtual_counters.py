"""Virtual token counters: how much service each client had, as far as it matters."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True, eq=False)
class Client:
    """A client that has requests, or is ahead of the others.

    Attributes:
        counter: cost over weight of what it was given, lifted when it came back.
        waiting: how many of its requests wait.
        live: how many it has.
        listed: whether `VirtualCounters` has an entry of it in its heap.
    """

    name: str
    weight: float
    counter: float
    waiting: int = 0
    live: int = 0
    listed: bool = False


class VirtualCounters:
    """The counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

    A client of which nothing waited gets no credit for that: when it has something again, its
    counter is lifted to the *level*, which is the smallest counter of the clients that wait, or
    if none does, that of the client that waited last.

    The level never falls: counters only rise, who begins to wait is at the level or above, and
    the last to wait was the lowest. So a client without requests whose counter is not above the
    level may be forgotten: when it came back it would be lifted to no less. What is kept is who
    has requests, and who was served beyond the level since it last rose.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` is by name, 1 where it says nothing; a client may have so much more."""
        self._weights = weights
        self._clients: dict[str, Client] = {}
        self._last = Client("", 1.0, 0.0)
        self._num_backlogged = 0
        # Clients that wait or have no requests; some that only run. Numbers lag behind counters.
        self._heap: list[tuple[float, int, Client]] = []
        self._serial = count()

    def __len__(self) -> int:
        """Return how many clients are known."""
        return len(self._clients)

    def counter(self, name: str) -> float:
        """Return the counter of a client that has requests."""
        return self._clients[name].counter

    def begin(self, name: str) -> Client:
        """Add a request, which does not wait yet."""
        client = self._clients.get(name)
        if client is None:
            client = self._new(name, 0.0)
        client.live += 1
        return client

    def wait(self, client: Client, *, lift: bool = True) -> None:
        """Note that a request of a client begins to wait; without `lift`, that it still does."""
        if not client.waiting:
            if lift:
                client.counter = max(client.counter, self.level())
            self._num_backlogged += 1
            self._list(client)
        client.waiting += 1

    def run(self, client: Client) -> None:
        """Note that a request of a client waits no more."""
        client.waiting -= 1
        if not client.waiting:
            self._num_backlogged -= 1
            self._last = client

    def end(self, client: Client) -> None:
        """Remove a request that does not wait any more."""
        client.live -= 1
        if not client.live:
            self._list(client)
            self.level()

    def level(self) -> float:
        """Return what a client that begins to wait is lifted to; forget who is not above it."""
        while self._heap:
            counter, _, client = self._heap[0]
            if client.counter > counter:
                heapq.heapreplace(self._heap, self._entry(client))
            elif client.waiting:
                return counter
            elif client.live:
                self._unlist()
            elif self._num_backlogged or counter <= self._last.counter:
                del self._clients[self._unlist().name]
            else:
                break
        return self._last.counter

    def export(self) -> dict[str, float]:
        """Return the counters by name."""
        self.level()
        return {client.name: client.counter for client in self._clients.values()}

    def restore(self, counters: Mapping[str, float], level: float) -> None:
        """Begin with these counters; whoever has requests is about to say so."""
        self._last.counter = level
        for name, counter in counters.items():
            self._list(self._new(name, counter))

    def _new(self, name: str, counter: float) -> Client:
        client = Client(name, self._weights.get(name, 1.0), counter)
        self._clients[name] = client
        return client

    def _list(self, client: Client) -> None:
        if not client.listed:
            client.listed = True
            heapq.heappush(self._heap, self._entry(client))

    def _unlist(self) -> Client:
        _, _, client = heapq.heappop(self._heap)
        client.listed = False
        return client

    def _entry(self, client: Client) -> tuple[float, int, Client]:
        return client.counter, next(self._serial), client
