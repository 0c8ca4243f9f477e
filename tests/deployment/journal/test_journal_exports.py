"""Exports of a journal: when requests came, which blocks they share, and files that are left."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from support.journal.files import arrival_of, records_of, with_header, write_records

from hardpoint import SamplingParams
from hardpoint.cli import main
from hardpoint.journal.frames import JournalError
from hardpoint.journal.records import Event
from hardpoint.journal.replay import JournalFile, replay
from hardpoint.plugins import EngineCoreRequest
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature

SIZE = 8  # of blocks, in the journal of the fixture


def request(name: str, length: int = 3 * SIZE, **fields) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=[7] * length, params=SamplingParams(), **fields
    )


def with_events(journal, events) -> float:
    """Replace the events of a journal; return the engine's clock at its begin."""
    header = records_of(journal)[0]
    write_records(journal, [header, *events(header.clock)])
    return header.clock


def exported(journal, form: str = "redacted") -> list[dict]:
    return [json.loads(line) for line in JournalFile(journal).export(form)]


def test_requests_are_shown_when_they_came(journal):
    """Arrivals of another process wait for the running step; the call reads other clocks."""
    with_events(
        journal,
        lambda start: [
            Event("add", [arrival_of(request("late", 9), start + 2.0)]),
            Event("add", [arrival_of(request("early", 1), start + 1.0)], clock=[start + 3.0]),
            Event("add", [arrival_of(request("here", 2))], clock=[start + 1.5, start + 4.0]),
            Event("step", clock=[start + 5.0]),
            Event("add", [arrival_of(request("last", 3))]),
        ],
    )
    lines = exported(journal)
    assert [line["timestamp"] for line in lines] == [1000, 1500, 2000, 5000]
    assert [line["input_length"] for line in lines] == [1, 2, 9, 3]
    assert [line["request"] for line in lines] == [0, 1, 2, 3]
    assert [line["hash_ids"] for line in lines] == [[0], [1], [2, 3], [4]]
    (early,) = JournalFile(journal).request("early")
    assert early.split()[:2] == ["1.000000", "s"]


def test_the_call_reads_the_clock_first_when_a_request_came(journal):
    """So that the first reading in an event is the time of its arrival."""
    adds = [
        record
        for record in records_of(journal)
        if isinstance(record, Event) and record.call in ("add", "add_all")
    ]
    assert adds
    assert all(arrival.arrived is None for event in adds for arrival in event.arrivals)
    assert all(event.clock for event in adds)


def ids(journal, *requests: EngineCoreRequest) -> list[list[int]]:
    with_events(journal, lambda _: [Event("add", [arrival_of(request)]) for request in requests])
    return [line["hash_ids"] for line in exported(journal)]


def with_image(name: str, identifier: str, offset: int = SIZE) -> EngineCoreRequest:
    return request(name, features=[MultiModalFeature(identifier, offset, 4)])


def test_blocks_with_other_images_have_other_numbers(journal):
    requests = [
        request("plain"),
        with_image("a", "cat"),
        with_image("b", "dog"),
        with_image("c", "cat"),
        with_image("d", "cat", SIZE + 1),
    ]
    assert ids(journal, *requests) == [[0, 1, 2], [0, 3, 4], [0, 5, 6], [0, 3, 4], [0, 7, 8]]


def with_rows(name: str, rows: np.ndarray) -> EngineCoreRequest:
    mask = [not SIZE <= place < SIZE + 4 for place in range(3 * SIZE)]
    return request(name, prompt_embeds=rows, prompt_is_token_ids=mask)


def test_blocks_with_other_embeddings_have_other_numbers(journal):
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    requests = [
        request("plain"),
        with_rows("a", rows),
        with_rows("b", rows + 1),
        with_rows("c", rows.astype(np.float16)),
        request("d", 2 * SIZE, prompt_embeds=np.zeros((2 * SIZE, 2), np.float32)),
    ]
    assert ids(journal, *requests) == [[0, 1, 2], [0, 3, 4], [0, 5, 6], [0, 3, 4], [7, 8]]
    with pytest.raises(JournalError, match="request 'a': prompt_embeds: expected a row for each"):
        ids(journal, with_rows("a", rows[:3]))


def test_blocks_of_other_adapters_and_salts_have_other_numbers(journal):
    requests = [
        request("plain", SIZE),
        request("a", SIZE, lora=LoRARequest("tuned", 1, content_hash="first")),
        request("b", SIZE, lora=LoRARequest("tuned", 1, content_hash="second")),
        request("c", SIZE, lora=LoRARequest("other", 2, content_hash="first")),
        request("d", SIZE, cache_salt="mine"),
    ]
    assert ids(journal, *requests) == [[0], [1], [2], [1], [3]]


def test_an_export_that_fails_leaves_no_file(journal, tmp_path, capsys):
    data = journal.read_bytes()
    journal.write_bytes(data[:-5])
    output = tmp_path / "trace"
    assert main(["journal", "export", str(journal), str(output)]) == 2
    assert "offset" in capsys.readouterr().err
    assert not output.exists()
    journal.write_bytes(data)
    assert main(["journal", "export", str(journal), str(output)]) == 0
    assert main(["journal", "export", str(journal), str(output)]) == 2
    assert f"OUTPUT: expected a new file, {str(output)!r} exists" in capsys.readouterr().err
    assert len(output.read_text().splitlines()) > 20


@pytest.mark.parametrize("options", [["--json"], ["--until", "3"], ["--replan", "policy=fair"]])
def test_the_history_of_a_request_runs_no_engine(journal, capsys, options):
    assert main(["replay", str(journal), "--request", "r1", *options]) == 2
    message = f"{options[0]}: expected no --request with it, which runs no engine"
    assert message in capsys.readouterr().err


def test_a_kind_of_plugins_that_is_not_known_here(journal):
    def changed(header):
        entries = [
            msgspec.structs.replace(entry, kind="crystal_balls") if entry.name == "top_k" else entry
            for entry in header.manifest.entries
        ]
        manifest = msgspec.structs.replace(header.manifest, entries=tuple(entries))
        return msgspec.structs.replace(header, manifest=manifest)

    with_header(journal, changed)
    expected = r"plugin 'top_k' \(crystal_balls\): hardpoint \S+, here not enabled"
    with pytest.raises(JournalError, match=expected):
        replay(journal)
    assert replay(journal, anyway=True).is_same


def with_config(journal, **tables) -> None:
    def changed(header):
        return msgspec.structs.replace(header, config=header.config | tables)

    with_header(journal, changed)


@pytest.mark.parametrize("table", [{}, {"block_size": "many"}, {"block_size": 0}, 5])
def test_a_configuration_without_a_size_of_blocks(journal, table):
    with_config(journal, kv_cache=table)
    with pytest.raises(JournalError, match=r"journal '.*': config\.kv_cache"):
        exported(journal)
    assert len(exported(journal, "mooncake")) > 10


@pytest.mark.parametrize("table", [5, {"use": 5}, {"other": 5}])
def test_a_configuration_whose_connector_is_none(journal, table):
    with_config(journal, kv_connector=table)
    expected = r"its configuration is none of this Hardpoint: kv_connector"
    with pytest.raises(JournalError, match=expected):
        JournalFile(journal).replan("fair")
