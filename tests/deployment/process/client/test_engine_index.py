"""Which engine is which: the index in the launch, in the address, and on outputs."""

from __future__ import annotations

import contextlib
import queue

from support.core.engine_harness import PATIENCE_S, LoopRig, request

from hardpoint.plugins import EngineConfig, EngineCoreOutputs
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config import ConfigSources
from hardpoint.process.client.process_client import EngineStart, ProcessClient
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.engine.transport import EngineIO
from hardpoint.process.protocol import EngineCoreReadyResponse, RequestType

INDEX, ADDRESS = 258, b"\x02\x01"  # least significant byte first


def test_outputs_carry_the_index_of_their_engine():
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
            io.close(failed=False, has_clients=False)
    assert isinstance(message, EngineCoreOutputs)
    assert message.engine_index == INDEX


def test_a_client_gives_the_index_to_its_process_and_is_addressed_by_it(played):
    start = EngineStart(
        EngineConfig(), ConfigSources(), Manifest(hardpoint="1", entries=()), engine_index=INDEX
    )
    with contextlib.closing(ProcessClient(start, lambda outputs: None, played)) as client:
        assert played.launched.engine_index == INDEX
        assert played.sockets[0].identity == ADDRESS
        client.abort_requests(["a"])
        kind, frame = played.engine.heard()
        assert (kind, frame) == (bytes(RequestType.ABORT), b"\x91\xa1a")
