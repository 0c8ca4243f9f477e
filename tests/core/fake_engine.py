"""An engine that a test plays, at the other end of a client's real sockets."""

from __future__ import annotations

from typing import Any

import zmq

from hardpoint.core.engine_sockets import EngineSockets
from hardpoint.core.wire import Encoder, EngineCoreReadyResponse

READY = EngineCoreReadyResponse(manifest_hash="", max_model_len=64, num_gpu_blocks=8)


class Engine:
    """The other end."""

    def __init__(self, sockets: EngineSockets, identity: bytes | None = None) -> None:
        """Connect, by default as the engine that the sockets expect."""
        self.context = zmq.Context()
        self.input = self.context.socket(zmq.DEALER)
        self.input.setsockopt(zmq.IDENTITY, sockets.identity if identity is None else identity)
        self.input.setsockopt(zmq.RCVHWM, 1)
        self.input.connect(sockets.addresses.inputs[0])
        self.output = self.context.socket(zmq.PUSH)
        self.output.connect(sockets.addresses.outputs[0])

    def ready(self, message: Any = READY) -> None:
        """Say the first word, or another one in its place."""
        self.input.send_multipart([*map(bytes, Encoder().encode(message))])

    def heard(self, seconds: float = 20.0) -> list[bytes] | None:
        """Wait for the next message of the client; None if none comes."""
        return self.input.recv_multipart() if self.input.poll(seconds * 1000) else None

    def say(self, message: Any) -> None:
        """Send something as outputs are sent; bytes go as they are."""
        frames = [message] if isinstance(message, bytes) else Encoder().encode(message)
        self.output.send_multipart(frames)

    def close(self) -> None:
        """Go away."""
        self.context.destroy(0)
