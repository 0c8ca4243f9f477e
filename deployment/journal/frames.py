"""The file of a journal: a mark, then frames with length, checksum and number.

A reader trusts nothing of it: not a length, not a number, not the content of a frame whose checksum
is right.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from hardpoint.plugins import HardpointError

from .records import FORMAT_VERSION, Compact, End, Event, JournalHeader, Keyframe, Record

MARK = b"hardpoint journal\n"
_VERSION = struct.Struct("<I")
_FRAME = struct.Struct("<IIQ")  # length of the payload, CRC-32 of number and payload, number
_NUMBER = struct.Struct("<Q")
MOST_BYTES = 1 << 28
"""Of a frame's payload: 256 MiB."""
START_BYTES = len(MARK) + _VERSION.size
FRAME_BYTES = _FRAME.size
"""Of a frame, in addition to its payload."""


def start_of_file() -> bytes:
    """Return the bytes before the first frame."""
    return MARK + _VERSION.pack(FORMAT_VERSION)


def frame_head(payload: bytes, number: int) -> bytes:
    """Return the bytes before a payload."""
    checksum = zlib.crc32(payload, zlib.crc32(_NUMBER.pack(number)))
    return _FRAME.pack(len(payload), checksum, number)


class JournalError(HardpointError):
    """A journal cannot be read, or cannot be replayed here; the message has the place."""


class JournalReader:
    """Reads a journal record by record.

    Attributes:
        path: the file.
        offset: offset of the frame that is read next.
        is_ended: whether the record of the end was read; one that an engine left when it was killed
            has none.
    """

    def __init__(self, path: Path | str, *, until_damage: bool = False) -> None:
        """Name the file.

        Args:
            path: path of the file.
            until_damage: whether damage ends the records, instead of being an error.
        """
        self.path = Path(path)
        self.offset = 0
        self.is_ended = False
        self._until_damage = until_damage
        self._decoder = msgspec.msgpack.Decoder(Record)

    def records(self) -> Iterator[Record]:
        """Yield the records; the first one is a JournalHeader.

        Raises:
            JournalError: the file cannot be read, is of another version, or damaged; with the
                offset, and what was expected there.
        """
        try:
            size = self.path.stat().st_size
            file = self.path.open("rb")
        except OSError as cause:
            raise JournalError(f"journal {str(self.path)!r}: cannot be read: {cause}") from cause
        with file:
            self._read_start(file)
            number = 0
            compact = Compact()
            while self.offset < size or not number:
                try:
                    record = self._record(file, size, number)
                    if isinstance(record, Keyframe):
                        compact = Compact()
                    if isinstance(record, Event):
                        record = self._expanded(compact, record)
                except JournalError:
                    if self._until_damage and number:
                        return
                    raise
                yield record
                number += 1

    def _read_start(self, file: BinaryIO) -> None:
        start = file.read(START_BYTES)
        if start[: len(MARK)] != MARK:
            raise self._wrong(f"expected a journal, which begins with {MARK!r}, got {start[:18]!r}")
        if len(start) < START_BYTES:
            raise self._wrong(f"expected {START_BYTES} bytes, the file ends after {len(start)}")
        (version,) = _VERSION.unpack(start[len(MARK) :])
        if version != FORMAT_VERSION:
            self.offset = len(MARK)
            raise self._wrong(
                f"expected version {FORMAT_VERSION} of the format, got {version}; read it with the "
                "Hardpoint that wrote it"
            )
        self.offset = START_BYTES

    def _record(self, file: BinaryIO, size: int, number: int) -> Record:
        left = size - self.offset
        if left < FRAME_BYTES:
            raise self._wrong(f"expected a frame of {FRAME_BYTES} bytes or more, {left} are left")
        length, checksum, frame_number = _FRAME.unpack(file.read(FRAME_BYTES))
        if length > MOST_BYTES:
            raise self._wrong(f"expected a frame of at most {MOST_BYTES} bytes, got {length}")
        if length > left - FRAME_BYTES:
            raise self._wrong(
                f"expected a frame of {length} bytes, {left - FRAME_BYTES} are left: the file was "
                "cut, or its writer was killed"
            )
        payload = file.read(length)
        if zlib.crc32(payload, zlib.crc32(_NUMBER.pack(frame_number))) != checksum:
            raise self._wrong(f"expected the checksum {checksum:08x}, the frame has another one")
        if frame_number != number:
            raise self._wrong(f"expected frame {number}, got frame {frame_number}")
        try:
            record: Record = self._decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as cause:
            raise self._wrong(f"expected a record, got another one: {cause}") from cause
        if (number == 0) != isinstance(record, JournalHeader):
            expected = "another record than a header" if number else "a header"
            raise self._wrong(f"expected {expected}, got a record {type(record).__name__!r}")
        if self.is_ended:
            raise self._wrong("expected nothing after the end")
        self.offset += FRAME_BYTES + length
        self.is_ended = isinstance(record, End)
        return record

    def _expanded(self, compact: Compact, event: Event) -> Event:
        try:
            return compact.expand(event)
        except ValueError as cause:
            raise self._wrong(
                f"expected an event that fits the events before it: {cause}"
            ) from cause

    def _wrong(self, problem: str) -> JournalError:
        return JournalError(f"journal {str(self.path)!r}: offset {self.offset}: {problem}")
