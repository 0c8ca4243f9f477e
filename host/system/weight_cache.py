"""The weight cache: files of packed weights, which later processes map instead of packing again.

A file is written under a temporary name and renamed, so that one under its own name is whole.
Whatever is wrong with a file or the folder is logged once; the weights are packed as without a
cache then.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from hardpoint.errors import size_text
from hardpoint.plugins import Model
from hardpoint.plugins.config_tables import WeightCacheConfig
from hardpoint.toolkit.kv_blocks.file_hashes import cache_folder

from .tensor_files import (
    TensorFile,
    UnusableFileError,
    WritingCancelledError,
    num_bytes,
    read_tensors,
)

_log = logging.getLogger("hardpoint")

_SUFFIX, _TEMPORARY = ".weights", ".temporary"
_DELAY_S = 2.0
_PATIENCE_S = 5.0
_ABANDONED_S = 3600.0


class _FolderError(UnusableFileError):
    """The folder cannot be used."""


class WeightCache:
    """A folder of packed weights.

    Args:
        config: the folder and its limit.
        num_ranks: number of ranks that keep files of one model there.
    """

    def __init__(self, config: WeightCacheConfig, num_ranks: int = 1) -> None:
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
            cached = read_tensors(file, key)
            if cached is None:
                return False
            tensors, quantized = cached
            model.load_packed(tensors)
        except (UnusableFileError, OSError, KeyError, ValueError) as cause:
            _log.warning("weight cache: %s: %s; the weights are packed again", file, _why(cause))
            if isinstance(cause, _FolderError):
                self._folder = None
            return False
        _log.info("packed weights: mapped %s (%.2f s)", file, time.perf_counter() - began)
        if quantized is not None:
            _log.info("quantized weights: %s", quantized)
        return True

    def save(self, key: str, model: Model, quantized: str | None = None) -> None:
        """Write the weights of a model that has loaded them, in a thread, a little later.

        Args:
            quantized: description of the quantized matrices, which later starts log.
        """
        if self._folder is None or (tensors := model.packed_weights()) is None:
            return
        size = num_bytes(tensors.values())
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

    def share(self, key: str, model: Model, quantized: str | None = None) -> None:
        """Write the weights of a model at once, and let it map them as other engines do.

        Args:
            key, model, quantized: as for `save`.
        """
        self.save(key, model, quantized)
        if (writer := self._writer) is None or not writer.finish() or not self.load(key, model):
            _log.warning("packed weights: not shared: each engine has its own")

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
    try:
        status = folder.stat()
    except FileNotFoundError:
        return
    except OSError as cause:
        raise _FolderError(_why(cause)) from cause
    if not stat.S_ISDIR(status.st_mode):
        raise _FolderError("its folder is not a directory")
    if status.st_uid != os.geteuid():
        raise _FolderError(
            f"its folder belongs to user {status.st_uid}, expected {os.geteuid()}, who runs this"
        )


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
        content = TensorFile(key, tensors, quantized)
        self._hurry, self._cancelled = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(content,), name="hardpoint-weight-cache", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._hurry.set()
        self._thread.join(_PATIENCE_S)
        self._cancelled.set()
        self._thread.join(_PATIENCE_S)

    def finish(self) -> bool:
        """Write now, however long it takes; return whether the file is there."""
        self._hurry.set()
        self._thread.join()
        return self._file.exists()

    def _run(self, content: TensorFile) -> None:
        # Not during the first steps, for which somebody waits.
        self._hurry.wait(_DELAY_S)
        began = time.perf_counter()
        try:
            self._write(content)
        except WritingCancelledError:
            _log.info("packed weights: not kept, because the model was closed before")
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
                size_text(content.size),
                seconds,
            )

    def _write(self, content: TensorFile) -> None:
        folder = self._file.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(folder, self._limit - content.size, self._file)
        temporary = folder / f"{self._file.stem}.{secrets.token_hex(4)}{_TEMPORARY}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o600)
        try:
            with open(descriptor, "r+b", buffering=0) as opened:
                content.write(opened, self._cancelled)
            temporary.replace(self._file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _make_room(folder: Path, limit: int, keep: Path) -> None:
    """Remove files of the cache, least recently used first, until they have `limit` bytes.

    Args:
        limit: limit of all files but one.
        keep: the file that does not count, which is about to be replaced.
    """
    files = []
    for file in folder.iterdir():
        try:
            status = file.lstat()
        except FileNotFoundError:  # renamed by another process, or removed
            continue
        if file.suffix == _SUFFIX and file != keep:
            files.append((status.st_mtime, status.st_size, file))
        elif file.suffix == _TEMPORARY and time.time() - status.st_mtime > _ABANDONED_S:
            file.unlink(missing_ok=True)  # its writer was killed
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= limit:
            break
        file.unlink(missing_ok=True)
        _log.info("packed weights: removed %s, above weight_cache.max_bytes", file)
        total -= size
