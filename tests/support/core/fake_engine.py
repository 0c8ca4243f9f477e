"""An engine that a test plays, at the other end of a client's real sockets."""

from __future__ import annotations

import os
from typing import Any

import zmq
from msgspec.structs import replace

from hardpoint.errors import EngineDeadError
from hardpoint.host.system.encoding import Encoder
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.protocol import EngineCoreReadyResponse
from support.waiting import PATIENCE_S

READY = EngineCoreReadyResponse(manifest_hash="", max_model_len=64, num_gpu_blocks=8)


class Engine:
    """The other end."""

    def __init__(self, sockets: EngineSockets, identity: bytes | None = None) -> None:
        """Connect, by default as the engine that the sockets expect."""
        self.context = zmq.Context()
        self.context.linger = 0  # if a test that failed leaves it to the garbage collector
        self.input = self.context.socket(zmq.DEALER)
        self.input.setsockopt(zmq.IDENTITY, sockets.identity if identity is None else identity)
        self.input.setsockopt(zmq.RCVHWM, 1)
        self.input.connect(sockets.addresses.inputs[0])
        self.output = self.context.socket(zmq.PUSH)
        self.output.connect(sockets.addresses.outputs[0])

    def ready(self, message: Any = READY) -> None:
        """Send the first message, or another one in its place."""
        self.input.send_multipart([*map(bytes, Encoder().encode(message))])

    def heard(self, seconds: float = PATIENCE_S) -> list[bytes] | None:
        """Wait for the next message of the client; None if none comes."""
        return self.input.recv_multipart() if self.input.poll(seconds * 1000) else None

    def send(self, message: Any) -> None:
        """Send something as outputs are sent; bytes go as they are."""
        frames = [message] if isinstance(message, bytes) else Encoder().encode(message)
        self.output.send_multipart(frames)

    def close(self) -> None:
        """Go away."""
        self.context.destroy(0)


class PlayedProcess:
    """A process that does nothing but be there, with an engine that a test plays.

    Attributes:
        engine: there once the process was launched.
        error: the result of `failure`; `fail` sets it.
    """

    returncode: int | None = None
    is_remote = False
    pid = 7

    def __init__(self, sockets: list[EngineSockets]) -> None:
        """Take the list in which the sockets will be that are made for it."""
        self.sockets = sockets
        self.launched: Any = None
        self.engine: Any = None
        self.error: Exception | None = None
        self.reader, self.writer = os.pipe()
        self.sentinels = [self.reader]

    @property
    def has_ended(self) -> bool:
        return self.returncode is not None

    @property
    def sends_end_marker(self) -> bool:
        return self.error is not None

    def launch(self, launch: Any) -> None:
        self.launched = launch
        self.engine = Engine(self.sockets[0])
        self.engine.ready(replace(READY, manifest_hash=launch.manifest.hash))

    def fail(self, error: Exception) -> None:
        """Report that it fails."""
        self.error = error
        os.write(self.writer, b"x")

    def exit(self) -> None:
        """End in order."""
        self.returncode = 0
        self.fail(EngineDeadError("the engine process exited with code 0"))

    def failure(self) -> Exception | None:
        return self.error

    def close(self, grace_s: float = 0.0) -> None:
        os.close(self.writer)  # the watcher wakes up
