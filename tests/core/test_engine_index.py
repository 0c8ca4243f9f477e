"""Which engine is which: the index in the launch, in the address, and on outputs."""

from __future__ import annotations

import os
import queue

import pytest
from engine_harness import PATIENCE_S, LoopRig, request
from fake_engine import Engine

from hardpoint.core import engine_connection
from hardpoint.core.engine_connection import EngineConnection, EngineStart
from hardpoint.core.engine_io import EngineIO
from hardpoint.core.engine_sockets import EngineSockets
from hardpoint.core.wire import EngineCoreReadyResponse, RequestType
from hardpoint.plugins import EngineConfig, EngineCoreOutputs, Manifest, Origins

INDEX, ADDRESS = 258, b"\x02\x01"  # least significant byte first


def test_outputs_say_which_engine_they_come_from():
    sockets = EngineSockets(INDEX)
    assert sockets.identity == ADDRESS
    came = queue.SimpleQueue()
    sockets.read(came.put, came.put)
    with LoopRig() as rig:
        io = EngineIO(ADDRESS, sockets.addresses, rig.queues)
        io.start(EngineCoreReadyResponse(manifest_hash="", max_model_len=64, num_gpu_blocks=8))
        try:
            while sockets.poll_ready(100) is None:
                pass
            sockets.send(RequestType.ADD, request("a", max_tokens=3))
            message = came.get(timeout=PATIENCE_S)
        finally:
            sockets.close()
            io.close(failed=False, heard=False)
    assert isinstance(message, EngineCoreOutputs)
    assert message.engine_index == INDEX


class Process:
    """A process that does nothing but be there."""

    returncode = None
    pid = 7

    def __init__(self, launch):
        self.launch = launch
        self.reader, self.writer = os.pipe()
        self.sentinels = [self.reader]

    def failure(self):
        return None

    def close(self, grace_s=0.0):
        os.close(self.writer)  # the watcher wakes up


@pytest.fixture
def played(monkeypatch):
    """Have an engine of ours in the place of a process; return what there was."""
    there = []

    def start(launch, interpreter):
        process = Process(launch)
        sockets = there[0]
        engine = Engine(sockets, ADDRESS)
        ready = EngineCoreReadyResponse(
            manifest_hash=launch.manifest.hash, max_model_len=64, num_gpu_blocks=8
        )
        engine.ready(ready)
        there.extend([process, engine])
        return process

    class Sockets(EngineSockets):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            there.append(self)

    monkeypatch.setattr(engine_connection, "EngineSockets", Sockets)
    monkeypatch.setattr(engine_connection.EngineProcess, "start", start)
    yield there
    there[2].close()
    os.close(there[1].reader)


def test_a_connection_gives_the_index_to_its_process_and_is_addressed_by_it(played):
    start = EngineStart(
        EngineConfig(), Origins(), Manifest(hardpoint="1", entries=()), engine_index=INDEX
    )
    connection = EngineConnection(start, lambda outputs: None)
    try:
        sockets, process, engine = played
        assert process.launch.engine_index == INDEX
        assert sockets.identity == ADDRESS
        connection.send(RequestType.ABORT, ["a"])
        kind, frame = engine.heard()
        assert (kind, frame) == (bytes(RequestType.ABORT), b"\x91\xa1a")
    finally:
        connection.close()
