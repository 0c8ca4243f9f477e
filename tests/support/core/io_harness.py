"""An engine's loop and its threads, with clients at the other end of real sockets."""

from __future__ import annotations

import time

import zmq

from hardpoint.core.engine.request_check import RequestCheck
from hardpoint.host.system.encoding import Decoder, Encoder
from hardpoint.plugins import EngineCoreOutputs
from hardpoint.process.engine.transport import EngineIO
from hardpoint.process.protocol import (
    END_MARKERS,
    EngineAddresses,
    EngineCoreReadyResponse,
    UtilityOutput,
)
from support.core.engine_harness import PATIENCE_S, LoopRig

READY = EngineCoreReadyResponse(manifest_hash="", max_model_len=200, num_gpu_blocks=64)
ME = b"\x00\x00"


class Client:
    """The other end, with the messages that it received."""

    def __init__(self, folder, number, *, receive_at_most=1000):
        self.input_address = f"ipc://{folder}/in{number}"
        self.output_address = f"ipc://{folder}/out{number}"
        self._context = zmq.Context()
        self.input = self._context.socket(zmq.ROUTER)
        self.input.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.input.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an engine that was cut comes back
        self.input.bind(self.input_address)
        self.output = self._context.socket(zmq.PULL)
        self.output.setsockopt(zmq.RCVHWM, receive_at_most)
        self.output.bind(self.output_address)
        self._decoder = Decoder(EngineCoreOutputs | UtilityOutput)
        self.tokens, self.errors, self.answers = {}, {}, {}
        self.ends, self.messages, self.end_marker = {}, 0, None

    def wait_until_ready(self):
        assert self.input.poll(PATIENCE_S * 1000)
        identity, *frames = self.input.recv_multipart()
        assert identity == ME
        return Decoder(EngineCoreReadyResponse).decode(frames)

    def send(self, kind, message):
        self.raw(bytes(kind), *Encoder().encode(message))

    def raw(self, *frames):
        self.input.send_multipart([ME, *frames])

    def read(self, seconds=0.01):
        """Take one message, if it comes in time."""
        if not self.output.poll(seconds * 1000):
            return False
        frames = self.output.recv_multipart()
        self.messages += 1
        if frames[0] in END_MARKERS:
            self.end_marker = frames[0]
            return True
        message = self._decoder.decode(frames)
        if isinstance(message, UtilityOutput):
            self.answers[message.call_id] = message
            return True
        for output in message.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                self.ends[output.request_id] = str(output.finish_reason)
                self.errors[output.request_id] = output.error
        return True

    def until(self, condition):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it did not come to that"
            self.read()

    def close(self):
        self._context.destroy(0)


class Served:
    """A loop with its threads, and clients.

    `check` looks at requests; `options` are those of EngineIO.
    """

    def __init__(
        self, folder, executor=None, *, clients=1, receive_at_most=1000, check=None, **options
    ):
        self.clients = [
            Client(folder, number, receive_at_most=receive_at_most) for number in range(clients)
        ]
        self.rig = LoopRig(executor, clients=clients, max_num_seqs=64)
        self.io = EngineIO(
            ME,
            EngineAddresses(
                inputs=[client.input_address for client in self.clients],
                outputs=[client.output_address for client in self.clients],
            ),
            self.rig.queues,
            check or RequestCheck(100_000),
            **options,
        )
        self.io.start(READY)
        self.rig._thread.start()
        for client in self.clients:
            assert client.wait_until_ready() == READY
        self.closed = False

    def close(self, *, failed=False, has_clients=True):
        if self.closed:
            return
        self.closed = True
        self.rig.loop.request_shutdown()
        self.rig.loop.request_shutdown()
        self.rig._thread.join(PATIENCE_S)
        self.io.close(failed=failed, has_clients=has_clients)
