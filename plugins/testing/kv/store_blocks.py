"""Blocks as the suite gives them to a KV store: keys, bytes, buffers that are watched."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from functools import lru_cache

from hardpoint.plugins.kv_store import BlockBuffer

_GUARD = b"\xa5" * 16
_SCRIBBLE = b"\x5a"


@lru_cache(256)
def block_bytes(index: int, version: int, size: int) -> bytes:
    """Return the bytes of a version of a block."""
    return hashlib.shake_128(f"{index} {version}".encode()).digest(size)


def make_keys(count: int) -> list[bytes]:
    """Return keys that no other call returns, and that differ in their last bytes only."""
    salt = _salt()
    return [salt + bytes(20) + index.to_bytes(4, "big") for index in range(count)]


def unusual_keys() -> list[bytes]:
    """Return keys with which names of files, text and numbers go wrong, two alike in a row."""
    salt = _salt()
    alike = [
        (b"\0", b"\1"),
        (b"\xff", b"\xfe"),
        (b"a", b"A"),
        (b"/", b"\\"),
        (b"\n", b" "),
        (b"*", b"?"),
        (b"../", b"./."),
        ("é".encode(), b"e\xcc\x81"),
    ]
    keys = []
    for pair in alike:
        keys += [salt + (pattern * 24)[:24] for pattern in pair]
        keys += [(pattern * 24)[:24] + salt for pattern in pair]
    return keys


def _salt() -> bytes:
    return secrets.token_hex(4).encode()


class WatchedBuffer:
    """A buffer in a piece of memory with bytes around it that no store may change.

    Attributes:
        block: the buffer.
        size: its bytes.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.size = sum(sizes)
        self._memory = bytearray(_GUARD + _SCRIBBLE * self.size + _GUARD)
        whole = memoryview(self._memory)[len(_GUARD) : len(_GUARD) + self.size]
        self.block = BlockBuffer(whole, sizes)

    def fill(self, data: bytes) -> None:
        """Write bytes into the buffer."""
        self.block.whole[:] = data

    def scribble(self) -> None:
        """Overwrite the buffer, as the next user of the memory does."""
        self.fill(_SCRIBBLE * self.size)

    def data(self) -> bytes:
        """Return the bytes of all parts."""
        return bytes(self.block.whole)

    def is_scribbled(self) -> bool:
        """Return whether the buffer is as `scribble` left it."""
        return self.data() == _SCRIBBLE * self.size

    def has_guards(self) -> bool:
        """Return whether the bytes around the buffer are unchanged."""
        return self._memory.startswith(_GUARD) and self._memory.endswith(_GUARD)


class StoredBlocks:
    """The blocks that were stored in a place, by the number of the key; used by several threads.

    Attributes:
        keys: by their number.
        kept: numbers of the blocks that have to be there.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.kept: set[int] = set()
        self._refused: set[int] = set()
        self._versions: dict[int, set[int]] = {index: set() for index in range(len(keys))}

    def begin(self, index: int, version: int) -> None:
        """Record that a block may be there from now on."""
        self._versions[index].add(version)

    def end(self, index: int, *, is_kept: bool) -> None:
        """Record the result of `store`."""
        if is_kept and index not in self._refused:
            self.kept.add(index)
        elif not is_kept:  # the one before may be gone, too
            self._refused.add(index)
            self.kept.discard(index)

    def versions(self, index: int) -> list[int]:
        """Return the possible versions of a stored block."""
        return sorted(self._versions[index].copy())

    def forget(self) -> None:
        """Record that everything may be gone."""
        self.kept.clear()
