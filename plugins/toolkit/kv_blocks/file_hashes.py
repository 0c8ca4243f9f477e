"""Hashes of the content of files, kept by path, size, times and inode."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hardpoint.errors import HardpointError
from hardpoint.plugins.config_tables import WeightCacheConfig

__all__ = ["cache_folder", "file_state", "hash_file"]

_log = logging.getLogger("hardpoint")

_FILE = "content-hashes.json"
_CHUNK = 1 << 22
_MOST = 4096  # entries
_MOST_BYTES = 1 << 22
_DIGEST = re.compile("[0-9a-f]{64}")
_LOCK_WAIT_S = 5.0
_RECENT_S = 2.0  # two changes within a tick of the file system's clock look like one


def cache_folder(config: WeightCacheConfig) -> Path | None:
    """Return the folder of the weight cache, which may not exist yet; None if there is none."""
    if config.path == "off":
        return None
    if config.path is not None:
        return Path(config.path).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):  # no home
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hardpoint"
    return None


def hash_file(path: Path, folder: Path | None, stop: threading.Event | None = None) -> str:
    """Return the SHA-256 of a file's content.

    It is read if the hash is not kept in the folder, or the file has changed since.

    Args:
        path: path of the file; a symbolic link is followed.
        folder: where hashes are kept; None is nowhere.
        stop: ends it, if set.

    Raises:
        HardpointError: it was stopped.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        before = file_state(path, os.fstat(file.fileno()))
        hashes = {} if folder is None else _read(folder)
        if (known := hashes.get(before)) is not None:
            return known
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            if stop is not None and stop.is_set():
                raise HardpointError(f"{path}: its hash is not needed any more")
            digest.update(chunk)
        status = os.fstat(file.fileno())
        after = file_state(path, status)
    # A file that has just changed may change again without another time of change.
    is_settled = time.time() - max(status.st_mtime, status.st_ctime) > _RECENT_S
    if folder is not None and before == after and is_settled:
        _keep(folder, after, digest.hexdigest())
    return digest.hexdigest()


def file_state(path: Path, status: os.stat_result) -> str:
    """Return a text that differs whenever the file has changed."""
    # The time of change is the system's own; the time of modification can be set to any value.
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return f"{path.resolve()} {status.st_size} {times} {status.st_dev}:{status.st_ino}"


def _read(folder: Path) -> dict[str, str]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(folder / _FILE, flags), "rb") as file:
            descriptor = file.fileno()
            status = os.fstat(descriptor)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_ours or status.st_mode & 0o022:
                return {}
            hashes = msgspec.json.decode(file.read(_MOST_BYTES), type=dict[str, str])
            return {state: digest for state, digest in hashes.items() if _DIGEST.fullmatch(digest)}
    except (OSError, msgspec.MsgspecError):
        return {}


def _keep(folder: Path, state: str, digest: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder):
            hashes = _read(folder)
            hashes.pop(state, None)
            hashes[state] = digest
            while len(hashes) > _MOST:
                del hashes[next(iter(hashes))]
            temporary = folder / f"{_FILE}.temporary"
            temporary.unlink(missing_ok=True)  # of a process that was killed, or a link
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(hashes))
            temporary.replace(folder / _FILE)
    except OSError as cause:
        _log.warning("%s: hashes of weights are not kept: %s", folder, cause)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / f"{_FILE}.lock", flags, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
