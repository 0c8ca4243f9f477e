"""KV stores with one mistake each."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from hardpoint.plugins import KVStore, Options
from support.samples import Sample, leave_thread, spend

_places = {}


class Right(Sample, KVStore, contract=1):
    """Makes no mistake; keeps complete blocks, the newest ones."""

    class Options(Options):
        size_bytes: int = 1 << 20

    def __init__(self, context):
        super().__init__(context)
        self.blocks = OrderedDict()
        self.lock = threading.RLock()
        self.most = self.options.size_bytes // context.block_bytes

    def lookup(self, keys):
        return [self.name_of(key) in self.blocks for key in keys]

    def store(self, key, buffer):
        with self.lock:
            self.blocks[self.name_of(key)] = self.taken(buffer)
            self.blocks.move_to_end(self.name_of(key))
            return self.drop_some(key)

    def load(self, key, buffer):
        with self.lock:
            block = self.blocks.get(self.name_of(key))
            if block is None or sum(map(len, block)) != self.context.block_bytes:
                return False
            self.give(block, buffer)
            return True

    def name_of(self, key):
        return key

    def taken(self, buffer):
        return [bytes(part) for part in buffer]

    def give(self, block, buffer):
        for part, data in zip(buffer, block, strict=True):
            part[:] = data

    def drop_some(self, key):
        while len(self.blocks) > self.most:
            self.blocks.popitem(last=False)
        return self.name_of(key) in self.blocks


class AnswersLater(Right):
    """Makes no mistake, either: its answers are futures, of a thread."""

    def __init__(self, context):
        super().__init__(context)
        self.pool = ThreadPoolExecutor(1)

    def store(self, key, buffer):
        return self.pool.submit(super().store, key, buffer)

    def load(self, key, buffer):
        return self.pool.submit(super().load, key, buffer)

    def close(self):
        self.pool.shutdown()


class InPlace(Right):
    """Makes no mistake: the blocks of a place are shared, and outlive the store."""

    class Options(Right.Options):
        path: str = ""

    def __init__(self, context):
        super().__init__(context)
        self.blocks = _places.setdefault(self.options.path, self.blocks)


class NoContract(Right, contract=None):
    pass


class KeepsFirst(Right):
    def store(self, key, buffer):
        with self.lock:
            if key in self.blocks:
                return True
            return super().store(key, buffer)


class NoAbsentKeys(Right):
    def lookup(self, keys):
        return [len(self.blocks[key]) > 0 for key in keys]


class FindsAll(Right):
    def lookup(self, keys):
        return [True] * len(keys)


class FindsNone(Right):
    def lookup(self, keys):
        return [False] * len(keys)


class StopsAtMiss(Right):
    def lookup(self, keys):
        present = super().lookup(keys)
        return present[: present.index(False)] if False in present else present


class AnswersNone(Right):
    def store(self, key, buffer):
        super().store(key, buffer)


class NeverDone(Right):
    def load(self, key, buffer):
        return Future() if key in self.blocks else False


class KeepsNothing(Right):
    def store(self, key, buffer):
        return False


class PromisesTooEarly(Right):
    def __init__(self, context):
        super().__init__(context)
        self.waiting = []

    def store(self, key, buffer):
        self.waiting.append((key, self.taken(buffer)))
        return True

    def drain(self):
        while self.waiting:
            key, block = self.waiting.pop(0)
            super().store(key, block)


class ForgetsOld(Right):
    def drop_some(self, key):
        self.most = min(self.most, 3)
        return super().drop_some(key)


class FirstPartOnly(Right):
    def give(self, block, buffer):
        super().give(block[:2], buffer[:2])


class WritesNothing(Right):
    def give(self, block, buffer):
        pass


class ShortKeys(Right):
    def name_of(self, key):
        return key[:24]


class TextKeys(Right):
    def name_of(self, key):
        return key.decode(errors="replace")


class FoldsCase(Right):
    def name_of(self, key):
        return key.lower()


class KeepsViews(Right):
    def taken(self, buffer):
        return list(buffer)


class WritesToStored(Right):
    def taken(self, buffer):
        block = super().taken(buffer)
        buffer[0][:8] = bytes(8)
        return block


class WritesOutside(Right):
    def give(self, block, buffer):
        super().give(block, buffer)
        memory = buffer[0].obj
        memory[len(memory) - 1] = 0


class KeepsLoads(Right):
    """Keeps each loaded block."""

    def __init__(self, context):
        super().__init__(context)
        self.loads = []

    def load(self, key, buffer):
        is_there = super().load(key, buffer)
        self.loads.append(bytes(buffer.whole))
        return is_there


class WritesLate(Right):
    """Writes the previous block again when it returns the next."""

    last = None

    def give(self, block, buffer):
        if self.last is not None:
            super().give(*self.last)
        super().give(block, buffer)
        self.last = block, buffer


class TornBlocks(Right):
    def taken(self, buffer):
        return [bytearray(part) for part in buffer]

    def store(self, key, buffer):
        block = self.blocks.setdefault(key, self.taken(buffer))
        for stored, part in zip(block, buffer, strict=True):
            stored[:] = part
            time.sleep(0.005)
        return True

    def load(self, key, buffer):
        block = self.blocks.get(key)
        if block is not None:
            self.give(block, buffer)
        return block is not None


class OneScratch(Right):
    def store(self, key, buffer):
        self.scratch = self.taken(buffer)
        time.sleep(0.005)
        self.blocks[key] = self.scratch
        return True


class LosesLock(Right):
    def __init__(self, context):
        super().__init__(context)
        self.lock = threading.Semaphore()

    def load(self, key, buffer):
        self.lock.acquire(timeout=5.0)
        if key not in self.blocks:
            return False
        self.lock.release()
        return super().load(key, buffer)


class OneRank(InPlace):
    def name_of(self, key):
        return key[-4:]  # the same in every rank


class AnySize(InPlace):
    def load(self, key, buffer):
        block = self.blocks.get(key)
        if block is not None:
            self.give(block, buffer)
        return block is not None

    def give(self, block, buffer):
        block = b"".join(block)
        for part in buffer:
            part[: len(block)] = block[: len(part)]
            block = block[len(part) :]


class NoLimit(Right):
    def drop_some(self, key):
        return True


class DropsNewest(Right):
    def drop_some(self, key):
        while len(self.blocks) > self.most:
            self.blocks.popitem()
        return True


class NotShared(Right):
    pass


class NotDurable(InPlace):
    def close(self):
        for key in list(self.blocks)[-1:]:
            del self.blocks[key]


class DrainWaits(Right):
    def drain(self):
        end = time.monotonic() + 5.0
        while not self.blocks and time.monotonic() < end:
            time.sleep(0.01)


class LeavesThread(Right):
    def __init__(self, context):
        super().__init__(context)
        leave_thread("leaf")


class LeavesFile(Right):
    files = []

    def store(self, key, buffer):
        self.files.append(tempfile.TemporaryFile())  # noqa: SIM115
        return super().store(key, buffer)


class ReadsToLookUp(Right):
    def lookup(self, keys):
        buffer = bytearray(self.context.block_bytes)
        return [self.read(key, memoryview(buffer)) for key in keys]

    def read(self, key, view):
        parts = []
        for size in self.context.sizes:
            parts.append(view[:size])
            view = view[size:]
        spend(0.0002)  # as a disk does
        return self.load(key, parts)


class ReportsFaults(Right):
    def store(self, key, buffer):
        if key in self.blocks:
            self.context.report_fault("the block is there already")
        return super().store(key, buffer)
