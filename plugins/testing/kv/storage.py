"""Storage with faults: a KV store with scripted failures, and folders with changing files."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hardpoint import plugins
from hardpoint.plugins import KVStore
from hardpoint.testing.suite import Rule

RELIABLE = "reliable"
FAULTS = ("slow", "forgets", "lies", "damaged", "foreign", "cut", "raises", "dead")
"""Storage answers late, loses blocks, gives wrong answers, returns damaged blocks, blocks of other
keys or parts of them, raises in each call, or does not answer."""

WRITES = Rule("release: nothing is written after close", "join the threads that write in close()")

_SLOW_SECONDS = 0.03
_DEAD_SECONDS = 1.0


@dataclass
class Storage:
    """The contents of an `UnreliableStore`, and its fault.

    Attributes:
        fault: one of FAULTS, or RELIABLE.
    """

    fault: str = RELIABLE
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    source: random.Random = field(default_factory=lambda: random.Random(0))
    changed: threading.Event = field(default_factory=threading.Event)

    def become(self, fault: str) -> None:
        """Do something else from now on; calls that were not answered go on."""
        changed, self.changed = self.changed, threading.Event()
        self.fault = fault
        changed.set()


_STORAGES: dict[str, Storage] = {}


def storage_at(place: str) -> Storage:
    """Return the storage of a place, of this process."""
    return _STORAGES.setdefault(place, Storage())


def forget_storage(place: str) -> None:
    """Drop the contents of a place."""
    if (storage := _STORAGES.pop(place, None)) is not None:
        storage.become(RELIABLE)


class UnreliableStore(KVStore):
    """Keeps blocks in the memory of this process, and fails as its `Storage` asks."""

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            place: equal places have the same blocks.
        """

        place: str

    options: Options

    def __init__(self, context: plugins.KVStoreContext) -> None:
        super().__init__(context)
        self._storage = storage_at(self.options.place)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return the lookup result, modified by the fault."""
        storage = self._storage
        self._fail(storage)
        if storage.fault == "lies":
            return [True] * storage.source.choice((len(keys), len(keys) + 1, 1))
        return [key in storage.blocks for key in keys]

    def store(self, key: bytes, buffer: Sequence[memoryview]) -> bool:
        """Keep a block."""
        storage = self._storage
        self._fail(storage)
        if storage.fault != "lies":
            storage.blocks[key] = b"".join(buffer)
        return True

    def load(self, key: bytes, buffer: Sequence[memoryview]) -> bool:
        """Load a block, modified by the fault."""
        storage = self._storage
        self._fail(storage)
        if storage.fault == "lies":
            return True
        if storage.fault == "foreign" and storage.blocks:
            key = storage.source.choice(list(storage.blocks))
        if (block := storage.blocks.get(key)) is None:
            return False
        if storage.fault in ("damaged", "cut"):
            block = _damaged(block, storage)
        start = 0
        for part in buffer:
            piece = block[start : start + len(part)]
            part[: len(piece)] = piece
            start += len(part)
        return True

    def _fail(self, storage: Storage) -> None:
        if storage.fault == "raises":
            raise OSError("the storage cannot be reached")
        if storage.fault == "slow":
            storage.changed.wait(_SLOW_SECONDS)
        elif storage.fault == "dead":
            storage.changed.wait(_DEAD_SECONDS)
        elif storage.fault == "forgets" and storage.blocks:
            with suppress(KeyError, RuntimeError):  # other threads do the same
                del storage.blocks[storage.source.choice(list(storage.blocks))]


def _damaged(block: bytes, storage: Storage) -> bytes:
    place = storage.source.randrange(len(block))
    if storage.fault == "cut":
        return block[:place]
    return block[:place] + bytes([block[place] ^ 1]) + block[place + 1 :]


@contextmanager
def temporary_folder(prefix: str | None = None) -> Iterator[Path]:
    """Make a folder for the body, and delete it.

    Raises:
        Violation: it cannot be deleted, since something writes to it.
    """
    folder = tempfile.TemporaryDirectory(prefix=prefix)
    try:
        yield Path(folder.name)
    except BaseException:
        with suppress(OSError):
            folder.cleanup()
        raise
    try:
        folder.cleanup()
    except OSError as cause:
        with suppress(OSError):
            folder.cleanup()
        raise WRITES.violation(
            f"something wrote to the test's folder after close, when it was deleted: {cause}"
        ) from cause


def damage_files(folder: Path, fault: str, source: random.Random) -> None:
    """Change the files below a folder as a fault does; slow and dead storage changes none.

    Others may rename and delete files at the same time.
    """
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and fault == RELIABLE:
            with suppress(OSError):  # it is not empty, so not of an earlier fault
                path.rmdir()
    contents: dict[Path, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with suppress(FileNotFoundError):
                contents[path] = path.read_bytes()
    others = list(contents.values())
    for index, (path, content) in enumerate(contents.items()):
        with suppress(FileNotFoundError, FileExistsError):
            _damage_file(path, content, others[index - 1], fault, source)


def _damage_file(
    path: Path, content: bytes, other: bytes, fault: str, source: random.Random
) -> None:
    place = source.randrange(len(content)) if content else 0
    if fault in ("forgets", "raises"):
        path.unlink()
    if fault == "raises":
        path.mkdir()
    changed = {
        "lies": content + b"more",
        "damaged": content[:place] + bytes([source.randrange(256)]) + content[place + 1 :],
        "foreign": other,
        "cut": content[:place],
    }
    if fault in changed:
        path.write_bytes(changed[fault])
