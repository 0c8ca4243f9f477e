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

    def __init__(self, sockets):
        self.sockets = sockets
        self.launched = self.engine = None
        self.reader, self.writer = os.pipe()
        self.sentinels = [self.reader]

    def launch(self, launch):
        self.launched = launch
        self.engine = Engine(self.sockets[0], ADDRESS)
        self.engine.ready(
            EngineCoreReadyResponse(
                manifest_hash=launch.manifest.hash, max_model_len=64, num_gpu_blocks=8
            )
        )

    def failure(self):
        return None

    def close(self, grace_s=0.0):
        os.close(self.writer)  # the watcher wakes up


@pytest.fixture
def played(monkeypatch):
    """A process in whose place there is an engine of ours."""
    there = []

    class Sockets(EngineSockets):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            there.append(self)

    monkeypatch.setattr(engine_connection, "EngineSockets", Sockets)
    process = Process(there)
    yield process
    process.engine.close()
    os.close(process.reader)


def test_a_connection_gives_the_index_to_its_process_and_is_addressed_by_it(played):
    start = EngineStart(
        EngineConfig(), Origins(), Manifest(hardpoint="1", entries=()), engine_index=INDEX
    )
    connection = EngineConnection(start, lambda outputs: None, played)
    try:
        assert played.launched.engine_index == INDEX
        assert played.sockets[0].identity == ADDRESS
        connection.send(RequestType.ABORT, ["a"])
        kind, frame = played.engine.heard()
        assert (kind, frame) == (bytes(RequestType.ABORT), b"\x91\xa1a")
    finally:
        connection.close()
