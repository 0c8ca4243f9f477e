"""Replays that force tokens: faults of a ring, interrupts, the last step, resumed requests."""

from __future__ import annotations

import contextlib
import shutil

import pytest
from support.journal.files import of_other_torch, records_of, with_header, write_records
from support.journal.schedules import open_recorded
from support.plugins.returning import Raising

from hardpoint import LLM, SamplingParams
from hardpoint.errors import EngineDeadError
from hardpoint.journal.records import Event, Keyframe
from hardpoint.journal.replay import replay
from hardpoint.journal.writer import RingWriter
from hardpoint.plugins import EngineCoreRequest
from hardpoint.plugins.requests import ResumedOutputs
from hardpoint.testing import scripted_config, write_scripted_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True)
AT_KEYFRAME = "it begins at a keyframe: plans are not compared"
RING = {"journal_ring": True, "journal_bytes": 1 << 16}


def record_until_it_raises(folder, path, **engine) -> None:
    """Record some long requests; prompts are computed slowly."""
    config = {
        "max_model_len": 512,
        "scheduler": {"max_num_batched_tokens": 24},
        "executor": {"use": "support.plugins.returning:Raising"},
        "engine": {"journal": str(path), **engine},
    }
    opened = open_recorded(scripted_config(folder, config))
    for number in range(6):
        opened.add_request(f"r{number}", [number] * 20, PARAMS)
    with contextlib.closing(opened):
        for _ in range(150):  # which a ring has no room for
            opened.abort_requests(opened.add_request("short", [7] * 100, PARAMS))
            opened.step()
        while opened.has_unfinished_requests():
            opened.step()


@pytest.fixture(scope="module")
def faulty_ring(scripted, tmp_path_factory):
    """The ring of an engine with a failed last step; it has lost everything before a keyframe."""
    path = tmp_path_factory.mktemp("faulty") / "journal"
    with pytest.MonkeyPatch.context() as recording:
        recording.setattr(Raising, "length", 450)
        with pytest.raises(EngineDeadError):
            record_until_it_raises(scripted, path, **RING)
    assert isinstance(records_of(path)[1], Keyframe)
    return path


@pytest.fixture
def faulty(faulty_ring, tmp_path, monkeypatch):
    """A copy of the ring, and steps that fail as in its engine."""
    monkeypatch.setattr(Raising, "length", 450)
    return shutil.copy(faulty_ring, tmp_path / "journal")


def last_part(path) -> None:
    """Cut a ring before its last keyframe, as if there were no more memory."""
    header, *rest = records_of(path)
    last = max(place for place, record in enumerate(rest) if isinstance(record, Keyframe))
    write_records(path, [header, *rest[last:]])


@pytest.mark.parametrize("is_late", [False, True], ids=["whole ring", "soon after a keyframe"])
def test_a_fault_that_comes_again_is_the_same(faulty, is_late):
    if is_late:  # the prompt is computed again, so that the fault comes some steps later
        last_part(faulty)
    report = replay(faulty)
    assert report.difference is None, str(report.difference)
    assert report.tokens > 0
    assert report.notes[0] == AT_KEYFRAME
    number = len(records_of(faulty)) - 3  # without header and end, from 0
    assert report.notes[1] == f"event {number} raised RuntimeError again"
    assert report.notes[2].endswith("events: a step failed")


def test_a_fault_that_does_not_come_again_is_a_difference(faulty, monkeypatch):
    monkeypatch.setattr(Raising, "error", None)
    difference = replay(faulty).difference
    assert difference is not None
    assert difference.what == "error of the call 'step'"
    assert difference.event == len(records_of(faulty)) - 3
    assert difference.recorded.endswith("RuntimeError: no step today")
    assert difference.own == "none"


def test_a_replay_can_begin_at_each_keyframe_of_a_change(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(RingWriter, "is_due", True)  # a keyframe after each event
    path = tmp_path / "journal"
    tables = {"engine": {"journal": str(path), "journal_ring": True}}
    params = SamplingParams(temperature=0.0, max_tokens=4, plugin_args={"bias": {"by": 3.0}})
    with LLM(config=scripted_config(scripted, tables)) as llm:
        llm.plugins.set_policy("fair")
        llm.plugins.change(enable=["support.broken.processors:Bias"])
        llm.generate([[7] * 9], params)
    calls = [
        place
        for place, record in enumerate(records_of(path))
        if isinstance(record, Event) and record.method == "live_change"
    ]
    assert len(calls) >= 8
    for place in calls:
        header, *records = records_of(path)
        assert isinstance(records[place], Keyframe)
        write_records(tmp_path / "part", [header, *records[place:]])
        report = replay(tmp_path / "part")
        assert (report.difference, report.notes) == (None, [AT_KEYFRAME])
        assert report.tokens == 4


@pytest.fixture(scope="module")
def other_build(scripted, tmp_path_factory):
    """A whole journal of another build; nobody writes to it."""
    path = tmp_path_factory.mktemp("other") / "journal"
    with pytest.MonkeyPatch.context() as recording:
        recording.setattr(Raising, "error", None)
        record_until_it_raises(scripted, path)
    with_header(path, of_other_torch)
    return path


def test_a_fault_that_comes_here_alone_is_a_difference(other_build):
    report = replay(other_build, anyway=True)
    assert report.difference is not None
    assert report.difference.recorded == "none"
    assert "no step today" in report.difference.own
    assert 0 < report.tokens < 6 * PARAMS.max_tokens


def test_nothing_is_played_after_the_last_step(other_build, monkeypatch):
    monkeypatch.setattr(Raising, "error", None)
    report = replay(other_build, anyway=True, until=30)
    assert report.is_same
    assert report.steps == 30
    assert 0 < report.tokens < 6 * 30
    assert report.notes[-1] == "stopped before step 31"


@pytest.mark.parametrize(
    ("engine", "first", "last"),
    [({}, [], []), (RING, [AT_KEYFRAME], ["a step failed"])],
    ids=["whole", "ring"],
)
def test_an_interrupt_ends_a_replay(scripted, tmp_path, monkeypatch, engine, first, last):
    path = tmp_path / "journal"
    monkeypatch.setattr(Raising, "length", 450)
    monkeypatch.setattr(Raising, "error", KeyboardInterrupt())
    with pytest.raises(EngineDeadError):
        record_until_it_raises(scripted, path, **engine)
    report = replay(path)
    assert report.is_same
    interrupted = next(note for note in report.notes if "KeyboardInterrupt" in note)
    assert interrupted.startswith("KeyboardInterrupt ended the engine in event ")
    others = [note.rpartition(" events: ")[2] for note in report.notes if note != interrupted]
    assert others == first + last


def test_a_request_that_went_on_goes_on_with_the_tokens_of_the_journal(tmp_path):
    """Its first own token is another one here, which its outputs before are needed for."""
    folder, path = write_scripted_model(tmp_path / "model"), tmp_path / "journal"
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[7] * 20,
        params=params,
        resumed=ResumedOutputs([1, 2, 3]),
    )
    engine = open_recorded(scripted_config(folder, {"engine": {"journal": str(path)}}))
    engine.add_request("r", request)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    write_scripted_model(folder, seed=3)
    report = replay(path, anyway=True)
    assert report.difference is not None
    assert report.difference.what == "output 3"
    assert report.num_differing == 1
    assert report.tokens == params.max_tokens - 3
