"""The writers of journals alone: disks and memory that run out, and a failed step."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from hardpoint.journal import writer as module
from hardpoint.journal.records import Build, Event, JournalHeader
from hardpoint.journal.writer import JournalWriter, RingWriter
from hardpoint.plugins.component.manifest import Manifest

HEADER = JournalHeader(
    build=Build(
        hardpoint="0", python="3", torch="2", machine="m", device="cpu", dtype="float32",
        threads=1, operations="o", attention="a", ranks=1,
    ),
    manifest=Manifest(hardpoint="0", entries=()),
    config={},
    model="",
)  # fmt: skip


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
def test_an_error_ends_the_journal_and_holds_nobody_up(tmp_path, monkeypatch, caplog, error):
    caplog.set_level(logging.ERROR, "hardpoint")
    monkeypatch.setattr(module, "_WAIT_S", 60.0)
    writer = JournalWriter(tmp_path / "journal", 1 << 20, HEADER)
    writer.sync()
    may_fail, write = threading.Event(), os.write

    def fails(descriptor, data):
        if threading.current_thread().name != "EngineJournal":
            return write(descriptor, data)
        assert may_fail.wait(60)
        raise error

    monkeypatch.setattr(os, "write", fails)
    writer.write(Event("step"))
    threading.Timer(0.1, may_fail.set).start()
    writer.sync()  # its event is in the batch that fails, or behind it
    assert writer.why_over.startswith("it cannot be written: ")
    assert "the disk is too slow" not in caplog.text
    writer.close("closed")  # the end is, too
    assert "EngineJournal" not in {thread.name for thread in threading.enumerate()}


def test_the_end_of_a_ring_that_is_written_is_logged(tmp_path, caplog):
    """An engine in a program goes on after an interrupt; the file ends there."""
    path = tmp_path / "journal"
    writer = RingWriter(path, 1 << 20, HEADER)
    writer.write(Event("step"))
    writer.sync()
    assert path.exists()
    assert f"the journal {path} ends here: a step failed" in caplog.text
    writer.close("closed")
    assert not path.with_name("journal.previous").exists()
