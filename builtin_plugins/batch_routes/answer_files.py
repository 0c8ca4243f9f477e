"""The files of answers of a batch: a line is in one as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec


def ids_of(*paths: Path) -> list[set[str]]:
    """Return the ids of the lines that have an answer, by file.

    Files end before the first line that is not whole, so that it is asked again.
    """
    names = []
    for path in paths:
        ids: set[str] = set()
        if path.exists():
            with path.open("rb+") as file:
                end = 0
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                    for line in file:
                        if not line.endswith(b"\n"):
                            break
                        ids.add(msgspec.json.decode(line, type=_Answered).custom_id)
                        end += len(line)
                file.truncate(end)
        names.append(ids)
    return names


class _Answered(msgspec.Struct):
    custom_id: str


@contextlib.contextmanager
def appending(path: Path) -> Iterator[BinaryIO]:
    """Open a file for lines that are written without a buffer, readable by its owner alone."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "ab", buffering=0) as file:
        yield file
        os.fsync(file.fileno())


def append(file: BinaryIO, line: bytes) -> None:
    """Write a line to a file of `appending`, as a whole or not at all.

    Raises:
        OSError: there is no room for it.
    """
    end, left = os.fstat(file.fileno()).st_size, memoryview(line)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(end)
        raise
