"""Hashes of the content of weights' files, kept by path, size, times and inode."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hardpoint.plugins import ConfigError, WeightLoader
from hardpoint.plugins.config import WeightCacheConfig

from .weight_cache import OFF, cache_folder

_log = logging.getLogger("hardpoint")

_FILE = "content-hashes.json"
_CHUNK = 1 << 22
_MOST = 4096  # entries
_MOST_BYTES = 1 << 22


def hash_weights(loader: WeightLoader, config: WeightCacheConfig) -> str:
    """Return a text that says what the weights of a model are, for the keys of KV blocks.

    Args:
        loader: of the weights.
        config: its folder keeps the hashes of files.

    Raises:
        ConfigError: the loader cannot say.
        OSError: a file cannot be read.
    """
    folder = None if config.path == OFF else cache_folder(config.path)
    found = loader.content_hash(lambda path: hash_file(path, folder))
    if not isinstance(found, str) or not found:
        raise ConfigError(
            f"kv_connector.use: blocks cannot be told from those of other weights, for the loader "
            f"{loader.name!r} has no content_hash()"
        )
    return found


def hash_file(path: Path, folder: Path | None) -> str:
    """Return the SHA-256 of a file's content.

    It is read if the hash is not kept in the folder, or the file has changed since.

    Args:
        path: of the file.
        folder: where hashes are kept; None is nowhere.
    """
    with path.open("rb") as file:
        before = _state(path, os.fstat(file.fileno()))
        kept = {} if folder is None else _read(folder)
        if (known := kept.get(before)) is not None:
            return known
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        after = _state(path, os.fstat(file.fileno()))
    if folder is not None and before == after:
        _keep(folder, after, digest.hexdigest())
    return digest.hexdigest()


def _state(path: Path, status: os.stat_result) -> str:
    """Return a text that changes whenever the file does."""
    # The time of change is the system's own; that of modification can be set to any value.
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return f"{path.resolve()} {status.st_size} {times} {status.st_dev}:{status.st_ino}"


def _read(folder: Path) -> dict[str, str]:
    """Return the kept hashes; none if there is no such file of this user."""
    try:
        descriptor = os.open(folder / _FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_ours or status.st_mode & 0o022:
                return {}
            return msgspec.json.decode(file.read(_MOST_BYTES), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def _keep(folder: Path, state: str, digest: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder):
            kept = _read(folder)
            kept.pop(state, None)
            kept[state] = digest
            while len(kept) > _MOST:
                del kept[next(iter(kept))]
            temporary = folder / f"{_FILE}.{os.getpid()}.temporary"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(kept))
            temporary.replace(folder / _FILE)
    except OSError as cause:
        _log.warning("%s: hashes of weights are not kept: %s", folder, cause)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder / f"{_FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
