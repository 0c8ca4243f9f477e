"""A reader of journals trusts nothing: each damage is one error that names the offset."""

from __future__ import annotations

import random
import stat
import struct
import tracemalloc

import msgspec
import pytest

from hardpoint.journal.frames import (
    FRAME_BYTES,
    MARK,
    MOST_BYTES,
    START_BYTES,
    JournalError,
    JournalReader,
    frame_head,
    start_of_file,
)
from hardpoint.journal.records import End, Event, JournalHeader
from hardpoint.journal.replay import Journal, replay


def read(path) -> list:
    return list(JournalReader(path).records())


def frames_of(data: bytes) -> list[tuple[int, bytes]]:
    """Return offset and payload of each frame."""
    frames, offset = [], START_BYTES
    while offset < len(data):
        length = struct.unpack_from("<I", data, offset)[0]
        frames.append((offset, data[offset + FRAME_BYTES : offset + FRAME_BYTES + length]))
        offset += FRAME_BYTES + length
    return frames


def written(path, payloads) -> None:
    data = start_of_file()
    for number, payload in enumerate(payloads):
        data += frame_head(payload, number) + payload
    path.write_bytes(data)


def test_a_journal_begins_with_its_header_and_ends_with_a_reason(journal):
    records = read(journal)
    assert isinstance(records[0], JournalHeader)
    assert records[-1] == End("the engine was closed", len(records) - 2)
    assert all(isinstance(record, Event) for record in records[1:-1])


def test_only_the_owner_reads_it(recorded):
    assert stat.S_IMODE((recorded / "journal").stat().st_mode) == 0o600


@pytest.mark.parametrize("left", [0, 5, len(MARK) + 2, START_BYTES, START_BYTES + 7])
def test_a_file_that_is_cut_at_its_begin(journal, left):
    journal.write_bytes(journal.read_bytes()[:left])
    with pytest.raises(JournalError, match=r"journal '.*': offset \d+: expected"):
        read(journal)


def test_a_file_that_is_cut_anywhere(journal):
    data = journal.read_bytes()
    frames = frames_of(data)
    borders = {offset for offset, _ in frames}
    draw = random.Random(0)
    for left in draw.sample(range(START_BYTES + 1, len(data)), 60):
        journal.write_bytes(data[:left])
        if left in borders:
            continue
        begun = max(offset for offset in borders if offset < left)
        with pytest.raises(JournalError) as caught:
            read(journal)
        assert f"offset {begun}: expected a frame of " in str(caught.value)
        assert str(left - begun - FRAME_BYTES) in str(caught.value) or "are left" in str(
            caught.value
        )


def test_a_killed_engine_leaves_a_journal_without_an_end(journal):
    data = journal.read_bytes()
    journal.write_bytes(data[: frames_of(data)[-1][0]])
    report = replay(journal)
    assert report.is_same
    assert report.notes == ["the journal has no end: its engine was killed, or is running"]


def test_a_flipped_bit(journal):
    data = journal.read_bytes()
    draw = random.Random(1)
    for place in [0, len(MARK), *draw.sample(range(START_BYTES, len(data)), 80)]:
        flipped = bytearray(data)
        flipped[place] ^= 1 << draw.randrange(8)
        journal.write_bytes(flipped)
        with pytest.raises(JournalError, match=r"offset \d+: expected"):
            read(journal)


def test_another_version(journal):
    data = journal.read_bytes()
    journal.write_bytes(MARK + struct.pack("<I", 99) + data[START_BYTES:])
    expected = (
        "offset 18: expected version 1 of the format, got 99; read it with the Hardpoint that"
    )
    with pytest.raises(JournalError, match=expected):
        read(journal)


def test_another_file(journal):
    journal.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(
        JournalError, match=r"offset 0: expected a journal, which begins with b'hard"
    ):
        read(journal)


def test_a_huge_length_takes_no_memory(journal):
    data = bytearray(journal.read_bytes())
    struct.pack_into("<I", data, START_BYTES, 0xFFFFFFFF)
    journal.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(JournalError, match=f"at most {MOST_BYTES} bytes, got 4294967295"):
        read(journal)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million items
        b"\xdb\xff\xff\xff\xffabc",
        b"\x91" * 5000,
        msgspec.msgpack.encode(["event", 3]),
        msgspec.msgpack.encode(["event", "step", [["r", "not frames"]]]),
        msgspec.msgpack.encode(["other"]),
        msgspec.msgpack.encode({"a": 1}),
    ],
    ids=["empty", "reserved", "huge array", "huge text", "deep", "type", "nested", "tag", "map"],
)
def test_a_hostile_record_with_a_right_checksum(journal, payload):
    payloads = [content for _, content in frames_of(journal.read_bytes())]
    offset = frames_of(journal.read_bytes())[2][0]
    written(journal, [*payloads[:2], payload, *payloads[3:]])
    tracemalloc.start()
    with pytest.raises(
        JournalError, match=f"offset {offset}: expected a record, got another one: "
    ):
        read(journal)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


def test_frames_that_are_left_out_or_come_twice(journal):
    data = journal.read_bytes()
    frames = frames_of(data)
    (third, _), (fourth, _) = frames[3], frames[4]
    journal.write_bytes(data[:third] + data[fourth:])
    with pytest.raises(JournalError, match=f"offset {third}: expected frame 3, got frame 4"):
        read(journal)
    journal.write_bytes(data[:fourth] + data[third:])
    with pytest.raises(JournalError, match=f"offset {fourth}: expected frame 4, got frame 3"):
        read(journal)


def test_records_in_a_wrong_place(journal):
    payloads = [content for _, content in frames_of(journal.read_bytes())]
    written(journal, payloads[1:])
    with pytest.raises(JournalError, match="offset 22: expected a header, got a record 'Event'"):
        read(journal)
    written(journal, [payloads[0], *payloads])
    with pytest.raises(JournalError, match="expected another record than a header, got"):
        read(journal)
    written(journal, [*payloads, payloads[-1]])
    with pytest.raises(JournalError, match="expected nothing after the end"):
        read(journal)


def test_a_result_that_does_not_fit_its_plan(journal):
    payloads = [content for _, content in frames_of(journal.read_bytes())]
    decoder, encoder = msgspec.msgpack.Decoder(), msgspec.msgpack.Encoder()
    for number, payload in enumerate(payloads):
        event = decoder.decode(payload)
        results = event[15] if event[0] == "event" else []
        if results and isinstance(results[0][1], list):
            results[0][1].append([1])
            payloads[number] = encoder.encode(event)
            break
    written(journal, payloads)
    with pytest.raises(
        JournalError, match=r"the result of step \d+ has tokens of \d+ requests, its"
    ):
        read(journal)


def test_what_is_before_damage_is_replayed_anyway(journal):
    data = journal.read_bytes()
    offset = frames_of(data)[40][0]
    journal.write_bytes(data[: offset + 5])
    with pytest.raises(JournalError, match=f"offset {offset}: "):
        replay(journal)
    report = replay(journal, anyway=True)
    assert report.is_same
    assert report.steps > 5


def test_hostile_requests_and_configurations(journal):
    payloads = [content for _, content in frames_of(journal.read_bytes())]
    header = msgspec.msgpack.decode(payloads[0])
    header[3]["scheduler"]["max_num_seqs"] = "many"
    written(journal, [msgspec.msgpack.encode(header), *payloads[1:]])
    with pytest.raises(
        JournalError, match=r"its configuration is none of this Hardpoint: scheduler\."
    ):
        replay(journal)
    arrival = ["r1", [b"\x81\xa1x\x01"], False, None]
    event = msgspec.msgpack.encode(["event", "add", [arrival]])
    written(journal, [payloads[0], event])
    with pytest.raises(JournalError, match="journal: request 'r1': "):
        replay(journal)
    written(journal, [payloads[0], msgspec.msgpack.encode(["event", "explode"])])
    with pytest.raises(JournalError, match="expected a call of an engine core, got 'explode'"):
        replay(journal)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(JournalError, match="cannot be read: .*No such file"):
        Journal(tmp_path / "none")
