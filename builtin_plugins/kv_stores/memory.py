"""Blocks in host memory."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import ConfigError, KVStore
from hardpoint.plugins.kv_store import BlockBuffer


class MemoryStore(KVStore):
    """Keeps the most recently used blocks in host memory.

    The memory is reserved at start, and divided into places of one block. A copy is made outside of
    the lock: a place being read is not given to another block, and a place being written has no key
    yet.
    """

    contract = 1

    class Options(plugins.Options):
        """Its size.

        Attributes:
            size_bytes: size of all blocks together, in each rank.
        """

        size_bytes: Annotated[int, Meta(ge=1)] = 1 << 30

    options: Options

    def __init__(self, context: plugins.KVStoreContext) -> None:
        """Reserve the memory.

        Raises:
            ConfigError: there is not so much, or no block fits into it.
        """
        super().__init__(context)
        self._places = _Places(context, self.options.size_bytes)
        self._keys: OrderedDict[bytes, int] = OrderedDict()  # used last at the end
        self._lock = threading.Lock()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are there, and note that they are used, the first one last.

        A block is of use only with the earlier ones, so the last ones are to be replaced first.
        """
        with self._lock:
            results = [key in self._keys for key in keys]
            for key, is_there in zip(reversed(keys), reversed(results), strict=True):
                if is_there:
                    self._keys.move_to_end(key)
        return results

    def store(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Copy a block over the least recently used one."""
        with self._lock:
            place = self._places.enter_free()
            dropped = None
            if place is None and (dropped := self._drop_one(key)) is not None:
                place = self._places.enter_free()
        if dropped is not None and dropped != key:
            self.context.report_evicted([dropped])
        if place is None:
            return False
        try:
            self._places.write(place, buffer)
        except BaseException:
            with self._lock:
                self._places.leave(place, forget=True)
            raise
        with self._lock:
            if self._places.closed:
                self._places.leave(place, forget=True)
                return False
            before = self._keys.pop(key, None)
            if before is not None:
                self._places.forget(before)
            self._keys[key] = place
            self._places.leave(place)
        return True

    def _drop_one(self, key: bytes) -> bytes | None:
        """Drop this block if it is there, or the one not used for longest; return its key.

        None if all are in use.
        """
        unused = (
            other
            for other in itertools.chain([key] if key in self._keys else [], self._keys)
            if not self._places.is_entered(self._keys[other])
        )
        dropped = next(unused, None)
        if dropped is not None:
            self._places.forget(self._keys.pop(dropped))
        return dropped

    def load(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Copy a block."""
        with self._lock:
            place = self._keys.get(key)
            if place is None:
                return False
            self._places.enter(place)
        try:
            self._places.read(place, buffer)
        finally:
            with self._lock:
                self._places.leave(place)
        return True

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are there."""
        return len(self._keys) * self.context.block_bytes

    def close(self) -> None:
        """Return the memory, as soon as nothing is copied any more."""
        with self._lock:
            self._keys.clear()
            self._places.close()


class _Places:
    """Memory for so many blocks; the caller's lock is held around all but `read` and `write`.

    Attributes:
        closed: whether the memory is returned, or will be once nothing is copied any more.
    """

    def __init__(self, context: plugins.KVStoreContext, size_bytes: int) -> None:
        self._block_bytes = context.block_bytes
        count = size_bytes // self._block_bytes
        path = f"plugin.{context.name}.size_bytes"
        if not count:
            raise ConfigError(
                f"{path}: expected at least {self._block_bytes}, the size of a block, "
                f"got {size_bytes}"
            )
        available = context.host_memory
        if available is not None and size_bytes > available:
            raise ConfigError(
                f"{path}: {size_bytes} bytes are more host memory than a rank's process may still "
                f"allocate, {available} bytes; make it smaller, or the KV cache"
            )
        self._memory = _Memory(path, count * self._block_bytes, pin=context.pin_memory)
        self._count, self._used = count, 0  # unused places follow the used ones
        self._free: list[int] = []
        self._entered: dict[int, int] = {}  # number of copies from or to a place
        self._forgotten: set[int] = set()  # places that are free once nothing is copied
        self.closed = False

    def enter_free(self) -> int | None:
        if self.closed:
            return None
        if self._free:
            place = self._free.pop()
        elif self._used < self._count:
            place, self._used = self._used, self._used + 1
        else:
            return None
        self.enter(place)
        return place

    def enter(self, place: int) -> None:
        self._entered[place] = self._entered.get(place, 0) + 1

    def is_entered(self, place: int) -> bool:
        return place in self._entered

    def leave(self, place: int, *, forget: bool = False) -> None:
        if forget:
            self._forgotten.add(place)
        self._entered[place] -= 1
        if not self._entered[place]:
            del self._entered[place]
            if place in self._forgotten:
                self._forgotten.discard(place)
                self._free.append(place)
        self._release_if_unused()

    def forget(self, place: int) -> None:
        if place in self._entered:
            self._forgotten.add(place)
        else:
            self._free.append(place)

    def read(self, place: int, buffer: BlockBuffer) -> None:
        # numpy lets other threads run while it copies.
        np.copyto(np.frombuffer(buffer.whole, np.uint8), self._bytes_of(place, buffer))

    def write(self, place: int, buffer: BlockBuffer) -> None:
        np.copyto(self._bytes_of(place, buffer), np.frombuffer(buffer.whole, np.uint8))

    def _bytes_of(self, place: int, buffer: BlockBuffer) -> npt.NDArray[np.uint8]:
        size = self._block_bytes
        if len(buffer.whole) != size:  # numpy would repeat a single byte
            raise ValueError(f"expected a buffer of {size} bytes, got {len(buffer.whole)}")
        return self._memory.array[place * size : (place + 1) * size]

    def close(self) -> None:
        self.closed = True
        self._release_if_unused()

    def _release_if_unused(self) -> None:
        if self.closed and not self._entered:
            self._memory.close()


class _Memory:
    """Memory of the system's, which takes pages as they are used, unless it is pinned.

    Attributes:
        array: its bytes.
    """

    def __init__(self, path: str, size: int, *, pin: bool) -> None:
        """Reserve it; `path` is the option with its size."""
        self._pinned = False
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as cause:
            raise ConfigError(f"{path}: {size} bytes of host memory: {cause}") from None
        with contextlib.suppress(OSError, AttributeError):  # other systems have none
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        if pin:
            self._pin(path)

    def _pin(self, path: str) -> None:
        cuda = _cudart()
        error = cuda.cudaHostRegister(self.array.ctypes.data, self.array.nbytes, 0)
        if int(error):
            size = self.array.nbytes
            self.close()
            raise ConfigError(
                f"{path}: {size} bytes of host memory cannot be pinned: "
                f"{cuda.cudaGetErrorString(error)}"
            )
        self._pinned = True

    def close(self) -> None:
        """Return the memory; further calls do nothing."""
        if self._pinned:
            _cudart().cudaHostUnregister(self.array.ctypes.data)
            self._pinned = False
        self.array = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # it goes with the last view, of an error's frames
            self._map.close()


def _cudart() -> Any:
    runtime: Callable[[], Any] = torch.cuda.cudart
    return runtime()
