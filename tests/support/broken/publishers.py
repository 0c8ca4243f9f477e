"""KV event publishers with one typical mistake each."""

from __future__ import annotations

import queue
import socket
import threading

import msgspec

from hardpoint.plugins import BlockStored, KVEventPublisher
from support.samples import Sample, spend


class Queued(Sample, KVEventPublisher, contract=1):
    """Correct: passes batches to a thread, which hands them to the listeners."""

    def __init__(self, context):
        super().__init__(context)
        self.listeners = []
        self.batches = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def publish(self, batch):
        self.batches.put(batch)

    def run(self):
        while (batch := self.batches.get()) is not None:
            for sent in self.sent(batch):
                for listener in self.listeners:
                    listener.append(self.copied(sent))
            batch = sent = None

    def sent(self, batch):
        return [batch]

    def copied(self, batch):
        return msgspec.structs.replace(batch, events=list(batch.events))

    def close(self):
        self.batches.put(None)
        self.thread.join()


class WithoutContract(Queued, contract=None):
    """States no contract of its own."""


class StoredOnly(Queued):
    def publish(self, batch):
        self.last = [event.token_ids for event in batch.events]


class NeedsParent(Queued):
    def publish(self, batch):
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.last = event.parent_hash.hex()


class Drops(Queued):
    def sent(self, batch):
        return [] if batch.timestamp % 50 == 20 else [batch]


class Repeats(Queued):
    def sent(self, batch):
        return [batch, batch] if batch.timestamp % 50 == 49 else [batch]


class Reorders(Queued):
    held = None

    def sent(self, batch):
        if batch.timestamp % 50 == 48:
            self.held = batch
            return []
        held, self.held = self.held, None
        return [batch] if held is None else [batch, held]


class Truncates(Queued):
    def copied(self, batch):
        return msgspec.structs.replace(batch, events=batch.events[:1])


class SendsNothing(Queued):
    def sent(self, batch):
        return []


class Sorts(Queued):
    def publish(self, batch):
        batch.events.sort(key=lambda event: event.group)
        super().publish(batch)


class Keeps(Queued):
    def __init__(self, context):
        super().__init__(context)
        self.all = []

    def publish(self, batch):
        self.all.append(batch)


class LeavesTheThread(Queued):
    def close(self):
        pass


class LeavesTheSocket(Queued):
    opened = []

    def __init__(self, context):
        super().__init__(context)
        self.opened.append(socket.create_server(("127.0.0.1", 0)))


class ClosesOnce(Queued):
    def close(self):
        super().close()
        del self.thread


class HoldsTheOptions(Queued):
    """Its name is taken until the process ends."""

    taken = 0

    def __init__(self, context):
        if type(self).taken > 1:
            raise OSError("Address already in use")
        type(self).taken += 1
        super().__init__(context)


class Sleeps(Queued):
    def publish(self, batch):
        spend(0.04)
