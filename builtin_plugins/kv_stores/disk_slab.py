"""A slab: one file with a slot for each block of one size, with its index and its locks.

<path>/lock                    held while a slab is opened or removed
<path>/blocks-<bytes>/lock     its ranges: the users, the writer of the index, each slot
<path>/blocks-<bytes>/slab     slots, allocated some at a time
<path>/blocks-<bytes>/index    see `SlabIndex`
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from .disk_files import (
    NO_ROOM,
    DamagedError,
    FileLocks,
    LockTimeoutError,
    RefusedError,
    open_file,
    open_folder,
    read_parts,
    write_parts,
)
from .disk_index import MAX_TABLE, SlabIndex, index_bytes, table_size

_PAGE = 4096
_GROWTH = 64 << 20
_STEPS = 16  # in which a slab grows at least, so that it takes others' room only as it needs it
_SHARE = 8  # a slab may have this part of all, whatever others in use have
_GROW_SECONDS = 0.1  # to wait for others that open, grow or remove slabs
_FOLDER_LOCK = 0
_USERS, _WRITER, _FIRST_SLOT = 0, 1, 2  # numbers of a slab's locks
_PREFIX = "blocks-"
_FILES = ("slab", "index", "index.new", "lock")


def slot_bytes(block_bytes: int) -> int:
    """Return the size of the slot of a block: whole pages, so that writing one reads nothing."""
    return -(-block_bytes // _PAGE) * _PAGE


def least_bytes(block_bytes: int) -> int:
    """Return the least size of a slab of one block, with its index."""
    return slot_bytes(block_bytes) + index_bytes(table_size(1))


def _capacity(slot: int, size_bytes: int) -> int:
    limit = min(size_bytes // slot, MAX_TABLE)
    return max(1, min(limit, (size_bytes - index_bytes(table_size(limit))) // slot))


class Slab:
    """The slab of blocks of one size, shared by all that open it.

    Attributes:
        index: the blocks in its slots.
        capacity: most slots that it may have.
        wanted: how many there should be; the index may have room for fewer, if others use it that
            were opened with a smaller size, or the disk has no room for a larger index.
    """

    index: SlabIndex

    def __init__(self, folder: int, block_bytes: int, size_bytes: int, seconds: float) -> None:
        """Open it, or make it.

        Args:
            folder: descriptor of the folder of slabs, borrowed.
            size_bytes: maximum size of all slabs together, with their indexes.
            seconds: to wait for others that are opening or removing slabs.

        Raises:
            RefusedError: it cannot be used.
            OSError: it cannot be read or made.
        """
        self._folder = folder
        self._block_bytes, self._size_bytes = block_bytes, size_bytes
        self._slot_bytes = slot_bytes(block_bytes)
        self._padding = memoryview(bytes(self._slot_bytes - block_bytes))
        self.capacity = self.wanted = _capacity(self._slot_bytes, size_bytes)
        with contextlib.ExitStack() as stack, _changing(folder, seconds):
            self._directory = open_folder(_name(block_bytes), folder)
            stack.callback(os.close, self._directory)
            self._locks = FileLocks(open_file("lock", self._directory))
            stack.callback(self._locks.close)
            self._file = open_file("slab", self._directory)
            stack.callback(os.close, self._file)
            is_alone = self._locks.try_lock(_USERS)
            self._make_room(min(os.fstat(self._file).st_size, self.wanted * self._slot_bytes))
            self.index = self._prepared() if is_alone else self._opened()
            stack.callback(self.index.close)
            if not self._locks.try_lock(_USERS, shared=True):
                raise RefusedError("a program that is not an engine has locked it")
            self.capacity = min(self.capacity, self.index.table)
            self._locks.mark_used()
            self._files = stack.pop_all()

    def close(self) -> None:
        """Close the files; nothing may use it any more."""
        with self._files:
            self._locks.mark_used()

    # Opening

    def _opened(self) -> SlabIndex:
        """Return the index.

        Raises:
            DamagedError: it is not one, or the slab has fewer slots than it lists.
        """
        descriptor = open_file("index", self._directory)
        try:
            index = SlabIndex(descriptor, self._block_bytes)
        finally:
            os.close(descriptor)
        if index.slots * self._slot_bytes > os.fstat(self._file).st_size:
            index.close()
            raise DamagedError(f"{_name(self._block_bytes)}/slab is shorter than its index")
        return index

    def _prepared(self) -> SlabIndex:
        """Return the index, repaired; it is made if it is not there, or is unusable."""
        try:
            index = self._opened()
        except DamagedError:
            index = self._created(None)
        if index.table != table_size(self.capacity) or index.slots > self.capacity:
            index = self._resized(index)
        index.repair()
        os.ftruncate(self._file, index.slots * self._slot_bytes)
        return index

    def _resized(self, old: SlabIndex) -> SlabIndex:
        """Return an index of the right size with the blocks of an old one, which is closed.

        It is the old one where there is no room for another.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(old.close)
            try:
                return self._created(old)
            except OSError as cause:
                if cause.errno not in NO_ROOM:
                    raise
            stack.pop_all()
        old.cut(self.capacity)
        return old

    def _created(self, old: SlabIndex | None) -> SlabIndex:
        descriptor = open_file("index.new", self._directory, os.O_TRUNC)
        try:
            SlabIndex.create(descriptor, self._block_bytes, table_size(self.capacity))
            index = SlabIndex(descriptor, self._block_bytes)
        except OSError:
            os.unlink("index.new", dir_fd=self._directory)
            raise
        finally:
            os.close(descriptor)
        if old is not None:
            index.slots = min(old.slots, self.capacity)
            index.copy_from(old)
        os.rename("index.new", "index", src_dir_fd=self._directory, dst_dir_fd=self._directory)
        return index

    @property
    def is_deleted(self) -> bool:
        """Whether somebody has deleted its files, which are gone once they are closed."""
        return not os.fstat(self._file).st_nlink

    @property
    def is_cut(self) -> bool:
        """Whether somebody has cut the index short, which must not be used any more."""
        return not self.index.is_whole

    # Slots

    def read(self, slot: int, parts: Sequence[memoryview]) -> bool:
        """Read the block in a slot; return whether there was one of this size."""
        self._check(parts)
        return read_parts(self._file, parts, slot * self._slot_bytes)

    def write(self, slot: int, parts: Sequence[memoryview]) -> None:
        """Write a block into a slot."""
        self._check(parts)
        write_parts(self._file, [*parts, self._padding], slot * self._slot_bytes)

    def _check(self, parts: Sequence[memoryview]) -> None:
        if (size := sum(map(len, parts))) != self._block_bytes:
            raise ValueError(f"expected a buffer of {self._block_bytes} bytes, got {size}")

    def try_lock(self, slot: int) -> bool:
        """Lock a slot for writing; return whether no one else writes it."""
        return self._locks.try_lock(_FIRST_SLOT + slot)

    def unlock(self, slot: int) -> None:
        """Let others write a slot."""
        self._locks.unlock(_FIRST_SLOT + slot)

    @contextlib.contextmanager
    def writing_index(self, seconds: float) -> Iterator[bool]:
        """Keep other processes from changing the index; give whether they released it in time."""
        is_locked = self._locks.lock(_WRITER, seconds)
        try:
            yield is_locked
        finally:
            if is_locked:
                self._locks.unlock(_WRITER)

    def drain(self) -> None:
        """Return once all is on the disk."""
        os.fdatasync(self._file)
        self.index.flush()

    # Size

    @property
    def can_grow(self) -> bool:
        """Whether it is smaller than it may be."""
        return self.index.slots < self.capacity

    def grow(self) -> None:
        """Allocate more slots; only the caller may change the index.

        Raises:
            LockTimeoutError: others are opening, growing or removing slabs.
            RefusedError: slabs of other sizes that are in use have the room.
            OSError: there is no room on the disk.
        """
        slots = self.index.slots
        step = min(_GROWTH, self._size_bytes // _STEPS)
        more = min(max(1, step // self._slot_bytes), self.capacity - slots)
        start, size = slots * self._slot_bytes, more * self._slot_bytes
        with _changing(self._folder, _GROW_SECONDS):
            is_within, others = self._make_room(start + size)
            if slots and not is_within and start + size > self._size_bytes // _SHARE:
                raise RefusedError(
                    f"engines with blocks of other sizes use {others} of {self._size_bytes} bytes"
                )
            try:
                os.posix_fallocate(self._file, start, size)
            except OSError:
                os.ftruncate(self._file, start)
                raise
        self.index.slots = slots + more

    def _make_room(self, slab_bytes: int) -> tuple[bool, int]:
        """Remove slabs that are not in use, as far as this one is to grow into their room.

        Returns:
            Whether all together are as large as they may be then, and the size of the others.
        """
        room = self._size_bytes - slab_bytes - index_bytes(table_size(self.wanted))
        slabs = sorted(_others(self._folder, _name(self._block_bytes)))
        others = sum(size for _used, size, _name in slabs)
        for _used, size, name in slabs:
            if others <= room:
                break
            if _remove(self._folder, name):
                others -= size
        return others <= max(room, 0), others


def _name(block_bytes: int) -> str:
    return f"{_PREFIX}{block_bytes}"


@contextlib.contextmanager
def _changing(folder: int, seconds: float) -> Iterator[None]:
    """Keep others from opening and removing slabs.

    Raises:
        LockTimeoutError: they did so for too long.
    """
    locks = FileLocks(open_file("lock", folder))
    try:
        if not locks.lock(_FOLDER_LOCK, seconds):
            raise LockTimeoutError(f"another process has kept it locked for {seconds:g} s")
        yield
    finally:
        locks.close()


def _others(folder: int, own_name: str) -> Iterator[tuple[float, int, str]]:
    """Yield when each other slab was used, the size of its files, and the name of its folder.

    The files have no holes: unwritten parts are allocated.
    """
    for name in os.listdir(folder):
        if not name.startswith(_PREFIX) or name == own_name:
            continue
        with contextlib.suppress(OSError, RefusedError), _opened_folder(name, folder) as opened:
            statuses = {}
            for file in _FILES:  # a killed process may not have made all
                with contextlib.suppress(FileNotFoundError):
                    statuses[file] = os.stat(file, dir_fd=opened, follow_symlinks=False)
            used = statuses["lock"].st_mtime if "lock" in statuses else 0.0
            yield used, sum(status.st_size for status in statuses.values()), name


def _remove(folder: int, name: str) -> bool:
    try:
        with _opened_folder(name, folder) as opened:
            locks = FileLocks(open_file("lock", opened))
            with contextlib.closing(locks):
                if not locks.try_lock(_USERS):
                    return False
                for file in _FILES:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file, dir_fd=opened)
        os.rmdir(name, dir_fd=folder)
    except (OSError, RefusedError):
        return False
    return True


@contextlib.contextmanager
def _opened_folder(name: str, folder: int) -> Iterator[int]:
    descriptor = open_folder(name, folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
