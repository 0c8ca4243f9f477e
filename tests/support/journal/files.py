"""Files of journals: changed, or written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from hardpoint.host.system.encoding import Encoder
from hardpoint.journal.frames import JournalReader, frame_head, start_of_file
from hardpoint.journal.records import Arrival, Compact, Event, JournalHeader, Keyframe, Record
from hardpoint.plugins import EngineCoreRequest


def records_of(path: Path) -> list[Record]:
    """Return the records of a journal."""
    return list(JournalReader(path).records())


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a journal."""
    compact, data = Compact(), start_of_file()
    for number, record in enumerate(records):
        if isinstance(record, Keyframe):
            compact = Compact()
        shrunk = compact.shrink(record) if isinstance(record, Event) else record
        payload = msgspec.msgpack.encode(shrunk)
        data += frame_head(payload, number) + payload
    path.write_bytes(data)


def with_header(path: Path, change: Callable[[JournalHeader], JournalHeader]) -> None:
    """Replace the header of a journal by the result of `change`."""
    header, *rest = records_of(path)
    assert isinstance(header, JournalHeader)
    write_records(path, [change(header), *rest])


def of_other_torch(header: JournalHeader) -> JournalHeader:
    """Return the header of another build."""
    return msgspec.structs.replace(header, build=msgspec.structs.replace(header.build, torch="1.0"))


def arrival_of(request: EngineCoreRequest, arrived: float | None = None) -> Arrival:
    """Return the record of a request that came."""
    frames = [bytes(frame) for frame in Encoder(inline_below=1 << 30).encode(request)]
    return Arrival(request.request_id, frames, arrived=arrived)
