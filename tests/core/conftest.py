"""Engine processes that run a few lines of a test's own, and served loops."""

from __future__ import annotations

import os

import pytest
from support.core.fake_engine import PlayedProcess
from support.core.io_harness import Served
from support.core.launch_harness import CHILD, PARENT, launch, write_child

from hardpoint import typed
from hardpoint.core.build import build_engine
from hardpoint.core.client import process_client
from hardpoint.core.client.sockets import EngineSockets
from hardpoint.core.engine_process.launch import Launch
from hardpoint.core.engine_process.process import EngineProcess
from hardpoint.plugins import EngineConfig
from hardpoint.testing import scripted_config, scripted_engine


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
    """A process for a connection, in whose place there is an engine of the test."""
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


@pytest.fixture(scope="session")
def byte_tokenizer(scripted):
    """The scripted model's tokenizer: one token per byte."""
    engine = scripted_engine(scripted)
    engine.close()
    return engine.parts.tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["in_process", "own_process"])
def meddled(request, scripted):
    """An engine with the plugin `Meddler` of the test's module, here and in its own process."""
    config = scripted_config(
        scripted,
        {
            "engine": {"in_process": request.param},
            "plugins": {
                "enable": [{"use": f"{request.module.__name__}:Meddler", "name": "meddler"}]
            },
        },
    )
    engine = build_engine(typed.convert(config, EngineConfig, path=""))
    yield engine
    engine.close()
