"""Blocks on a disk of this machine, shared by the engines that name one path."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from hardpoint import plugins
from hardpoint.builtin_plugins import checksums
from hardpoint.plugins import ConfigError, KVStore

from .disk_files import NO_ROOM, LockTimeoutError, RefusedError, file_system_bytes, open_folder
from .disk_slab import Slab, least_bytes

_OPEN_SECONDS = 30.0  # to wait for another process that opens a large store
_BUSY_SECONDS = 1.0
_RETRY_SECONDS = 30.0
_TOUCH_NS = 1_000_000_000


class DiskStore(KVStore):
    """Keeps the most recently used blocks in files, also after a restart.

    Engines and ranks with the same path on one machine share blocks. Each of them may be killed at
    any time.

    Attributes:
        slab: its files, once they are open.
    """

    slab: Slab

    contract = 1

    class Options(plugins.Options):
        """Folder and size.

        Attributes:
            path: folder on a disk of this machine, for this store alone, created if missing. Only
                this user may have access to it.
            size_bytes: maximum size of all files; the same in all engines and ranks that share
                the path. Blocks of each size have a file of their own. A file that grows replaces
                unused files; next to files in use, it may have an eighth of the size.
        """

        path: Annotated[str, Meta(min_length=1)]
        size_bytes: Annotated[int, Meta(ge=1)] = 10 << 30

    options: Options

    def __init__(self, context: plugins.KVStoreContext) -> None:
        """Open the files, or make them.

        Raises:
            ConfigError: it is not possible.
        """
        super().__init__(context)
        options, setting = self.options, f"plugin.{self.name}"
        if options.size_bytes < (least := least_bytes(context.block_bytes)):
            raise ConfigError(
                f"{setting}.size_bytes: {options.size_bytes} bytes have no room for a block of "
                f"this model, which needs {least}"
            )
        self._folder_path = path = Path(options.path).expanduser()
        self._files = contextlib.ExitStack()
        self._is_ready = False  # it is not while a full disk has no room for the index
        self._lock = threading.Lock()  # guards the fields below, and the slab's locks
        self._writing: set[int] = set()
        self._victims: list[tuple[int, int]] = []
        self._slots = 0  # that there were when they were chosen
        self._grow_at = self._store_at = 0.0
        self._reported: set[str] = set()
        self._calls = 0
        self._calls_lock = threading.Lock()
        self._closed = False
        try:
            if 0 < (limit := file_system_bytes(path)) < options.size_bytes:
                raise ConfigError(
                    f"{setting}.size_bytes: {options.size_bytes} bytes are more than the file "
                    f"system of {str(path)!r} has, which are {limit}"
                )
            self._open(_OPEN_SECONDS)
        except (RefusedError, OSError) as cause:
            if isinstance(cause, OSError) and cause.errno in NO_ROOM:
                self._pause(cause)
                return
            raise ConfigError(f"{setting}.path: {str(path)!r} cannot be used: {cause}") from cause

    def _open(self, seconds: float) -> None:
        """Open the files, or make them.

        Raises:
            RefusedError: they cannot be used, or others were opening them for so long.
            OSError: they cannot be read or made.
        """
        size_bytes = self.options.size_bytes
        with contextlib.ExitStack() as stack:
            folder = open_folder(self._folder_path)
            stack.callback(os.close, folder)
            slab = Slab(folder, self.context.block_bytes, size_bytes, seconds)
            stack.callback(slab.close)
            self._files = stack.pop_all()
        self.slab, self._index = slab, slab.index
        self._checked = np.zeros(slab.index.table, np.uint64)  # sequences of blocks, by slot
        self._is_ready = True
        if slab.capacity < slab.wanted:
            self.context.report_fault(
                f"plugin.{self.name}.size_bytes: there is room for {slab.capacity} blocks, and not "
                f"for {slab.wanted} as in {size_bytes} bytes: an engine with a smaller size_bytes "
                f"has opened the path first, or the disk is full; start again once that is over"
            )

    def _open_again(self) -> bool:
        with self._lock:
            if self._closed or self._is_ready:
                return not self._closed
            try:
                self._open(_BUSY_SECONDS)
            except (RefusedError, OSError) as cause:
                self._pause(cause)
                return False
        return True

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are there."""
        with self._call() as is_ready:
            is_there = is_ready and keys and not self._is_gone()
            return self._index.find_all(keys) if is_there else [False] * len(keys)

    def load(self, key: bytes, buffer: Sequence[memoryview]) -> bool:
        """Read a block, unless it is replaced in the meantime.

        Raises:
            OSError: it cannot be read; it is dropped, so that it is stored again.
        """
        with self._call() as is_ready:
            if not is_ready or self._is_gone() or (entry := self._index.find(key)) is None:
                return False
            slot, sequence = entry
            try:
                is_read = self.slab.read(slot, buffer)
                if self._is_gone():
                    return False
                is_whole = is_read and self._is_right(slot, sequence, buffer)
            except OSError:
                self._drop(slot, sequence, self._index.reserve)  # the place may be bad for ever
                raise
            if self._index.sequence(slot) != sequence:
                return False
            if not is_whole:
                self._drop(slot, sequence, self._index.free)
                self._report(
                    "damage", "a block was damaged, after a power failure perhaps; it is dropped"
                )
                return False
            # A lookup before it has put the request's blocks in a better order.
            if time.time_ns() - self._index.used_at(slot) > _TOUCH_NS:
                self._index.touch(slot)
            return True

    def _is_right(self, slot: int, sequence: int, buffer: Sequence[memoryview]) -> bool:
        """Return whether a block is equal to the stored one; it is checked once.

        A power failure leaves damaged blocks, and all engines have ended then.
        """
        if self._checked[slot] == sequence:
            return True
        is_right = checksums.checksum(buffer) == self._index.checksum(slot)
        if is_right:
            self._checked[slot] = sequence
        return is_right

    def store(self, key: bytes, buffer: Sequence[memoryview]) -> bool:
        """Write a block over the least recently used one.

        Nothing is written if the same bytes are there already.
        """
        if time.monotonic() < self._store_at:
            return False
        evicted: list[bytes] = []
        try:
            with self._call() as is_ready:
                is_ready = is_ready or self._open_again()
                return is_ready and not self._is_gone() and self._write(key, buffer, evicted)
        finally:
            if evicted:
                self.context.report_evicted(evicted)

    def _write(self, key: bytes, buffer: Sequence[memoryview], evicted: list[bytes]) -> bool:
        """Write a block; return whether it is there. Keys of dropped blocks are appended."""
        checksum = checksums.checksum(buffer)
        slot = self._reserve(key, checksum, evicted)
        if slot is None or slot < 0:
            return slot is not None
        try:
            self.slab.write(slot, buffer)
            return self._publish(slot, key, checksum, evicted)
        except OSError as cause:
            if cause.errno not in NO_ROOM:
                raise
            self._pause(cause)
            return False
        finally:
            self._release(slot)

    def _is_gone(self) -> bool:
        """Return whether the files are deleted or cut short, so that nothing is to be done there.

        Data in deleted files would be lost unnoticed. A missing part of the index
        must not be touched, so this is asked right before; only a cut in that very moment counts.
        """
        slab = self.slab
        if not (slab.is_deleted or slab.is_cut):
            return False
        self._report(
            "gone",
            f"the files in {str(self._folder_path)!r} were "
            f"{'deleted' if slab.is_deleted else 'cut short'}; no block is saved or loaded until "
            f"the engine is started again",
        )
        return True

    @property
    def used_bytes(self) -> int:
        """Bytes of the stored blocks of this size, of all engines together."""
        with self._call() as is_ready:
            is_there = is_ready and not (self.slab.is_deleted or self.slab.is_cut)
            return self._index.used * self.context.block_bytes if is_there else 0

    def drain(self) -> None:
        """Return once all blocks are on the disk; until then, they survive this process only."""
        with self._call() as is_ready:
            if is_ready:
                self.slab.drain()

    def close(self) -> None:
        """Close the files, or let the last call that has not returned do so."""
        with self._calls_lock:
            was_open, self._closed = not self._closed, True
            is_last = was_open and not self._calls
        if is_last:
            self._files.close()

    @contextlib.contextmanager
    def _call(self) -> Iterator[bool]:
        """Keep the files as they are, open or not; gives whether they are open."""
        with self._calls_lock:
            is_open = not self._closed
            self._calls += is_open
        try:
            yield is_open and self._is_ready
        finally:
            with self._calls_lock:
                self._calls -= is_open
                is_last = is_open and self._closed and not self._calls
            if is_last:
                self._files.close()

    # Slots

    def _reserve(self, key: bytes, checksum: int, evicted: list[bytes]) -> int | None:
        """Return a slot to write a block into; -1 if the block is there, None if there is none."""
        with self._changing() as may_change:
            if not may_change:
                return None
            entry = self._index.find(key)
            if entry is not None and self._index.checksum(entry[0]) == checksum:
                self._index.touch(entry[0])
                self._checked[entry[0]] = 0  # somebody may have found it damaged
                return -1
            slot = self._free_slot()
            if slot is not None:
                dropped = self._index.reserve(slot)
                if dropped is not None and dropped != key:
                    evicted.append(dropped)
                self._writing.add(slot)
            return slot

    def _free_slot(self) -> int | None:
        """Return a locked slot that is free, or was not used for longest."""
        for _attempt in range(3):
            if not self._victims or self._slots != self._index.slots:
                self._choose()
            if (not self._victims or self._victims[-1][1]) and self._grow():
                self._choose()
            while self._victims:
                slot, used_at = self._victims.pop()
                is_same = self._index.used_at(slot) == used_at
                if is_same and slot not in self._writing and self.slab.try_lock(slot):
                    return slot
        return None

    def _choose(self) -> None:
        self._slots, self._victims = self._index.slots, self._index.oldest()

    def _grow(self) -> bool:
        if not self.slab.can_grow or time.monotonic() < self._grow_at:
            return False
        try:
            self.slab.grow()
        except LockTimeoutError:
            self._grow_at = time.monotonic() + _BUSY_SECONDS
            return False
        except (RefusedError, OSError) as cause:
            self._grow_at = time.monotonic() + _RETRY_SECONDS
            self._report(
                "grow", f"it has no room for more than {self._index.slots} blocks: {cause}"
            )
            return False
        self._reported.discard("grow")
        return True

    def _publish(self, slot: int, key: bytes, checksum: int, evicted: list[bytes]) -> bool:
        with self._changing() as may_change:
            if not may_change:
                return False
            before = self._index.find(key)
            if (dropped := self._index.publish(slot, key, checksum)) is not None:
                evicted.append(dropped)
            if before is not None:
                self._index.free(before[0])
                self._victims.append((before[0], 0))
        self._reported -= {"write", "lock"}
        return True

    def _release(self, slot: int) -> None:
        with self._lock:
            self._writing.discard(slot)
            self.slab.unlock(slot)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[bool]:
        """Keep others from changing the index; give whether they released it in time."""
        with self._lock, self.slab.writing_index(_BUSY_SECONDS) as may_change:
            if not may_change:
                self._store_at = time.monotonic() + _BUSY_SECONDS
                self._report("lock", "no block is saved: another process keeps the index locked")
            yield may_change and not self._is_gone()

    def _drop(self, slot: int, sequence: int, drop: Callable[[int], bytes | None]) -> None:
        """Drop a block that cannot be used, so that it is stored again."""
        dropped = None
        with self._changing() as may_change:
            if may_change and self._index.sequence(slot) == sequence:
                dropped = drop(slot)
        if dropped is not None:
            self.context.report_evicted([dropped])

    def _pause(self, cause: Exception) -> None:
        """Save no block for a while, since the disk is full."""
        self._store_at = time.monotonic() + _RETRY_SECONDS
        self._report("write", f"no block is saved: {cause}")

    def _report(self, problem: str, message: str) -> None:
        if problem not in self._reported:
            self._reported.add(problem)
            self.context.report_fault(f"plugin.{self.name}.path: {message}")
