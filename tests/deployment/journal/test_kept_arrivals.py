"""A recorder keeps requests for keyframes alone, and none once its journal is over."""

from __future__ import annotations

import gc
import itertools

import pytest
from support.internals import core_of
from support.journal.files import records_of
from support.journal.schedules import open_recorded
from support.plugins.returning import Raising

from hardpoint import SamplingParams
from hardpoint.journal.records import Arrival, End, Event, Keyframe
from hardpoint.plugins import EngineCoreRequest
from hardpoint.testing import scripted_config

PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def num_kept() -> int:
    gc.collect()
    return sum(isinstance(item, Arrival) for item in gc.get_objects())


def opened(folder, path, **engine):
    tables = {
        "engine": {"journal": str(path), "journal_bytes": 1 << 16, **engine},
        "executor": {"use": "support.plugins.returning:Raising"},
    }
    return open_recorded(scripted_config(folder, tables))


def add(engine, count: int) -> None:
    for number in range(count):
        engine.add_request(f"r{number}", [7] * 50, PARAMS)


def finish(core) -> None:
    while core.has_requests():
        core.step()


def core_request(name: str) -> EngineCoreRequest:
    return EngineCoreRequest(request_id=name, prompt_token_ids=[7] * 50, params=PARAMS)


def test_a_whole_journal_keeps_none_also_when_it_is_over(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(Raising, "error", None)
    before = num_kept()
    engine = opened(scripted, tmp_path / "journal")
    add(engine, 10)
    engine.step()
    assert num_kept() == before
    add(engine, 300)
    add(engine, 10)
    assert num_kept() == before
    engine.close()
    *_, end = records_of(tmp_path / "journal")
    assert isinstance(end, End)
    assert end.reason.startswith("it has reached engine.journal_bytes")


def test_a_ring_that_is_written_keeps_none(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(Raising, "error", KeyboardInterrupt())
    before = num_kept()
    engine = opened(scripted, tmp_path / "journal", journal_ring=True)
    core = core_of(engine)
    core.add_request(core_request("a"))
    core.add_requests([(core_request("b"), None, None)])
    assert num_kept() == before + 2
    with pytest.raises(KeyboardInterrupt):
        finish(core)
    monkeypatch.setattr(Raising, "error", None)
    core.add_request(core_request("c"))
    core.add_requests([(core_request("d"), None, None)])
    assert num_kept() == before
    finish(core)
    engine.close()


def test_a_keyframe_has_the_request_of_the_event_before_it(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(Raising, "error", None)
    engine = opened(scripted, tmp_path / "journal", journal_ring=True)
    add(engine, 300)
    engine.close()
    records = records_of(tmp_path / "journal")
    pairs = [
        (event, keyframe)
        for event, keyframe in itertools.pairwise(records)
        if isinstance(event, Event) and isinstance(keyframe, Keyframe)
    ]
    assert pairs
    for event, keyframe in pairs:
        assert keyframe.live[-1].arrival == event.arrivals[-1]
