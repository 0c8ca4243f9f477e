"""Index of a slab: which block is in which slot, in a file that processes share by mapping it.

    header | keys | sequences | times | checksums | cells

The first four have an item per slot of the slab, so that the place of a block is never read from
the file: it follows from the number of its slot. `cells` is a hash table with buckets of 16 cells,
each the number of a slot and 32 bits of the hash of the key there. A cell is only a hint: the
slot's own key decides, and a sequence that is not 0. So a process may be killed between any
two writes:

- a slot that is being written has the sequence 0, and is no block;
- a slot gets its sequence after all else, and a cell after that;
- a cell that leads to a slot of another key is used for the next key of its bucket.

Readers use no lock. A block's sequence is never used again, so that a block was not replaced if it
is the same before and after reading. Writers exclude each other, with a lock that is not here.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .disk_files import DamagedError

_MAGIC = b"HPKVIDX\0"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ")  # magic, version, unused, bytes of a block
_TABLE, _SLOTS, _SEQUENCE, _USED = 3, 4, 5, 6  # their places in the header, in items of 8 bytes
_HEADER_ITEMS = 512
_KEY = struct.Struct("<4Q")
_WAYS = 16  # cells of a bucket
_MIN_TABLE = 16
MAX_TABLE = 1 << 28
"""Most slots that an index has room for."""
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_NP_FACTORS = np.array(_FACTORS, np.uint64)

_Items = npt.NDArray[np.uint64]


def table_size(capacity: int) -> int:
    """Return for how many slots an index has room that is made for `capacity`."""
    return max(_MIN_TABLE, 1 << (capacity - 1).bit_length())


def index_bytes(table: int) -> int:
    """Return the size of the file of an index with room for `table` slots."""
    return 8 * (_HEADER_ITEMS + table * (4 + 3) + _num_buckets(table) * _WAYS)


def _num_buckets(table: int) -> int:
    return 2 * table // _WAYS


class SlabIndex:
    """The index, mapped.

    The file may contain anything: sizes are checked when it is opened, and numbers of slots
    when they are used.

    Attributes:
        table: number of slots that it has room for.
    """

    def __init__(self, descriptor: int, block_bytes: int) -> None:
        """Map a file; the descriptor is borrowed.

        Raises:
            DamagedError: it is not the index of such blocks.
        """
        size = os.fstat(descriptor).st_size
        header = os.pread(descriptor, 8 * _HEADER_ITEMS, 0)
        if len(header) < 8 * _HEADER_ITEMS or _HEADER.unpack_from(header) != _magic(block_bytes):
            raise DamagedError("it is not an index of this version and size of blocks")
        (table,) = struct.unpack_from("<Q", header, 8 * _TABLE)
        is_table = _MIN_TABLE <= table <= MAX_TABLE and table & (table - 1) == 0
        if not is_table or size != index_bytes(table):
            raise DamagedError(f"it has {size} bytes, which is wrong for {table} slots")
        self.table: int = table
        self._map = mmap.mmap(descriptor, size)
        self._items: memoryview[int] = memoryview(self._map).cast("Q")
        array = np.frombuffer(self._map, np.uint64)
        starts = [_HEADER_ITEMS]
        for items_of_a_slot in (4, 1, 1, 1):
            starts.append(starts[-1] + items_of_a_slot * table)
        self._keys, self._sequences, self._times, self._sums, self._cells = starts
        self._key_array = array[starts[0] : starts[1]].reshape(table, 4)
        self._sequence_array = array[starts[1] : starts[2]]
        self._time_array = array[starts[2] : starts[3]]
        self._cell_array = array[starts[4] :].reshape(_num_buckets(table), _WAYS)

    @staticmethod
    def create(descriptor: int, block_bytes: int, table: int) -> None:
        """Write an empty index to an empty file; its pages are allocated, since it is mapped.

        Raises:
            OSError: there is no room.
        """
        os.posix_fallocate(descriptor, 0, index_bytes(table))
        header = _HEADER.pack(*_magic(block_bytes))
        os.pwrite(descriptor, header + struct.pack("<QQQ", table, 0, 0), 0)

    def flush(self) -> None:
        """Return once it is on the disk."""
        self._map.flush()

    def close(self) -> None:
        """Unmap the file; nothing may use this any more."""
        self._items.release()
        del self._key_array, self._sequence_array, self._time_array, self._cell_array
        self._map.close()

    @property
    def is_whole(self) -> bool:
        """Whether the file is as long as its mapping; a read beyond its end kills the process."""
        return self._map.size() >= len(self._map)

    @property
    def slots(self) -> int:
        """Number of slots that the slab has."""
        slots: int = self._items[_SLOTS]
        return min(slots, self.table)

    @slots.setter
    def slots(self, value: int) -> None:
        self._items[_SLOTS] = value

    @property
    def used(self) -> int:
        """Number of slots with a block; inexact after killed processes."""
        return min(self._items[_USED], self.slots)

    # Readers

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Return the slot and the sequence of a block."""
        bucket, tag = self._place(key)
        start = self._cells + bucket * _WAYS
        for cell in self._items[start : start + _WAYS]:
            if cell >> 32 == tag and (slot := (cell & _MASK32) - 1) >= 0:
                sequence = self.sequence(slot) if slot < self.slots else 0
                return (slot, sequence) if sequence and self._key(slot) == key else None
        return None

    def find_all(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are there, and note that they were used now, the first one last.

        A block is of use only with the earlier ones, so the last ones are to be replaced first.
        """
        items = _key_items(keys)
        hashes = _hash_all(items)
        rows = self._cell_array[hashes & np.uint64(len(self._cell_array) - 1)]
        places = (rows & np.uint64(_MASK32)).astype(np.int64) - 1
        matches = ((rows >> np.uint64(32)) == (hashes >> np.uint64(32))[:, None]) & (places >= 0)
        columns = matches.argmax(axis=1)[:, None]
        slots = np.take_along_axis(places, columns, axis=1)[:, 0]
        is_present = np.take_along_axis(matches, columns, axis=1)[:, 0] & (slots < self.slots)
        slots[~is_present] = 0
        is_present &= (self._sequence_array[slots] != 0) & (self._key_array[slots] == items).all(
            axis=1
        )
        (hits,) = is_present.nonzero()
        self._time_array[slots[hits]] = time.time_ns() - hits
        return [bool(present) for present in is_present.tolist()]

    def sequence(self, slot: int) -> int:
        """Return the sequence of the block in a slot; 0 if there is none."""
        return self._items[self._sequences + slot]

    def checksum(self, slot: int) -> int:
        """Return the checksum of the block in a slot."""
        return self._items[self._sums + slot]

    # When a slot was used

    def used_at(self, slot: int) -> int:
        """Return when a slot was used, in ns since the epoch; 0 if it is free."""
        return self._items[self._times + slot]

    def touch(self, slot: int) -> None:
        """Record that a slot was used now."""
        self._items[self._times + slot] = time.time_ns()

    def oldest(self) -> list[tuple[int, int]]:
        """Return some of the slots that were not used for longest, and when, the oldest last."""
        times = self._time_array[: self.slots].copy()
        count = min(len(times), max(_WAYS, len(times) >> 10))
        if not count:
            return []
        slots = np.argpartition(times, count - 1)[:count]
        order = np.lexsort((slots, times[slots]))[::-1]  # free ones in order: blocks side by side
        return list(zip(slots[order].tolist(), times[slots[order]].tolist(), strict=True))

    # Writers: one at a time

    def reserve(self, slot: int) -> bytes | None:
        """Drop the block in a slot, which is the last to be used again; return its key."""
        dropped = self._drop(slot)
        self.touch(slot)
        return dropped

    def free(self, slot: int) -> bytes | None:
        """Drop the block in a slot, which is the next to be used; return its key."""
        dropped = self._drop(slot)
        self._items[self._times + slot] = 0
        return dropped

    def _drop(self, slot: int) -> bytes | None:
        """Drop the block in a slot; return its key if it could be found there."""
        if not self.sequence(slot):
            return None
        self._items[self._sequences + slot] = 0
        self._items[_USED] = max(self._items[_USED] - 1, 0)
        key = self._key(slot)
        bucket, tag = self._place(key)
        start, cell = self._cells + bucket * _WAYS, tag << 32 | (slot + 1)
        row = self._items[start : start + _WAYS].tolist()
        if cell not in row:
            return None
        self._items[start + row.index(cell)] = 0
        return key

    def publish(self, slot: int, key: bytes, checksum: int) -> bytes | None:
        """Record that a block is in a reserved slot; replace an earlier block with its key.

        Returns:
            Key of a block that was dropped because no cell was left.
        """
        dropped = self._set(slot, key, checksum)
        self.touch(slot)
        return dropped

    def _set(self, slot: int, key: bytes, checksum: int) -> bytes | None:
        items = self._items
        items[self._sums + slot] = checksum
        start = 8 * (self._keys + 4 * slot)
        self._map[start : start + 32] = key
        items[_SEQUENCE] = (items[_SEQUENCE] + 1) & _MASK64 or 1
        items[self._sequences + slot] = items[_SEQUENCE]
        items[_USED] = (items[_USED] + 1) & _MASK64
        bucket, tag = self._place(key)
        cell, dropped = self._cell_for(bucket, tag)
        items[cell] = tag << 32 | (slot + 1)
        return dropped

    def _cell_for(self, bucket: int, tag: int) -> tuple[int, bytes | None]:
        """Return the cell for a key: its old cell, a free one, or the cell of the oldest block.

        This block is dropped then; its key is the second item.
        """
        start = self._cells + bucket * _WAYS
        row = self._items[start : start + _WAYS].tolist()
        for place, cell in enumerate(row):
            if cell and cell >> 32 == tag:
                return start + place, None
        if 0 in row:
            return start + row.index(0), None
        slots = [(cell & _MASK32) - 1 for cell in row]
        for place, slot in enumerate(slots):
            if not (0 <= slot < self.slots and self._is_of(slot, bucket, row[place] >> 32)):
                return start + place, None
        oldest = min(slots, key=self.used_at)
        return start + slots.index(oldest), self.free(oldest)

    def _is_of(self, slot: int, bucket: int, tag: int) -> bool:
        return bool(self.sequence(slot)) and self._place(self._key(slot)) == (bucket, tag)

    # At start, by the only process that uses it

    def copy_from(self, other: SlabIndex) -> None:
        """Add the blocks of another index that are in the slots of this one."""
        self._items[_SEQUENCE] = other._items[_SEQUENCE]
        # A process that was killed while it replaced a block has left two: the newer one counts.
        for slot in sorted(range(min(self.slots, other.slots)), key=other.sequence):
            if other.sequence(slot):
                self._set(slot, other._key(slot), other.checksum(slot))
                self._items[self._times + slot] = other.used_at(slot)

    def cut(self, slots: int) -> None:
        """Drop the blocks in all slots but the first ones, and these slots."""
        for slot in range(slots, self.slots):
            self.free(slot)
        self.slots = min(slots, self.slots)

    def repair(self) -> None:
        """Free the slots that killed processes reserved, count, and correct times in the future."""
        times, now = self._time_array[: self.slots], time.time_ns()
        times[times > now] = now
        free = self._sequence_array[: self.slots] == 0
        times[free] = 0
        self._items[_USED] = len(free) - int(np.count_nonzero(free))

    # Keys

    def _key(self, slot: int) -> bytes:
        start = 8 * (self._keys + 4 * slot)
        return self._map[start : start + 32]

    def _place(self, key: bytes) -> tuple[int, int]:
        mixed = sum(map(int.__mul__, _KEY.unpack(key), _FACTORS)) & _MASK64
        mixed = ((mixed ^ mixed >> 32) * _FACTORS[0]) & _MASK64
        mixed ^= mixed >> 29
        return mixed & (_num_buckets(self.table) - 1), mixed >> 32


def _magic(block_bytes: int) -> tuple[bytes, int, int, int]:
    return _MAGIC, _VERSION, 0, block_bytes


def _key_items(keys: Sequence[bytes]) -> _Items:
    if any(len(key) != _KEY.size for key in keys):
        raise ValueError(f"keys must have {_KEY.size} bytes")
    return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)


def _hash_all(items: _Items) -> _Items:
    """Return the hash of each key, as `_place` computes it."""
    mixed: _Items = (items * _NP_FACTORS).sum(axis=1, dtype=np.uint64)
    mixed = (mixed ^ mixed >> np.uint64(32)) * _NP_FACTORS[0]
    return mixed ^ mixed >> np.uint64(29)
