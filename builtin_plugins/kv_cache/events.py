"""KV event publishers: zmq and null."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Annotated

import zmq

from hardpoint import plugins
from hardpoint.plugins import (
    ConfigError,
    KVEventBatch,
    KVEventPublisher,
    Meta,
    PublisherContext,
)

from .event_stream import KVEventStream, Socket, bound_endpoint, release

_LINGER_MS = 500  # how long closing waits for slow subscribers
_MAX_REQUEST_BYTES = 1024  # a client that sends more is disconnected


class NullPublisher(KVEventPublisher):
    """Drops all events."""

    contract = 1

    def publish(self, batch: KVEventBatch) -> None:
        """Drop the events."""


class ZmqPublisher(KVEventPublisher):
    """Publishes on a ZeroMQ PUB socket, and replays missed batches on a ROUTER socket.

    A batch is the message `[topic, sequence number, payload]`: the number in 8 bytes, big-endian,
    counted from 0, the payload in msgpack. A client of the replay socket sends
    `[b"", sequence number]` and gets `[b"", sequence number, payload]` for every buffered batch
    from that one on, then `END_OF_REPLAY` with an empty payload. An invalid request gets the end
    alone.

    A subscriber that reads too slowly loses batches and sees gaps in the sequence numbers; the
    engine never waits for subscribers. One thread owns the sockets; `publish` only queues the batch
    for it.

    Attributes:
        endpoint: where the PUB socket is bound, with the actual port where the option has none.
        replay_endpoint: the same for the replay socket, or None.
        num_dropped: batches dropped because `max_queue` batches were waiting for the thread.
    """

    contract = 1
    context: PublisherContext

    class Options(plugins.Options):
        """Endpoints and buffer sizes.

        Attributes:
            endpoint: endpoint for subscribers, tcp://HOST:PORT or ipc://PATH. A data-parallel rank
                above 0 is added to the port, or appended to the path as `_dp1`.
            replay_endpoint: endpoint for clients that missed batches; None disables replays.
            topic: first frame of every message, for subscribers to filter by.
            buffer_steps: number of newest batches kept for replays.
            hwm: messages queued for a slow subscriber; it loses further ones.
            max_queue: batches queued for the sending thread; the oldest is dropped when full.
        """

        endpoint: str = "tcp://127.0.0.1:5557"
        replay_endpoint: str | None = None
        topic: str = ""
        buffer_steps: Annotated[int, Meta(ge=1)] = 10_000
        hwm: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 100_000
        max_queue: Annotated[int, Meta(ge=1)] = 100_000

    def __init__(self, context: PublisherContext) -> None:
        """Bind the sockets and start the thread.

        Raises:
            ConfigError: an endpoint is invalid or in use.
        """
        super().__init__(context)
        options: ZmqPublisher.Options = context.options
        zmq_context = zmq.Context()
        live = replay = None
        try:
            live = self._bind(zmq_context, "endpoint", options.endpoint)
            if options.replay_endpoint is not None:
                replay = self._bind(zmq_context, "replay_endpoint", options.replay_endpoint)
        except ConfigError:
            release(zmq_context, *([live] if live is not None else []))
            raise
        self.endpoint = bound_endpoint(live)
        self.replay_endpoint = bound_endpoint(replay) if replay is not None else None
        self._stream = KVEventStream(
            zmq_context,
            live,
            replay,
            topic=options.topic,
            buffer_steps=options.buffer_steps,
            max_queue=options.max_queue,
        )

    @property
    def num_dropped(self) -> int:
        """Number of dropped batches."""
        return self._stream.num_dropped

    def publish(self, batch: KVEventBatch) -> None:
        """Queue a batch for the sending thread.

        Raises:
            RuntimeError: the thread ended; the cause is chained.
        """
        self._stream.push(batch)

    def close(self) -> None:
        """Send queued batches for up to half a second; release sockets, files and thread."""
        self._stream.close()

    def _bind(self, context: zmq.Context[Socket], option: str, endpoint: str) -> Socket:
        path = f"plugin.{self.name}.{option}"
        endpoint = _endpoint_of_rank(endpoint, self.context.data_parallel_rank, path)
        _check_socket_file(endpoint, path)
        bound = context.socket(zmq.PUB if option == "endpoint" else zmq.ROUTER)
        bound.linger = _LINGER_MS
        if option == "endpoint":
            bound.sndhwm = self.options.hwm
        else:
            bound.router_mandatory = True  # raises for clients that are gone or have a full queue
            bound.maxmsgsize = _MAX_REQUEST_BYTES
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as cause:
            reason = zmq.strerror(cause.errno or 0)
            raise ConfigError(f"{path}: cannot bind {endpoint!r}: {reason}") from cause
        return bound


def _endpoint_of_rank(endpoint: str, rank: int, path: str) -> str:
    """Return the endpoint of a data-parallel rank.

    Raises:
        ConfigError: it is no endpoint, or the port is too large.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc" and address not in ("", "*"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or (port.isascii() and port.isdigit())):
        raise ConfigError(f"{path}: expected tcp://HOST:PORT or ipc://PATH, got {endpoint!r}")
    if port == "*":
        return endpoint
    if int(port) + rank > 65_535:
        raise ConfigError(
            f"{path}: expected a port of at most {65_535 - rank} for data-parallel rank {rank}, "
            f"got {endpoint!r}"
        )
    return f"tcp://{host}:{int(port) + rank}"


def _check_socket_file(endpoint: str, path: str) -> None:
    """Reject an ipc file that is in use, which ZeroMQ would silently delete.

    Raises:
        ConfigError: it is the socket of a running process, or no socket.
    """
    scheme, _, name = endpoint.partition("://")
    if scheme != "ipc" or not (file := Path(name)).exists():
        return
    if not stat.S_ISSOCK(file.stat().st_mode):
        raise ConfigError(f"{path}: cannot bind {endpoint!r}: the file exists and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(name)
        except OSError:
            return  # no process listens: a stale file
    raise ConfigError(f"{path}: cannot bind {endpoint!r}: Address already in use")
