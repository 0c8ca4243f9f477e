"""A KV store in use: calls with buffers that are watched, and answers that are checked."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from hardpoint.plugins import KVStore
from hardpoint.testing.suite import Rule, Violation, short_repr

CALLS = Rule(
    "calls: every call returns, and raises only what its storage fails with",
    "answer False for what is not there and for what there is no room",
)
RESULTS = Rule(
    "results: lookup returns a bool per key, store and load a bool or a Future of one",
    "return a list of True and False from lookup, and True or False from store and load",
)
CONTENT = Rule(
    "content: load returns True only with a whole block that was stored under this key",
    "keep all parts under the whole key, check the size, and let readers see a block only when "
    "it is complete",
)
KEPT = Rule(
    "kept: a block that store says is kept can be loaded, while there is room",
    "return True only when load finds the block from now on, and drop others before it",
)
LOOKUP = Rule(
    "lookup: it says of each key up to the first that is not there whether load finds it",
    "look in the same index as load does",
)
BORROWED = Rule(
    "borrowed: a buffer is the store's only until the call returns or its future is done",
    "copy what store gets, be done with writing when load returns, and use only the parts given",
)

_GUARD = b"\xa5" * 16
_SCRIBBLE = b"\x5a"
_MOST_BUFFERS = 200  # of loads that are watched


@lru_cache(256)
def block_bytes(index: int, version: int, size: int) -> bytes:
    """Return the bytes of a block: a version of what is stored under a key."""
    return hashlib.shake_128(f"{index} {version}".encode()).digest(size)


def make_keys(count: int) -> list[bytes]:
    """Return keys that no other call returns; in hexadecimal they are all alike but for the end."""
    return [_salt() + bytes(20) + index.to_bytes(4, "big") for index in range(count)]


def unusual_keys() -> list[bytes]:
    """Return keys of bytes with which names of files, text and numbers go wrong."""
    salt = _salt()
    patterns = [b"\0", b"\xff", b"/", b"\\", b"\n", b" ", b"a", b"A", b"%", b"*", b"../"]
    keys = [salt + (pattern * 24)[:24] for pattern in patterns]
    keys += [(pattern * 24)[:24] + salt for pattern in patterns]
    return [*keys, salt + "é".encode() * 12, salt + "e\u0301".encode() * 8, salt + b"\xc3\x28" * 12]


def _salt() -> bytes:
    return secrets.token_hex(4).encode()


class WatchedBuffer:
    """A buffer in one piece of memory, with bytes around its parts that nobody may change."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Allocate parts of these sizes."""
        self._memory = bytearray(_GUARD)
        self._places = []
        for size in sizes:
            self._places.append(slice(len(self._memory), len(self._memory) + size))
            self._memory += _SCRIBBLE * size + _GUARD
        self.size = sum(sizes)

    def views(self) -> list[memoryview]:
        """Return the parts."""
        return [memoryview(self._memory)[place] for place in self._places]

    def fill(self, data: bytes) -> None:
        """Write bytes into the parts."""
        start = 0
        for view in self.views():
            view[:] = data[start : start + len(view)]
            start += len(view)

    def scribble(self) -> None:
        """Overwrite the parts, as the next user of the memory does."""
        self.fill(_SCRIBBLE * self.size)

    def data(self) -> bytes:
        """Return the bytes of all parts."""
        return b"".join(self._memory[place] for place in self._places)

    def is_scribbled(self) -> bool:
        """Return whether the parts are as `scribble` left them."""
        return self.data() == _SCRIBBLE * self.size

    def has_guards(self) -> bool:
        """Return whether the bytes around the parts are unchanged."""
        ends = [0, *(place.stop for place in self._places)]
        return all(self._memory[end : end + len(_GUARD)] == _GUARD for end in ends)


class StoredBlocks:
    """What was stored in a place, by the number of the key; used by several threads.

    Attributes:
        keys: by their number.
        kept: numbers of the blocks that have to be there.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Begin with an empty place."""
        self.keys = keys
        self.kept: set[int] = set()
        self._refused: set[int] = set()
        self._versions: dict[int, set[int]] = {index: set() for index in range(len(keys))}

    def begin(self, index: int, version: int) -> None:
        """Record that a block may be there from now on."""
        self._versions[index].add(version)

    def end(self, index: int, *, is_kept: bool) -> None:
        """Record what `store` said."""
        if is_kept and index not in self._refused:
            self.kept.add(index)
        elif not is_kept:  # the one before may be gone, too
            self._refused.add(index)
            self.kept.discard(index)

    def versions(self, index: int) -> list[int]:
        """Return the versions of a block, any of which may be there."""
        return sorted(self._versions[index].copy())

    def forget(self) -> None:
        """Record that everything may be gone."""
        self.kept.clear()


class StoreSession:
    """Calls a store, and checks what it answers; used by several threads."""

    def __init__(
        self, store: KVStore, sizes: Sequence[int], blocks: StoredBlocks, seconds: float
    ) -> None:
        """Use a store.

        Args:
            store: an open one.
            sizes: of the parts of its buffers.
            blocks: what was stored where it keeps its blocks.
            seconds: after which a future has to be done.
        """
        self._store = store
        self._sizes = tuple(sizes)
        self._blocks = blocks
        self._seconds = seconds
        self._loaded: list[WatchedBuffer] = []
        self._calls: dict[int, str] = {}  # that have not returned, by thread

    @property
    def calls(self) -> list[str]:
        """Calls that have not returned."""
        return list(self._calls.copy().values())

    def store(self, index: int, version: int = 0) -> bool:
        """Store a version of a block; return whether it is kept."""
        buffer = WatchedBuffer(self._sizes)
        given = block_bytes(index, version, buffer.size)
        buffer.fill(given)
        self._blocks.begin(index, version)
        views = [view.toreadonly() for view in buffer.views()]
        key = self._blocks.keys[index]
        with self._calling(what := f"store of key {index}"):
            is_kept = self._answer(self._store.store(key, views), what)
        if buffer.data() != given or not buffer.has_guards():
            raise BORROWED.violation(f"{what} changed the buffer that it was to keep")
        buffer.scribble()
        self._blocks.end(index, is_kept=is_kept)
        return is_kept

    def load(self, index: int) -> bool:
        """Load a block; return whether it was there."""
        buffer = WatchedBuffer(self._sizes)
        key = self._blocks.keys[index]
        with self._calling(what := f"load of key {index}"):
            is_there = self._answer(self._store.load(key, buffer.views()), what)
        if not buffer.has_guards():
            raise BORROWED.violation(f"{what} wrote outside of the parts of its buffer")
        if is_there:
            self._check_content(index, buffer)
        buffer.scribble()
        if len(self._loaded) < _MOST_BUFFERS:
            self._loaded.append(buffer)
        return is_there

    def check_kept(self, index: int, why: str = "") -> bool:
        """Load a block, which must be there if it is kept; return whether it was."""
        is_there = self.load(index)
        if not is_there and index in self._blocks.kept:
            raise KEPT.violation(
                f"store said that the block of key {index} is kept, and load does not find it{why}"
            )
        return is_there

    def lookup(self, indexes: Sequence[int]) -> list[bool]:
        """Look up keys."""
        keys = [self._blocks.keys[index] for index in indexes]
        with self._calling(f"lookup of {len(keys)} keys"):
            found: Any = self._store.lookup(keys)
        if not isinstance(found, Sequence) or len(found) != len(keys):
            raise RESULTS.violation(f"lookup of {len(keys)} keys returned {short_repr(found)}")
        if wrong := [one for one in found if not isinstance(one, bool)]:
            raise RESULTS.violation(f"lookup returned {short_repr(wrong[0])} for a key")
        for index, one in zip(indexes, found, strict=True):
            if one and not self._blocks.versions(index):
                raise LOOKUP.violation(f"it found key {index}, under which nothing was stored")
        return list(found)

    def check_lookup(self, indexes: Sequence[int]) -> None:
        """Look up keys, and load those that are there, and the first that is not.

        Raises:
            Violation: lookup is wrong; nobody else uses the store.
        """
        found = self.lookup(indexes)
        first_miss = found.index(False) if False in found else len(found)
        for place, (index, said) in enumerate(zip(indexes, found, strict=True)):
            if place > first_miss and not said:
                continue
            is_there = self.check_kept(index)
            if is_there != said:
                words = ("does not find", "finds")
                raise LOOKUP.violation(
                    f"lookup of the keys {list(indexes)} returned {found}, and load "
                    f"{words[is_there]} key {index}"
                )

    def drain(self) -> None:
        """Drain the store."""
        with self._calling("drain()"):
            self._store.drain()

    def close(self) -> None:
        """Close the store, and look whether it wrote to buffers after its time."""
        with self._calling("close()"):
            self._store.close()
        self.check_late_writes()

    def check_late_writes(self) -> None:
        """Check that the buffers of all loads are as the store left them.

        Raises:
            Violation: one is not.
        """
        for buffer in self._loaded:
            if not buffer.is_scribbled() or not buffer.has_guards():
                raise BORROWED.violation("a buffer was written after load had returned")

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Note the running call; make a violation of what it raises."""
        thread = threading.get_ident()
        self._calls[thread] = what
        try:
            yield
        except Violation:
            raise
        except Exception as cause:
            is_write = isinstance(cause, TypeError) and "read-only" in str(cause)
            rule = BORROWED if is_write else CALLS
            raise rule.violation(f"{what} raised {type(cause).__name__}: {cause}") from cause
        finally:
            del self._calls[thread]

    def _answer(self, result: Any, what: str) -> bool:
        """Return the answer of a call, waiting for its future."""
        answer = result
        if isinstance(result, Future):
            try:
                answer = result.result(self._seconds)
            except FutureTimeoutError:
                if result.done():
                    raise
                raise RESULTS.violation(
                    f"the future of {what} was not done after {self._seconds:g} s",
                    "set its result in every case",
                ) from None
        if not isinstance(answer, bool):
            raise RESULTS.violation(f"{what} returned {short_repr(result)}")
        return answer

    def _check_content(self, index: int, buffer: WatchedBuffer) -> None:
        data, what = buffer.data(), f"load of key {index}"
        versions = self._blocks.versions(index)
        if any(data == block_bytes(index, version, buffer.size) for version in versions):
            return
        if buffer.is_scribbled():
            raise CONTENT.violation(f"{what} returned True, and wrote nothing")
        for other in range(len(self._blocks.keys)):
            for version in self._blocks.versions(other):
                if data == block_bytes(other, version, buffer.size):
                    raise CONTENT.violation(f"{what} gave the block of key {other}")
        if not versions:
            raise CONTENT.violation(f"{what} returned True, and nothing was stored under it")
        raise CONTENT.violation(f"{what} gave {self._describe_parts(index, data, versions)}")

    def _describe_parts(self, index: int, data: bytes, versions: Sequence[int]) -> str:
        """Say from where the parts of a wrong block may be."""
        said, start = [], 0
        for number, size in enumerate(self._sizes):
            part = slice(start, start + size)
            start += size
            stored = (block_bytes(index, version, sum(self._sizes)) for version in versions)
            of = [v for v, block in zip(versions, stored, strict=True) if block[part] == data[part]]
            which = f"part {number} of {size} bytes"
            said.append(f"{which} of the block stored as {of[0]}" if of else f"a wrong {which}")
        return ", ".join(said)


def run_at_once(
    programs: Sequence[Callable[[], object]], seconds: float, calls: Callable[[], Sequence[str]]
) -> None:
    """Run programs in a thread each; raise what the first one raised.

    Args:
        programs: at least one.
        seconds: in which all have to end.
        calls: returns the calls that have not returned.

    Raises:
        Violation: a program did not end.
    """
    raised: list[BaseException] = []

    def run(program: Callable[[], object]) -> None:
        try:
            program()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(p,), daemon=True) for p in programs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    if raised:
        raise raised[0]
    if any(thread.is_alive() for thread in threads):
        waiting = ", ".join(calls()) or "a call"
        raise CALLS.violation(f"not returned after {seconds:g} s: {waiting}", "end every wait")
