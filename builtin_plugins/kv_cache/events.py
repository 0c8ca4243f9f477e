"""KV event publishers: over ZeroMQ, and to nobody."""

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

from .event_stream import Socket, Stream, bound_endpoint, release

_LINGER_MS = 500  # how long closing waits for subscribers that have not got everything
_LONGEST_REQUEST = 1024  # bytes; whoever sends more is disconnected


class NullPublisher(KVEventPublisher):
    """Tells nobody."""

    contract = 1

    def publish(self, batch: KVEventBatch) -> None:
        """Drop the events."""


class ZmqPublisher(KVEventPublisher):
    """Publishes on a ZeroMQ PUB socket, and sends again what was missed on a ROUTER socket.

    A batch is the message `[topic, sequence number, payload]`: the number in 8 bytes, big-endian,
    counted from 0, the payload in msgpack. A client of the replay socket sends
    `[b"", sequence number]` and gets `[b"", sequence number, payload]` for every batch that is
    still there from that one on, then `END_OF_REPLAY` with an empty payload. A request that is not
    understood gets that end alone.

    A subscriber that reads too slowly loses batches and sees it in the numbers; the engine never
    waits for anyone. One thread has the sockets; `publish` only hands the batch over.

    Attributes:
        endpoint: where it is bound; tells the port where the option leaves it open.
        replay_endpoint: the same of the replay socket, or None.
        num_dropped: batches that nobody got, because the thread was `max_queue` behind.
    """

    contract = 1
    context: PublisherContext

    class Options(plugins.Options):
        """Where and how much.

        Attributes:
            endpoint: bound for subscribers: tcp://HOST:PORT or ipc://PATH. The data-parallel rank
                is added to a port, and put behind a path as `_dp1`; 0 changes neither.
            replay_endpoint: bound for clients that missed something; None is off.
            topic: first frame of every message, for subscribers to filter by.
            buffer_steps: newest batches that can be had again.
            hwm: messages that are kept for a slow subscriber; it loses further ones.
            max_queue: batches that wait for being sent; the oldest goes when there are more.
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
            ConfigError: an endpoint is wrong or taken.
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
        self._stream = Stream(
            zmq_context,
            live,
            replay,
            topic=options.topic,
            buffer_steps=options.buffer_steps,
            max_queue=options.max_queue,
        )

    @property
    def num_dropped(self) -> int:
        """Batches that nobody got."""
        return self._stream.num_dropped

    def publish(self, batch: KVEventBatch) -> None:
        """Hand a batch to the thread.

        Raises:
            RuntimeError: the thread ended; the cause is chained.
        """
        self._stream.push(batch)

    def close(self) -> None:
        """Send what waits, for half a second at most, and release sockets, files and thread."""
        self._stream.close()

    def _bind(self, context: zmq.Context[Socket], option: str, endpoint: str) -> Socket:
        """Return a bound socket, PUB for `endpoint` and ROUTER for `replay_endpoint`."""
        path = f"plugin.{self.name}.{option}"
        endpoint = _of_rank(endpoint, self.context.data_parallel_rank, path)
        _refuse_taken_file(endpoint, path)
        bound = context.socket(zmq.PUB if option == "endpoint" else zmq.ROUTER)
        bound.linger = _LINGER_MS
        if option == "endpoint":
            bound.sndhwm = self.options.hwm
        else:
            bound.router_mandatory = True  # tells of clients that are gone, or can take no more
            bound.maxmsgsize = _LONGEST_REQUEST
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as cause:
            words = zmq.strerror(cause.errno or 0)
            raise ConfigError(f"{path}: cannot bind {endpoint!r}: {words}") from cause
        return bound


def _of_rank(endpoint: str, rank: int, path: str) -> str:
    """Return the endpoint of a data-parallel rank.

    Raises:
        ConfigError: it is none, or the port is too large.
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


def _refuse_taken_file(endpoint: str, path: str) -> None:
    """Refuse a file that is in use, which ZeroMQ would delete without a word.

    Raises:
        ConfigError: it is the socket of a process that lives, or no socket at all.
    """
    scheme, _, name = endpoint.partition("://")
    if scheme != "ipc" or not (file := Path(name)).exists():
        return
    if not stat.S_ISSOCK(file.stat().st_mode):
        raise ConfigError(f"{path}: cannot bind {endpoint!r}: there is a file that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(name)
        except OSError:
            return  # nobody listens: it was left behind
    raise ConfigError(f"{path}: cannot bind {endpoint!r}: Address already in use")
