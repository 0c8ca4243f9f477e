"""The stay of one engine under one rank, at the head."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from hardpoint.core.protocol import EngineAddresses
from hardpoint.system.encoding import MOST_BYTES

from .joined_host import JoinedHost
from .messages import Ended, Hello, Window

Frames = Sequence[zmq.Frame]

_LINGER_MS = 1000


class Session:
    """Passes on messages between a client and its engine; for the listener's thread.

    To the client it looks like the engine: it connects to the addresses of the launch.

    Attributes:
        id: 16 random bytes.
        host: the place that the engine has taken.
        routing: routing id of its connection.
        hello: its hello.
        key: its public key, empty without keys.
        name: the name of its key, empty without keys.
        received_at: when its last message came.
        began: when it was welcomed.
        is_started: whether its process is started.
        is_leaving: whether its machine wants to end it.
        window: counts of messages.
        to_engine: polled for requests.
        to_client: takes outputs.
        end: how it ended, while what it had sent is passed on.
    """

    def __init__(
        self, host: JoinedHost, routing: bytes, hello: Hello, key: bytes, name: str
    ) -> None:
        """Begin, before the engine is started."""
        self.id = os.urandom(16)
        self.host, self.routing, self.hello, self.key, self.name = host, routing, hello, key, name
        self.received_at = self.began = time.monotonic()
        self.is_started = self.is_leaving = False
        self.window = Window()
        self.end: Ended | None = None
        self.to_engine: zmq.Socket[bytes] | None = None
        self.to_client: zmq.Socket[bytes] | None = None
        self._outputs: deque[Frames] = deque()
        self.held: Frames | None = None  # a request that the connection did not take

    @property
    def where(self) -> str:
        """The machine of the engine, and the name of its key, for messages."""
        return f"{self.hello.host}, key {self.name}" if self.key else self.hello.host

    def connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Connect to the client."""
        launch = self.host.launch_message
        addresses = msgspec.json.decode(launch.address, type=EngineAddresses)
        self.to_engine = context.socket(zmq.DEALER)
        self.to_engine.setsockopt(zmq.IDENTITY, launch.engine_index.to_bytes(2, "little"))
        self.to_engine.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self.to_engine.connect(addresses.inputs[0])
        self.to_client = context.socket(zmq.PUSH)
        self.to_client.connect(addresses.outputs[0])
        self.is_started = True

    def ready(self, frames: Frames) -> None:
        """Pass on the engine's first message."""
        assert self.to_engine is not None
        self.to_engine.send_multipart(frames, copy=False)

    def output(self, frames: Frames) -> None:
        """Pass on an output, as soon as the client takes it."""
        self._outputs.append(frames)
        self.flush()

    def flush(self) -> bool:
        """Pass on the outputs that the client takes now; return whether none are left."""
        while self._outputs and self.to_client is not None:
            try:
                self.to_client.send_multipart(self._outputs[0], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            self._outputs.popleft()
            self.window.passed_on += 1
        return True

    def close(self) -> None:
        """Close the sockets."""
        if self.to_engine is not None:
            self.to_engine.close(0)
        if self.to_client is not None:
            self.to_client.close(_LINGER_MS)
