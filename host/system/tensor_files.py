"""Files of tensors, which processes map; a file that is read is known to be whole.

A file has a prefix, a JSON header and the tensors, each at a whole page; those that are the same
memory, as a packed table that is embedding and head, are there once:

    magic | length of the header, its CRC-32, checksum of the tensors | header | tensors
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

_MAGIC = b"hardpoint-w1\n\0\0\0"
_PREFIX = struct.Struct("<16sIIQ")
_PAGE = 4096
_SUM_PAGES = 64  # are summed at once, in the processor's cache
_CHUNK = 1 << 21  # bytes of a huge page
_SYNCED = 1 << 26

_Memory = tuple[torch.device, int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor; `start` is its first byte after the header."""

    name: str
    dtype: str
    shape: list[int]
    start: int


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Header of a file: `key` identifies the weights, `quantized` describes quantized weights."""

    key: str
    size: int
    tensors: list[_Tensor]
    quantized: str | None = None


class UnusableFileError(Exception):
    """A file cannot be used; the message is the reason."""


class WritingCancelledError(Exception):
    """The file is not waited for any more."""


def read_tensors(file: Path, key: str) -> tuple[dict[str, torch.Tensor], str | None] | None:
    """Return the tensors of a file, mapped, and its `quantized`; None if there is no file.

    Raises:
        UnusableFileError: it is foreign, damaged or of another key.
        OSError: it cannot be read.
    """
    try:
        # A pipe of that name is not waited for.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnusableFileError("expected a regular file")
        if status.st_uid != os.geteuid():
            raise UnusableFileError(
                f"it belongs to user {status.st_uid}, expected {os.geteuid()}, who runs this"
            )
        if status.st_size < _PREFIX.size:
            raise UnusableFileError(f"it is not whole: it has {status.st_size} bytes")
        mapped = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        with contextlib.suppress(OSError):  # a system that cannot be written to
            os.utime(descriptor)  # the file that was used last is removed last
    finally:
        os.close(descriptor)
    header, start = _read_header(mapped, key)
    tensors = {tensor.name: _view(mapped, start, tensor) for tensor in header.tensors}
    return tensors, header.quantized


def _read_header(mapped: mmap.mmap, key: str) -> tuple[_Header, int]:
    """Return the header of a file that is whole, and the start of its tensors."""
    magic, length, crc, checksum = _PREFIX.unpack_from(mapped)
    if magic != _MAGIC:
        raise UnusableFileError("it is no file of packed weights")
    encoded = mapped[_PREFIX.size : _PREFIX.size + length]
    if zlib.crc32(encoded) != crc:
        raise UnusableFileError("its header is damaged")
    header = msgspec.json.decode(encoded, type=_Header)
    if header.key != key:
        raise UnusableFileError("its name is of other weights")
    start = _pages(_PREFIX.size + length)
    if len(mapped) != start + header.size:
        raise UnusableFileError(
            f"it is not whole: expected {start + header.size} bytes, got {len(mapped)}"
        )
    if _checksum(mapped, start) != checksum:
        raise UnusableFileError("it is damaged: its checksum differs")
    return header, start


def _view(mapped: mmap.mmap, start: int, entry: _Tensor) -> torch.Tensor:
    dtype, count = getattr(torch, entry.dtype), math.prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of read-only memory
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + entry.start)
    return flat.view(entry.shape)


def _memory(tensor: torch.Tensor) -> _Memory:
    """Return a key that is equal for tensors of the same memory, read the same way."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
    )


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({_memory(tensor): tensor for tensor in tensors}.values())


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that tensors have in a file, without its header."""
    return sum(_pages(tensor.nbytes) for tensor in _unique(tensors))


def _pages(count: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-count // _PAGE) * _PAGE


def _checksum(data: mmap.mmap, start: int) -> int:
    # The CRC-32 of sums of 64 bits, along each page and across pages: three times as
    # fast as the CRC-32 of all bytes.
    pages = np.frombuffer(data, np.uint64, offset=start).reshape(-1, _PAGE // 8)
    crc = 0
    for first in range(0, len(pages), _SUM_PAGES):
        part = pages[first : first + _SUM_PAGES]
        crc = zlib.crc32(part.sum(0), zlib.crc32(part.sum(1), crc))
    return crc


class TensorFile:
    """The content of a file that is to be written.

    Attributes:
        size: bytes of the tensors.
    """

    def __init__(
        self, key: str, tensors: Mapping[str, torch.Tensor], quantized: str | None
    ) -> None:
        """Describe tensors, which must not change until they are written."""
        self._parts, self.size = list[memoryview](), 0
        starts: dict[_Memory, int] = {}
        for tensor in _unique(tensors.values()):
            starts[_memory(tensor)] = self.size
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            self._parts.append(data.data)
            self.size += _pages(data.nbytes)
        entries = [
            _Tensor(
                name,
                str(tensor.dtype).removeprefix("torch."),
                list(tensor.shape),
                starts[_memory(tensor)],
            )
            for name, tensor in tensors.items()
        ]
        self._header = msgspec.json.encode(_Header(key, self.size, entries, quantized))

    def write(self, opened: io.FileIO, cancelled: threading.Event) -> None:
        """Write all of an empty file.

        Raises:
            WritingCancelledError: it was cancelled.
            OSError: the disk is full, for example.
        """
        start = _pages(_PREFIX.size + len(self._header))
        chunks = _Chunks(opened, cancelled)
        chunks.write(bytes(start))  # the prefix and the header come last
        for data in self._parts:
            chunks.write(data)
            chunks.write(bytes(_pages(len(data)) - len(data)))
        chunks.flush()
        with mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            checksum = _checksum(mapped, start)
        opened.seek(0)
        crc = zlib.crc32(self._header)
        prefix = _PREFIX.pack(_MAGIC, len(self._header), crc, checksum)
        _write_all(opened, prefix + self._header)
        os.fsync(opened.fileno())


class _Chunks:
    """Writes a file in chunks, so that the system keeps it in huge pages, which maps use."""

    def __init__(self, opened: io.FileIO, cancelled: threading.Event) -> None:
        self._opened, self._cancelled = opened, cancelled
        self._chunk, self._filled, self._unsynced = bytearray(_CHUNK), 0, 0

    def write(self, data: bytes | memoryview) -> None:
        """Add data.

        Raises:
            WritingCancelledError: the file is not waited for any more.
            OSError: as `_write_all`.
        """
        rest = memoryview(data)
        while rest:
            count = min(len(rest), len(self._chunk) - self._filled)
            self._chunk[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled == len(self._chunk):
                self.flush()

    def flush(self) -> None:
        if self._cancelled.is_set():
            raise WritingCancelledError
        _write_all(self._opened, memoryview(self._chunk)[: self._filled])
        self._unsynced += self._filled
        self._filled = 0
        if self._unsynced >= _SYNCED:  # so that giving up never waits for long
            os.fdatasync(self._opened.fileno())
            self._unsynced = 0


def _write_all(opened: io.FileIO, data: bytes | memoryview) -> None:
    """Write data, in as many pieces as the system takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[opened.write(rest) :]
