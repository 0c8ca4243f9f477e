"""A communicator of ranks that are threads of one process."""

import queue
import threading
import time

import torch

from hardpoint.plugins import ModelError
from hardpoint.plugins.errors import CommunicationAbortedError
from hardpoint.plugins.parallel import Communicator

LOCK = threading.Lock()
GROUPS = {}


class Group:
    """The ranks that have come, and a queue from each to each."""

    def __init__(self, size):
        self.ranks = set()
        self.reason = None
        pairs = [(a, b) for a in range(size) for b in range(size)]
        self.rows = {pair: queue.SimpleQueue() for pair in pairs}
        self.messages = {pair: queue.SimpleQueue() for pair in pairs}


class CompatThreads(Communicator):
    """Passes tensors through queues."""

    contract = 1
    devices = ("cpu",)

    def __init__(self, context):
        super().__init__(context)
        key = (context.placement.folder, context.group)
        with LOCK:
            self.group = GROUPS.setdefault(key, Group(context.size))
            self.group.ranks.add(context.rank)
        end = time.monotonic() + context.timeout_seconds
        while len(self.group.ranks) < context.size:
            if reason := context.abort_reason():
                raise CommunicationAbortedError(reason)
            if time.monotonic() > end or not context.placement.is_one_host:
                missing = set(range(context.size)) - self.group.ranks
                GROUPS.pop(key, None)
                raise ModelError(f"{self.name}: ranks {sorted(missing)} of {key[1]} did not come")
            time.sleep(0.001)
        with LOCK:
            GROUPS.pop(key, None)

    def describe(self):
        return f"{self.name} ({self.size} threads)"

    def all_reduce(self, x):
        parts = self.all_gather(x)
        total = parts[0].float() if x.is_floating_point() else parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x):
        for other in range(self.size):
            self._put(self.group.rows, x, other)
        return torch.stack([self._take(self.group.rows, other) for other in range(self.size)])

    def all_to_all(self, x):
        if len(x) != self.size:
            raise ValueError(f"x: expected {self.size} rows, got {len(x)}")
        for other, row in enumerate(x):
            self._put(self.group.rows, row, other)
        return torch.stack([self._take(self.group.rows, other) for other in range(self.size)])

    def broadcast(self, x, source):
        if not 0 <= source < self.size:
            raise ValueError(f"source: expected a rank in 0..{self.size - 1}, got {source}")
        if self.rank != source:
            return x.copy_(self._take(self.group.rows, source))
        for other in range(self.size):
            if other != source:
                self._put(self.group.rows, x, other)
        return x

    def send(self, x, destination):
        self._put(self.group.messages, x, self._other(destination))

    def recv(self, x, source):
        return x.copy_(self._take(self.group.messages, self._other(source)))

    def abort(self, reason):
        self.group.reason = reason

    def _other(self, rank):
        if not 0 <= rank < self.size or rank == self.rank:
            raise ValueError(f"rank: expected another in 0..{self.size - 1}, got {rank}")
        return rank

    def _check(self):
        if self.group.reason is not None:
            raise CommunicationAbortedError(self.group.reason)

    def _put(self, queues, x, destination):
        self._check()
        queues[self.rank, destination].put(x.clone())

    def _take(self, queues, source):
        while True:
            self._check()
            try:
                return queues[source, self.rank].get(timeout=0.01)
            except queue.Empty:
                continue
