"""A KV store in use: calls with buffers that are watched, and answers that are checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import Any

from hardpoint.plugins import KVStore
from hardpoint.plugins.kv_store import BlockBuffer
from hardpoint.testing.suite import Rule, Violation, short_repr

from .store_blocks import StoredBlocks, WatchedBuffer, block_bytes

CALLS = Rule(
    "calls: every call returns, and raises only errors of its storage",
    "return False for a missing block, and for a block without space",
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
    "kept: a block that store reported as kept can be loaded, while there is room",
    "return True only when load finds the block from now on, and drop others before it",
)
LOOKUP = Rule(
    "lookup: for each key up to the first missing one, it reports whether load finds it",
    "look in the same index as load does",
)
BORROWED = Rule(
    "borrowed: a buffer is the store's only until the call returns or its future is done",
    "copy the buffer in store, write nothing after load returns, and use only the given memory",
)

_MOST_BUFFERS = 200  # of loads that are watched


class StoreSession:
    """Calls a store and checks its results; used by several threads."""

    def __init__(
        self, store: KVStore, sizes: Sequence[int], blocks: StoredBlocks, seconds: float
    ) -> None:
        """Use a store.

        Args:
            store: an open one.
            sizes: sizes of the parts of its buffers.
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
        self._blocks.begin(index, version)
        is_kept = self._send("store", self._store.store, index, version)
        self._blocks.end(index, is_kept=is_kept)
        return is_kept

    def load(self, index: int) -> bool:
        """Load a block; return whether it was there."""
        return self._receive("load", self._store.load, index, self._blocks)

    def version_of(self, index: int) -> int | None:
        """Load a block; return the version that was there, or None."""
        data = self._received("load", self._store.load, index, self._blocks)
        if data is None:
            return None
        versions = self._blocks.versions(index)
        return next(v for v in versions if data == block_bytes(index, v, len(data)))

    def _send(
        self, method: str, call: Callable[[bytes, BlockBuffer], Any], index: int, version: int
    ) -> bool:
        buffer = WatchedBuffer(self._sizes)
        data = block_bytes(index, version, buffer.size)
        buffer.fill(data)
        key, block = self._blocks.keys[index], buffer.block.read_only()
        with self.calling(call_name := f"{method} of key {index}"):
            is_kept = self._answer(call(key, block), call_name)
        if buffer.data() != data or not buffer.has_guards():
            raise BORROWED.violation(f"{call_name} changed the buffer that it was to keep")
        buffer.scribble()
        return is_kept

    def _receive(
        self,
        method: str,
        call: Callable[[bytes, BlockBuffer], Any],
        index: int,
        blocks: StoredBlocks,
    ) -> bool:
        """Get a block, which is one of `blocks`, from the store; return whether it was there."""
        return self._received(method, call, index, blocks) is not None

    def _received(
        self,
        method: str,
        call: Callable[[bytes, BlockBuffer], Any],
        index: int,
        blocks: StoredBlocks,
    ) -> bytes | None:
        """Get a block as `_receive` does; return its bytes if it was there."""
        buffer = WatchedBuffer(self._sizes)
        with self.calling(call_name := f"{method} of key {index}"):
            is_there = self._answer(call(self._blocks.keys[index], buffer.block), call_name)
        if not buffer.has_guards():
            raise BORROWED.violation(f"{call_name} wrote outside of its buffer")
        if is_there:
            self._check_content(call_name, index, buffer, blocks)
        data = buffer.data() if is_there else None
        buffer.scribble()
        if len(self._loaded) < _MOST_BUFFERS:
            self._loaded.append(buffer)
        return data

    def check_kept(self, index: int, why: str = "") -> bool:
        """Load a block, which must be there if it is kept; return whether it was."""
        is_there = self.load(index)
        if not is_there and index in self._blocks.kept:
            raise KEPT.violation(
                f"store reported the block of key {index} as kept, and load does not find it{why}"
            )
        return is_there

    def lookup(self, indexes: Sequence[int]) -> list[bool]:
        """Look up keys."""
        keys = [self._blocks.keys[index] for index in indexes]
        with self.calling(f"lookup of {len(keys)} keys"):
            reported: Any = self._store.lookup(keys)
        if not isinstance(reported, Sequence) or len(reported) != len(keys):
            raise RESULTS.violation(f"lookup of {len(keys)} keys returned {short_repr(reported)}")
        if wrong := [item for item in reported if not isinstance(item, bool)]:
            raise RESULTS.violation(f"lookup returned {short_repr(wrong[0])} for a key")
        for index, is_found in zip(indexes, reported, strict=True):
            if is_found and not self._blocks.versions(index):
                raise LOOKUP.violation(f"it found key {index}, under which nothing was stored")
        return list(reported)

    def check_lookup(self, indexes: Sequence[int]) -> None:
        """Look up keys, load the present ones and the first missing one, and compare.

        Raises:
            Violation: lookup is wrong; no other caller may use the store.
        """
        results = self.lookup(indexes)
        first_miss = results.index(False) if False in results else len(results)
        for place, (index, reported) in enumerate(zip(indexes, results, strict=True)):
            if place > first_miss and not reported:
                continue
            is_there = self.check_kept(index)
            if is_there != reported:
                verb = "finds" if is_there else "does not find"
                raise LOOKUP.violation(
                    f"lookup of the keys {list(indexes)} returned {results}, and load "
                    f"{verb} key {index}"
                )

    def drain(self) -> None:
        """Drain the store."""
        with self.calling("drain()"):
            self._store.drain()

    def close(self) -> None:
        """Close the store, and look whether it wrote to buffers after its time."""
        with self.calling("close()"):
            self._store.close()
        self.check_late_writes()

    def check_late_writes(self) -> None:
        """Check that the buffers of all loads are as the store left them.

        Raises:
            Violation: one is not.
        """
        for buffer in self._loaded:
            if not buffer.is_scribbled() or not buffer.has_guards():
                raise BORROWED.violation("a buffer was written after the call had returned")

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Record the running call; convert its exceptions to violations."""
        thread = threading.get_ident()
        self._calls[thread] = call
        try:
            yield
        except Violation:
            raise
        except Exception as cause:
            is_write = isinstance(cause, TypeError) and "read-only" in str(cause)
            rule = BORROWED if is_write else CALLS
            raise rule.violation(f"{call} raised {type(cause).__name__}: {cause}") from cause
        finally:
            del self._calls[thread]

    def _answer(self, result: Any, call: str) -> bool:
        answer = result
        if isinstance(result, Future):
            try:
                answer = result.result(self._seconds)
            except FutureTimeoutError:
                if result.done():
                    raise
                raise RESULTS.violation(
                    f"the future of {call} was not done after {self._seconds:g} s",
                    "set its result in every case",
                ) from None
        if not isinstance(answer, bool):
            raise RESULTS.violation(f"{call} returned {short_repr(result)}")
        return answer

    def _check_content(
        self, call: str, index: int, buffer: WatchedBuffer, blocks: StoredBlocks
    ) -> None:
        data, versions = buffer.data(), blocks.versions(index)
        if any(data == block_bytes(index, version, buffer.size) for version in versions):
            return
        if buffer.is_scribbled():
            raise CONTENT.violation(f"{call} returned True, and wrote nothing")
        for other in range(len(blocks.keys)):
            for version in blocks.versions(other):
                if data == block_bytes(other, version, buffer.size):
                    raise CONTENT.violation(f"{call} gave the block of key {other}")
        if not versions:
            raise CONTENT.violation(f"{call} returned True, and nothing was stored under it")
        raise CONTENT.violation(f"{call} gave {self._describe_parts(index, data, versions)}")

    def _describe_parts(self, index: int, data: bytes, versions: Sequence[int]) -> str:
        parts, start = [], 0
        for number, size in enumerate(self._sizes):
            part = slice(start, start + size)
            start += size
            stored = (block_bytes(index, version, sum(self._sizes)) for version in versions)
            of = [v for v, block in zip(versions, stored, strict=True) if block[part] == data[part]]
            which = f"part {number} of {size} bytes"
            parts.append(f"{which} of the block stored as {of[0]}" if of else f"a wrong {which}")
        return ", ".join(parts)
