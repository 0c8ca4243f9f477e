"""The stay of one engine under one rank, at the head."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq

from hardpoint.host.system.encoding import MOST_BYTES, WireError
from hardpoint.process.protocol import EngineAddresses, decode_handshake

from .joined_host import JoinedHost
from .messages import MOST_NAME, Hello, ProcessEnd, Window, printable
from .pieces import MOST_MESSAGE_BYTES, Pieces

Frames = Sequence[zmq.Frame]

_LINGER_MS = 1000
_MOST_SIZE = (1 << 31) - 1
_MOST_PER_SECOND, _MOST_AT_ONCE = 5000, 10_000
"""Messages of an engine; of outputs alone, the window allows fewer under load."""


def check_ready(frame: bytes, config: Mapping[str, Any]) -> None:
    """Check the first message of an engine: other engines get its sizes, too.

    Args:
        frame: the message.
        config: the configuration that the engine got, as plain data.

    Raises:
        WireError: it is malformed, or names a size that the configuration does not allow.
    """
    ready = decode_handshake(frame)
    for name, size, limit in (
        ("max_model_len", ready.max_model_len, config.get("max_model_len")),
        ("num_gpu_blocks", ready.num_gpu_blocks, config.get("kv_cache", {}).get("num_blocks")),
    ):
        limit = limit if isinstance(limit, int) else _MOST_SIZE
        if size > limit:
            raise WireError(f"{name}: expected at most {limit}, got {size}")


class EngineSession:
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
        is_ready: whether its engine has sent its first message.
        is_cut: whether its connection is gone; messages that came by it may not be read yet.
        window: counts of messages.
        to_engine: polled for requests.
        to_client: takes outputs.
        end: how it ended, while what it had sent is passed on.
    """

    def __init__(
        self, host: JoinedHost, routing: bytes, hello: Hello, key: bytes, name: str
    ) -> None:
        self.id = os.urandom(16)
        self.host, self.routing, self.hello, self.key, self.name = host, routing, hello, key, name
        self.received_at = self.began = time.monotonic()
        self.is_started = self.is_leaving = self.is_ready = self.is_cut = False
        self.window = Window()
        self.end: ProcessEnd | None = None
        self.to_engine: zmq.Socket[bytes] | None = None
        self.to_client: zmq.Socket[bytes] | None = None
        self._pieces = Pieces()
        self._outputs: deque[Frames] = deque()
        self._unread_bytes = 0
        self._allowance, self._counted_at = float(_MOST_AT_ONCE), self.began
        self.held: Frames | None = None  # a request that the connection did not take

    @property
    def where(self) -> str:
        """The machine of the engine, and the name of its key, for messages."""
        host = printable(self.hello.host, MOST_NAME)
        return f"{host}, key {self.name}" if self.key else host

    @property
    def takes_requests(self) -> bool:
        """Whether a request of its client may be read."""
        is_over = self.is_cut or self.end is not None
        return not is_over and self.held is None and not self.window.is_full

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
        """Pass on the engine's first message.

        Raises:
            WireError: it is malformed, or names sizes that its configuration does not allow.
        """
        assert self.to_engine is not None
        check_ready(b"".join(frame.bytes for frame in frames), self.host.launch_message.config)
        self.is_ready = True
        self.to_engine.send_multipart(frames, copy=False)

    def count(self) -> None:
        """Count a message, before it is handled.

        Raises:
            WireError: the engine sends too many of them.
        """
        now = self.received_at
        self._allowance += (now - self._counted_at) * _MOST_PER_SECOND
        self._allowance = min(self._allowance, _MOST_AT_ONCE) - 1
        self._counted_at = now
        if self._allowance < 0:
            raise WireError(f"more than {_MOST_PER_SECOND} messages a second")

    def piece(self, index: bytes, piece: bytes) -> None:
        """Add a piece of the next output.

        Raises:
            WireError: it is malformed, or the message is too long.
        """
        self._pieces.add(index, piece)
        self._check_bytes()

    def output(self, frames: Frames) -> None:
        """Pass on an output, as soon as the client takes it.

        Raises:
            WireError: its pieces do not fit, or too much is not read yet.
        """
        frames = self._pieces.join(frames)
        self._outputs.append(frames)
        self._unread_bytes += sum(map(len, frames))
        self.flush()
        self._check_bytes()

    def _check_bytes(self) -> None:
        if self._pieces.num_bytes + self._unread_bytes > MOST_MESSAGE_BYTES:
            raise WireError(f"more than {MOST_MESSAGE_BYTES} bytes that are not read yet")

    def flush(self) -> bool:
        """Pass on the outputs that the client takes now; return whether none are left."""
        while self._outputs and self.to_client is not None:
            try:
                self.to_client.send_multipart(self._outputs[0], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            self._unread_bytes -= sum(map(len, self._outputs.popleft()))
            self.window.passed_on += 1
        return True

    def close(self) -> None:
        """Close the sockets."""
        if self.to_engine is not None:
            self.to_engine.close(0)
        if self.to_client is not None:
            self.to_client.close(_LINGER_MS)
