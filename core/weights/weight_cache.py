"""The weight cache: files of packed weights, which later processes map instead of packing again.

A file has a prefix, a JSON header and the tensors, each at a whole page; those that are the same
memory, as a packed table that is embedding and head, are there once:

    magic | length of the header, its CRC-32, checksum of the tensors | header | tensors

It is written under a temporary name and renamed, so that one under its own name is whole. Whatever
is wrong with a file or the folder is logged once; the weights are packed as without a cache then.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import logging
import math
import mmap
import os
import secrets
import stat
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from hardpoint.errors import size_text
from hardpoint.plugins import Model
from hardpoint.plugins.config_tables import WeightCacheConfig

from .weight_hash import cache_folder

_log = logging.getLogger("hardpoint")

_SUFFIX, _TEMPORARY = ".weights", ".temporary"
_MAGIC = b"hardpoint-w1\n\0\0\0"
_PREFIX = struct.Struct("<16sIIQ")
_PAGE = 4096
_MAX_HEADER = 1 << 26
_SUM_PAGES = 64  # are summed at once, in the processor's cache
_CHUNK = 1 << 21  # bytes of a huge page
_SYNCED = 1 << 26
_DELAY_S = 2.0
_PATIENCE_S = 5.0
_ABANDONED_S = 3600.0


_Memory = tuple[torch.device, int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor; `start` is its first byte after the header."""

    name: str
    dtype: str
    shape: list[int]
    start: int


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Header of a file: `key` identifies the weights, `quantized` describes those of few bits."""

    key: str
    size: int
    tensors: list[_Tensor]
    quantized: str | None = None


class _UnusableError(Exception):
    """A file cannot be used; the message is the reason."""


class _CancelledError(Exception):
    """The writer is to give up."""


class _FolderError(_UnusableError):
    """The folder cannot be used."""


class WeightCache:
    """A folder of packed weights."""

    def __init__(self, config: WeightCacheConfig, num_ranks: int = 1) -> None:
        """Find the folder; nothing is opened yet.

        Args:
            config: the folder and its limit.
            num_ranks: number of ranks that keep files of one model there.
        """
        self._limit, self._num_ranks = config.max_bytes, num_ranks
        self._folder = cache_folder(config)
        self._writer: _Writer | None = None

    @property
    def is_on(self) -> bool:
        """Whether weights are kept."""
        return self._folder is not None

    def load(self, key: str, model: Model) -> bool:
        """Load the weights of a key into a model; return whether there were any."""
        assert self._folder is not None
        file, began = _file(self._folder, key), time.perf_counter()
        try:
            _check_folder(self._folder)
            found = _read(file, key)
            if found is None:
                return False
            tensors, quantized = found
            model.load_packed(tensors)
        except (_UnusableError, OSError, KeyError, ValueError) as cause:
            _log.warning("weight cache: %s: %s; the weights are packed again", file, _why(cause))
            if isinstance(cause, _FolderError):
                self._folder = None
            return False
        _log.info("packed weights: mapped %s (%.2f s)", file, time.perf_counter() - began)
        if quantized is not None:
            _log.info("matrices of few bits: %s", quantized)
        return True

    def save(self, key: str, model: Model, quantized: str | None = None) -> None:
        """Write the weights of a model that has loaded them, in a thread, a little later.

        Args:
            key: key of the weights.
            model: model that has them.
            quantized: description of the matrices of few bits, which later starts log.
        """
        if self._folder is None or (tensors := model.packed_weights()) is None:
            return
        size = sum(_pages(tensor.nbytes) for tensor in _unique(tensors.values()))
        if size * self._num_ranks > self._limit:  # or the ranks would remove each other's files
            ranks = f" in each of {self._num_ranks} ranks" if self._num_ranks > 1 else ""
            _log.info(
                "packed weights: not kept: they have %d bytes%s, weight_cache.max_bytes is %d",
                size,
                ranks,
                self._limit,
            )
            return
        self._writer = _Writer(_file(self._folder, key), key, tensors, self._limit, quantized)

    def close(self) -> None:
        """Finish writing, or give up if that takes long."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _file(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{_SUFFIX}"


def _why(cause: Exception) -> str:
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause)


def _check_folder(folder: Path) -> None:
    """Check that a folder, if it exists, is one of this user.

    Raises:
        _FolderError: it is not.
    """
    try:
        found = folder.stat()
    except FileNotFoundError:
        return
    except OSError as cause:
        raise _FolderError(_why(cause)) from cause
    if not stat.S_ISDIR(found.st_mode):
        raise _FolderError("its folder is none")
    if found.st_uid != os.geteuid():
        raise _FolderError(
            f"its folder belongs to user {found.st_uid}, expected {os.geteuid()}, who runs this"
        )


def _read(file: Path, key: str) -> tuple[dict[str, torch.Tensor], str | None] | None:
    """Return the tensors of a file, mapped, and its `quantized`; None if there is no file.

    Raises:
        _UnusableError: it is foreign, damaged or of another key.
        OSError: it cannot be read.
    """
    try:
        # A pipe of that name is not waited for.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _UnusableError("expected a regular file")
        if found.st_uid != os.geteuid():
            raise _UnusableError(
                f"it belongs to user {found.st_uid}, expected {os.geteuid()}, who runs this"
            )
        if found.st_size < _PREFIX.size:
            raise _UnusableError(f"it is not whole: it has {found.st_size} bytes")
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
    """Return the header of a file that is whole, and the start of its tensors.

    Raises:
        _UnusableError: it is damaged or of another key.
    """
    magic, length, crc, checksum = _PREFIX.unpack_from(mapped)
    if magic != _MAGIC:
        raise _UnusableError("it is no file of packed weights")
    encoded = mapped[_PREFIX.size : _PREFIX.size + length]
    if zlib.crc32(encoded) != crc:
        raise _UnusableError("its header is damaged")
    header = msgspec.json.decode(encoded, type=_Header)
    if header.key != key:
        raise _UnusableError("it has other weights than its name says")
    start = _pages(_PREFIX.size + length)
    if len(mapped) != start + header.size:
        raise _UnusableError(
            f"it is not whole: expected {start + header.size} bytes, got {len(mapped)}"
        )
    if _checksum(mapped, start) != checksum:
        raise _UnusableError("it is damaged: its checksum differs")
    return header, start


def _view(mapped: mmap.mmap, start: int, entry: _Tensor) -> torch.Tensor:
    """Return one tensor of a file."""
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
    """Return those of some tensors that are no others' memory, in their order."""
    return list({_memory(tensor): tensor for tensor in tensors}.values())


def _pages(count: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-count // _PAGE) * _PAGE


def _checksum(data: mmap.mmap, start: int) -> int:
    """Return the checksum of whole pages."""
    # The CRC-32 of sums of 64 bits, along each page and across pages: three times as
    # fast as the CRC-32 of all bytes.
    pages = np.frombuffer(data, np.uint64, offset=start).reshape(-1, _PAGE // 8)
    crc = 0
    for first in range(0, len(pages), _SUM_PAGES):
        part = pages[first : first + _SUM_PAGES]
        crc = zlib.crc32(part.sum(0), zlib.crc32(part.sum(1), crc))
    return crc


class _Writer:
    """Writes one file in a thread of its own."""

    def __init__(
        self,
        file: Path,
        key: str,
        tensors: Mapping[str, torch.Tensor],
        limit: int,
        quantized: str | None,
    ) -> None:
        """Start; the tensors must not change."""
        self._file, self._limit = file, limit
        self._parts, self._size = list[memoryview](), 0
        starts: dict[_Memory, int] = {}
        for tensor in _unique(tensors.values()):
            starts[_memory(tensor)] = self._size
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            self._parts.append(data.data)
            self._size += _pages(data.nbytes)
        entries = [
            _Tensor(
                name,
                str(tensor.dtype).removeprefix("torch."),
                list(tensor.shape),
                starts[_memory(tensor)],
            )
            for name, tensor in tensors.items()
        ]
        self._header = msgspec.json.encode(_Header(key, self._size, entries, quantized))
        self._hurry, self._cancelled = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="hardpoint-weight-cache", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Finish, or give up if that takes long."""
        atexit.unregister(self.close)
        self._hurry.set()
        self._thread.join(_PATIENCE_S)
        self._cancelled.set()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        # Not during the first steps, for which somebody waits.
        self._hurry.wait(_DELAY_S)
        began = time.perf_counter()
        try:
            self._write()
        except _CancelledError:
            _log.info("packed weights: not kept, for the model was closed before")
        except Exception as cause:  # the model runs all the same
            _log.warning(
                "weight cache: %s cannot be written: %s; the weights are packed at each start",
                self._file,
                _why(cause),
            )
        else:
            seconds = time.perf_counter() - began
            _log.info(
                "packed weights: wrote %s (%s, %.2f s)",
                self._file,
                size_text(self._size),
                seconds,
            )
        finally:
            self._parts = []

    def _write(self) -> None:
        """Write the file under a temporary name, and rename it."""
        folder = self._file.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(folder, self._limit - self._size, self._file)
        temporary = folder / f"{self._file.stem}.{secrets.token_hex(4)}{_TEMPORARY}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o600)
        try:
            with open(descriptor, "r+b", buffering=0) as opened:
                self._fill(opened)
            temporary.replace(self._file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _fill(self, opened: io.FileIO) -> None:
        """Write all of an empty file."""
        start = _pages(_PREFIX.size + len(self._header))
        chunks = _Chunks(opened, self._cancelled)
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
            _CancelledError: the file is not waited for any more.
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
        """Write what is there."""
        if self._cancelled.is_set():
            raise _CancelledError
        _write_all(self._opened, memoryview(self._chunk)[: self._filled])
        self._unsynced += self._filled
        self._filled = 0
        if self._unsynced >= _SYNCED:  # so that giving up never waits for long
            os.fdatasync(self._opened.fileno())
            self._unsynced = 0


def _write_all(opened: io.FileIO, data: bytes | memoryview) -> None:
    """Write data, in as many pieces as the system takes.

    Raises:
        OSError: the disk is full, for example.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[opened.write(rest) :]


def _make_room(folder: Path, limit: int, keep: Path) -> None:
    """Remove files of the cache, least recently used first, until they have `limit` bytes.

    Args:
        folder: folder of the cache.
        limit: limit of all files but one.
        keep: the one that does not count, which is about to be replaced.
    """
    files = []
    for file in folder.iterdir():
        try:
            found = file.lstat()
        except FileNotFoundError:  # renamed by another process, or removed
            continue
        if file.suffix == _SUFFIX and file != keep:
            files.append((found.st_mtime, found.st_size, file))
        elif file.suffix == _TEMPORARY and time.time() - found.st_mtime > _ABANDONED_S:
            file.unlink(missing_ok=True)  # its writer was killed
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= limit:
            break
        file.unlink(missing_ok=True)
        _log.info("packed weights: removed %s, above weight_cache.max_bytes", file)
        total -= size
