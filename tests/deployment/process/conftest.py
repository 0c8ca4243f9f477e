"""Engine processes that run a few lines of a test's own, and served loops."""

from __future__ import annotations

import os

import pytest
from support.core.fake_engine import PlayedProcess
from support.core.io_harness import Served
from support.core.launch_harness import CHILD, PARENT, launch, write_child

from hardpoint.process.client import process_client
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.engine_process import EngineProcess
from hardpoint.process.launch import Launch


@pytest.fixture
def child(tmp_path):
    """Write a child program that does `body`; start it with keyword arguments of `start`."""
    started = []

    def start(body: str, plan: Launch | None = None, **options) -> EngineProcess:
        program = write_child(tmp_path, body)
        process = EngineProcess.start(plan or launch(), program=program, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close(grace_s=0)


@pytest.fixture
def parent(tmp_path):
    """Return the text of a parent program that has `go()`, with a module beside it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "beside.py").write_text("NAME = 'beside'")

    def text(child_body: str = CHILD) -> str:
        program = write_child(tmp_path, child_body)
        return PARENT.format(lib=str(tmp_path / "lib"), program=str(program))

    return text


@pytest.fixture
def serve(tmp_path):
    """Start loops with their threads and clients; all are closed when the test ends."""
    opened = []

    def start(*args, **options):
        served = Served(tmp_path, *args, **options)
        opened.append(served)
        return served

    yield start
    for served in opened:
        served.close(has_clients=False)
        for client in served.clients:
            client.close()


@pytest.fixture
def played(monkeypatch):
    """A process for a connection, replaced by an engine of the test."""
    there = []

    class Sockets(EngineSockets):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            there.append(self)

    monkeypatch.setattr(process_client, "EngineSockets", Sockets)
    process = PlayedProcess(there)
    yield process
    process.engine.close()
    os.close(process.reader)
