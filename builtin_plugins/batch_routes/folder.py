"""The folder of files and batches: owners, states and atomic changes.

    lock                        held by the process that answers batches
    OWNER/lock                  held while bytes are reserved
    OWNER/files/ID.json         `FileRecord`; ID.jsonl is its content
    OWNER/batches/ID.json       `BatchRecord`
    OWNER/batches/ID.in         the input of a batch that has not ended, also if its file is deleted
    OWNER/batches/ID.out, .err  lines of its output and error files, until it ends
    OWNER/batches/ID.room       as large as what is reserved for them, without content
    OWNER/batches/ID.cancel     it is to be cancelled

OWNER is a hash of the client's name. No name that a client gives is ever part of a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from hardpoint.plugins import ConfigError

from .records import BatchRecord, FileObject, FileRecord, now

_log = logging.getLogger("hardpoint")

RecordT = TypeVar("RecordT", FileRecord, BatchRecord)

RECORD_BYTES = 2048
"""Bytes that are reserved for the record of a file, or for the last records of a batch."""

_PARTS = (".jsonl", ".cancel", ".out", ".err", ".room", ".in")
_UNFINISHED = (".part", ".new")
_LEFTOVER_SECONDS = 3600.0

_FILE = re.compile(r"file-[0-9a-f]{32}")
_BATCH = re.compile(r"batch_[0-9a-f]{32}")


class BatchFolder:
    """The folder of a server; several processes may use it."""

    def __init__(self, path: str) -> None:
        """Create the folder, or use the existing one.

        Raises:
            ConfigError: it cannot be used, or others can read it.
        """
        self._path = Path(path).absolute()
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._path.stat()
            (self._path / "lock").touch(0o600)
        except OSError as error:
            raise ConfigError(f"plugin.batch_routes.folder: {path!r}: {error.strerror}") from None
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"plugin.batch_routes.folder: {path!r}: expected a folder of this user with mode "
                f"0700, got mode {stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}"
            )

    def owner(self, name: str) -> OwnerFolder:
        """Return the part of a client."""
        hashed = hashlib.sha256(name.encode()).hexdigest()[:32]
        return OwnerFolder(self._path / hashed)

    def owners(self) -> Iterator[OwnerFolder]:
        """Yield the parts of all clients."""
        for path in self._path.iterdir():
            if path.is_dir():
                yield OwnerFolder(path)

    def open_batches(self, known: Collection[str] = ()) -> list[BatchPlace]:
        """Return the batches that have not ended, the oldest first.

        Args:
            known: ids of batches to leave out, which are not read.
        """
        places: list[tuple[int, BatchPlace]] = []
        for owner in self.owners():
            for place in owner.open_batches(known):
                if (record := _readable(place.path("json"), BatchRecord)) is not None:
                    places.append((record.order, place))
        return [place for _, place in sorted(places, key=lambda pair: pair[0])]

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Lock the folder for one process while the body runs; False if another one has it."""
        with (self._path / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def forget_old(self, seconds: float) -> None:
        """Delete expired files, batches that ended more than `seconds` ago, and leftovers."""
        for owner in self.owners():
            owner.forget_leftovers()
            owner.files()
            for record in owner.batches():
                batch = record.batch
                if batch.ended_at is not None and batch.ended_at + seconds < now():
                    owner.batch_place(batch.id).path("json").unlink(missing_ok=True)


class OwnerFolder:
    """The files and batches of one client."""

    def __init__(self, path: Path) -> None:
        """Use a folder, which may not be there yet."""
        self._path, self._files, self._batches = path, path / "files", path / "batches"

    @contextlib.contextmanager
    def reserving(self) -> Iterator[int]:
        """Yield the used bytes; no other process or thread reserves any while the body runs."""
        self._path.mkdir(mode=0o700, exist_ok=True)
        with _private(self._path / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.used_bytes()

    def used_bytes(self) -> int:
        """Return the bytes of all files, batches and records of the client, links counted once."""
        sizes: dict[tuple[int, int], int] = {}
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):  # it was deleted in this moment
                status = path.stat()
                sizes[status.st_dev, status.st_ino] = status.st_size
        return sum(sizes.values())

    def _paths(self) -> Iterator[os.DirEntry[str]]:
        for folder in (self._files, self._batches):
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                yield from entries

    def forget_ended(self, number: int) -> None:
        """Delete the records of the batches that ended first, until there are fewer than that."""
        open_names = {path.stem for path in self._batches.glob("*.in")}
        paths = list(self._batches.glob("batch_*.json"))
        if len(paths) < number:
            return
        ended = [path for path in paths if path.stem not in open_names]
        ended.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in ended[: len(paths) - number + 1]:
            path.unlink(missing_ok=True)

    def forget_leftovers(self) -> None:
        """Delete the parts without a record that a failed write or a killed process has left.

        A part gets its record while `reserving`. Uploads and changes of records write to their
        unfinished parts at any time, so that a recent write shows that they are in use.
        """
        with self.reserving():
            for path in map(Path, self._paths()):
                if path.suffix in _PARTS:
                    is_left = not path.with_suffix(".json").exists()
                else:
                    is_left = path.suffix in _UNFINISHED and _is_old(path)
                if is_left:
                    path.unlink(missing_ok=True)

    def files(self) -> list[FileObject]:
        """Return the files, the oldest first, and delete expired files."""
        files = []
        for record in _records(self._files, FileRecord):
            if record.file.expires_at <= now():
                self.delete_file(record.file.id)
            else:
                files.append(record)
        return [record.file for record in sorted(files, key=lambda record: record.order)]

    def file(self, file_id: str) -> FileObject | None:
        """Return a file; None if there is none, or it has expired."""
        if not _FILE.fullmatch(file_id):
            return None
        record = _read(self._files / f"{file_id}.json", FileRecord)
        return None if record is None or record.file.expires_at <= now() else record.file

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._files / f"{file_id}.jsonl"

    def reserve_file(self, file: FileObject) -> None:
        """Reserve the bytes of a file that `add_file` adds, while `reserving`."""
        _make(self._files)
        _set_size(self._part(file), file.bytes + RECORD_BYTES)

    def add_file(self, file: FileObject, order: int, content: IO[bytes]) -> None:
        """Add a file with reserved bytes; other processes see all of it or nothing."""
        part = self._part(file)
        try:
            with part.open("rb+") as target:
                shutil.copyfileobj(content, target, 1 << 20)
                target.flush()
                os.fsync(target.fileno())
                with self.reserving():
                    target.truncate()
                    os.fsync(target.fileno())
                    self.take_file(file, order, part)
        finally:
            part.unlink(missing_ok=True)

    def _part(self, file: FileObject) -> Path:
        return self._files / f"{file.id}.part"

    def take_file(self, file: FileObject, order: int, path: Path) -> None:
        """Create a file from another file of the folder, while `reserving`.

        Repeat this if it was interrupted.
        """
        _make(self._files)
        with contextlib.suppress(FileExistsError):
            os.link(path, self.content(file.id))
        _write(self._files / f"{file.id}.json", FileRecord(file=file, order=order))
        path.unlink()

    def delete_file(self, file_id: str) -> bool:
        """Delete a file; return whether there was one."""
        was_there = self.file(file_id) is not None
        if _FILE.fullmatch(file_id):
            (self._files / f"{file_id}.json").unlink(missing_ok=True)
            self.content(file_id).unlink(missing_ok=True)
        return was_there

    def batches(self) -> list[BatchRecord]:
        """Return the batches, the oldest first, as `BatchPlace.read` does."""
        records = sorted(_records(self._batches, BatchRecord), key=lambda record: record.order)
        return [self.batch_place(record.batch.id).as_now(record) for record in records]

    def batch_place(self, batch_id: str) -> BatchPlace:
        """Return the place of a batch that is there."""
        return BatchPlace(self, self._batches, batch_id)

    def find_batch(self, batch_id: str) -> BatchPlace | None:
        """Return the place of a batch; None if there is none of that id."""
        if not _BATCH.fullmatch(batch_id):
            return None
        place = self.batch_place(batch_id)
        return place if place.path("json").exists() else None

    def open_batches(self, known: Collection[str] = ()) -> list[BatchPlace]:
        """Return the unfinished batches, without some ids."""
        names = {path.stem for path in self._batches.glob("*.in")}
        places = [self.batch_place(name) for name in names.difference(known)]
        return [place for place in places if place.path("json").exists()]

    def add_batch(self, record: BatchRecord) -> None:
        """Add a batch of a file of this client.

        Raises:
            FileNotFoundError: the file is gone.
        """
        _make(self._batches)
        place = self.batch_place(record.batch.id)
        os.link(self.content(record.batch.input_file_id), place.path("in"))
        try:
            place.write(record)
        except BaseException:
            place.path("in").unlink()
            raise


class BatchPlace:
    """The files of one batch."""

    def __init__(self, owner: OwnerFolder, path: Path, batch_id: str) -> None:
        self.owner, self.id = owner, batch_id
        self._path = path

    def path(self, suffix: str) -> Path:
        """Return the path of a part of it."""
        return self._path / f"{self.id}.{suffix}"

    def read(self) -> BatchRecord:
        """Return the batch; its status is `cancelling` after a request to cancel it."""
        record = _read(self.path("json"), BatchRecord)
        assert record is not None
        return self.as_now(record)

    def as_now(self, record: BatchRecord) -> BatchRecord:
        """Return the batch that was read, which may be about to be cancelled."""
        batch = record.batch
        with contextlib.suppress(FileNotFoundError):
            requested_at = int(self.path("cancel").stat().st_mtime)
            if batch.status in ("validating", "in_progress"):
                batch.status, batch.cancelling_at = "cancelling", requested_at
        return record

    def write(self, record: BatchRecord) -> None:
        """Keep the batch as it is now."""
        _write(self.path("json"), record)

    def reserve(self, size: int) -> None:
        """Reserve so many bytes for its answers and last records, while `OwnerFolder.reserving`."""
        _set_size(self.path("room"), size)

    @property
    def reserved_bytes(self) -> int:
        """The bytes that are reserved for it."""
        path = self.path("room")
        return path.stat().st_size if path.exists() else 0

    def cancel(self) -> None:
        """Let the process that answers it cancel it."""
        self.path("cancel").touch(0o600)

    @property
    def is_cancelled(self) -> bool:
        """Whether it is to be cancelled."""
        return self.path("cancel").exists()

    def close(self) -> None:
        """Remove the files that an ended batch no longer needs."""
        for suffix in ("cancel", "out", "err", "room", "in"):
            self.path(suffix).unlink(missing_ok=True)


def _make(path: Path) -> None:
    """Make a folder of an owner, for this user alone."""
    for folder in (path.parent, path):
        folder.mkdir(mode=0o700, exist_ok=True)


def _records(path: Path, type_: type[RecordT]) -> Iterator[RecordT]:
    for file in path.glob("*.json"):
        if (record := _readable(file, type_)) is not None:
            yield record


def _readable(path: Path, type_: type[RecordT]) -> RecordT | None:
    """Return one of many records; None if it cannot be read, because others can."""
    try:
        return _read(path, type_)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        _report(path, f"{type(error).__name__}: {error}")
        return None


@functools.lru_cache(maxsize=1024)
def _report(path: Path, problem: str) -> None:
    _log.error("%s cannot be read, and is left out: %s", path, problem)


def _read(path: Path, type_: type[RecordT]) -> RecordT | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except FileNotFoundError:
        return None


def _write(path: Path, record: FileRecord | BatchRecord) -> None:
    """Replace a file as a whole, also if the machine stops before the end."""
    new = path.with_suffix(".new")
    try:
        with _private(new) as target:
            target.write(msgspec.json.encode(record))
            target.flush()
            os.fsync(target.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _is_old(path: Path) -> bool:
    """Return whether a file is there, and nothing was written to it for a long time."""
    try:
        return path.stat().st_mtime + _LEFTOVER_SECONDS < now()
    except FileNotFoundError:
        return False


def _set_size(path: Path, size: int) -> None:
    """Make a file of that size without content, which takes no space on the disk."""
    with _private(path) as file:
        file.truncate(size)


def _private(path: Path) -> IO[bytes]:
    """Open a new file that its owner alone can read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")
