"""A store of a few blocks, which drops the oldest ones and reports it."""

from __future__ import annotations

import threading

from hardpoint import plugins
from hardpoint.plugins import KVStore


class SmallStore(KVStore):
    """Keeps the newest blocks."""

    contract = 1

    class Options(plugins.Options):
        """How many."""

        blocks: int = 4

    def __init__(self, context):
        super().__init__(context)
        self._kept = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self):
        return sum(map(len, self._kept.copy().values()))

    def lookup(self, keys):
        return [key in self._kept for key in keys]

    def store(self, key, buffer):
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = b"".join(buffer)
            if len(self._kept) > self.options.blocks:
                oldest = next(iter(self._kept))
                del self._kept[oldest]
                self.context.report_evicted([oldest])
        return True

    def load(self, key, buffer):
        block = self._kept.get(key)
        if block is None:
            return False
        start = 0
        for part in buffer:
            part[:] = block[start : start + len(part)]
            start += len(part)
        return True
