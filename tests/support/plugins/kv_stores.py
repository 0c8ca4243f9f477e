"""KV stores that keep blocks in files, or fail in every way that a test asks for."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from hardpoint import plugins
from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.plugins import KVStore
from support.samples import Sample


class FolderStore(Sample, KVStore, contract=1):
    """Keeps each block in a file of its own, so that it outlives its engine."""

    class Options(plugins.Options):
        """`path` is a folder; None is a temporary one."""

        path: str | None = None

    options: Options

    def __init__(self, context: plugins.KVStoreContext) -> None:
        """Make the folder."""
        super().__init__(context)
        self._temporary = None
        if self.options.path is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="hardpoint-tests-")
        self._folder = Path(self.options.path or self._temporary.name)
        self._folder.mkdir(parents=True, exist_ok=True)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which files are there."""
        return [self._path(key).exists() for key in keys]

    def store(self, key: bytes, buffer: Sequence[memoryview]) -> bool:
        """Write a file, whole or not at all."""
        unfinished = self._folder / f"{key.hex()}.{os.getpid()}.{threading.get_ident()}"
        unfinished.write_bytes(b"".join(buffer))
        unfinished.rename(self._path(key))
        return True

    def load(self, key: bytes, buffer: Sequence[memoryview]) -> bool:
        """Read a file."""
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return False
        start = 0
        for part in buffer:
            part[:] = data[start : start + len(part)]
            start += len(part)
        return True

    def close(self) -> None:
        """Remove a temporary folder."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()


class HostileStore(FolderStore):
    """A share of its calls goes wrong, in the ways that its options name."""

    class Options(plugins.Options):
        """The share, and of `fail`, `forget`, `invent`, `damage`, `foreign`, `slow` and `nonsense`.

        Attributes:
            path: path of a folder; None is a temporary one.
            ways: one of them is taken at random.
            share: share of the calls.
            slow_seconds: duration of a slow call.
        """

        ways: list[str]
        path: str | None = None
        share: float = 0.05
        slow_seconds: float = 0.02

    options: Options

    def __init__(self, context: plugins.KVStoreContext) -> None:
        """Begin."""
        super().__init__(context)
        self._random = random.Random(context.rank + 1)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are there, or not."""
        way = self._way()
        if way == "nonsense":
            return [True]
        present = super().lookup(keys)
        if way == "forget":
            return [False] * len(keys)
        return [True] * len(keys) if way == "invent" else present

    def store(self, key: bytes, buffer: Sequence[memoryview]) -> bool | Future[bool]:
        """Keep a block, or not."""
        way = self._way()
        if way == "forget":
            return True
        if way == "nonsense":
            return Future()  # it is never completed
        return super().store(key, buffer)

    def load(self, key: bytes, buffer: Sequence[memoryview]) -> bool | Future[bool]:
        """Load a block, or another one."""
        way = self._way()
        if way == "foreign":
            others = [path.name for path in self._folder.iterdir() if len(path.name) == 64]
            key = bytes.fromhex(self._random.choice(others)) if others else key
        if way == "forget":
            return False
        if way == "nonsense":
            return Future()
        is_there = super().load(key, buffer)
        if way == "invent":
            return True
        if way == "damage":
            part = self._random.choice(buffer)
            part[self._random.randrange(len(part) // 2)] ^= 1 << self._random.randrange(8)
        return is_there

    def _way(self) -> str | None:
        if self._random.random() >= self.options.share:
            return None
        way = self._random.choice(self.options.ways)
        if way == "fail":
            raise OSError("the store fails, as it was asked to")
        if way == "slow":
            time.sleep(self.options.slow_seconds)
        return way


class OtherAttention(TorchAttention):
    """Says that its blocks are not laid out as others are."""

    contract = 1
    kv_layout = "of its own"
