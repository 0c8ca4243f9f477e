"""The thread that sends KV events over ZeroMQ: the live stream, and replays."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
import zmq

from hardpoint.plugins import KVEventBatch

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Replaces the sequence number in the last message of a replay."""

Socket = zmq.Socket[bytes]

_log = logging.getLogger(__name__)
_RETRY_MS = 20  # interval of retries for clients with a full queue
_REPLAY_TIMEOUT_S = 10.0  # a replay that sends nothing for so long is dropped
_MAX_BURST = 100  # messages of one client in a row, so that clients take turns


@dataclass(slots=True)
class _Replay:
    """A replay in progress.

    Attributes:
        start: sequence number of the client's next batch.
        last_sent: time of the last successful send, in seconds of the monotonic clock.
        stalled: whether the client's queue was full at the last attempt.
    """

    start: int
    last_sent: float
    stalled: bool = False


class KVEventStream:
    """The sending thread and its sockets.

    Attributes:
        num_dropped: batches dropped because `max_queue` batches were waiting for the thread.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        live: Socket,
        replay: Socket | None,
        *,
        topic: str,
        buffer_steps: int,
        max_queue: int,
    ) -> None:
        """Start the thread; the stream owns the context and the bound sockets from now on."""
        self.num_dropped = 0
        self._context, self._live, self._replay = context, live, replay
        self._topic = topic.encode()
        self._buffer_steps = buffer_steps
        self._numbers = count()
        self._queue: deque[tuple[int, KVEventBatch]] = deque(maxlen=max_queue)
        self._sent: OrderedDict[int, bytes] = OrderedDict()
        self._replays: dict[bytes, _Replay] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._closing = False
        self._failure: Exception | None = None
        # Wakes the thread; a ZeroMQ socket may be used by one thread only.
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        if replay is not None:
            self._poller.register(replay, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="hardpoint-kv-events", daemon=True)
        self._thread.start()

    def push(self, batch: KVEventBatch) -> None:
        """Queue a batch; called from one thread only."""
        if self._failure is not None:
            raise RuntimeError("the thread that publishes KV events ended") from self._failure
        if len(self._queue) == self._queue.maxlen:
            self.num_dropped += 1
        self._queue.append((next(self._numbers), batch))
        self._wake()

    def close(self) -> None:
        """Send the queued batches, end the thread and release everything; idempotent."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._thread.join()
            self._wake_sender.close()
            self._wake_receiver.close()

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"\0")
        except BlockingIOError:
            pass  # it is awake already

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait()
                self._read_requests()
                self._send_live()  # first: a replay has all that was published before its request
                self._send_replays()
            self._send_live()
        except Exception as cause:
            _log.exception("publishing KV events failed; no more are published")
            self._failure = cause
        finally:
            sockets = [self._live] if self._replay is None else [self._live, self._replay]
            release(self._context, *sockets)

    def _wait(self) -> None:
        stalled = all(replay.stalled for replay in self._replays.values())
        timeout_ms = (_RETRY_MS if stalled else 0) if self._replays else None
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake_receiver.fileno() in ready:
            self._wake_receiver.recv(4096)

    def _send_live(self) -> None:
        """Send the queued batches; a PUB socket drops messages rather than blocks."""
        while self._queue:
            number, batch = self._queue.popleft()
            payload = self._encoder.encode(batch)
            self._live.send_multipart([self._topic, _encode_number(number), payload])
            if self._replay is not None:
                self._sent[number] = payload
                if len(self._sent) > self._buffer_steps:
                    self._sent.popitem(last=False)

    def _read_requests(self) -> None:
        """Receive replay requests; a client's new request replaces its earlier one."""
        if self._replay is None:
            return
        for _ in range(_MAX_BURST):
            try:
                identity, *frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frames and not frames[0]:
                frames = frames[1:]
            valid = len(frames) == 1 and len(frames[0]) == 8
            start = int.from_bytes(frames[0], "big") if valid else 2**64
            self._replays[identity] = _Replay(start, time.monotonic())

    def _send_replays(self) -> None:
        for identity, replay in list(self._replays.items()):
            if not self._continue_replay(identity, replay):
                del self._replays[identity]

    def _continue_replay(self, identity: bytes, replay: _Replay) -> bool:
        assert self._replay is not None
        for _ in range(_MAX_BURST):
            number = self._next_sent(replay.start)
            last = [END_OF_REPLAY, b""]
            message = last if number is None else [_encode_number(number), self._sent[number]]
            try:
                self._replay.send_multipart([identity, b"", *message], zmq.NOBLOCK)
            except zmq.Again:
                replay.stalled = True
                return time.monotonic() - replay.last_sent < _REPLAY_TIMEOUT_S
            except zmq.ZMQError as cause:
                if cause.errno != zmq.EHOSTUNREACH:
                    raise
                return False  # the client is gone
            if number is None:
                return False
            replay.start, replay.last_sent, replay.stalled = number + 1, time.monotonic(), False
        return True

    def _next_sent(self, start: int) -> int | None:
        if not self._sent or start > (newest := next(reversed(self._sent))):
            return None
        number = max(start, next(iter(self._sent)))
        while number not in self._sent:  # dropped before it was sent
            number += 1
        assert number <= newest
        return number


def bound_endpoint(bound: Socket) -> str:
    """Return the endpoint of a socket, with the port that was chosen for `*` or 0."""
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)


def release(context: zmq.Context[Socket], *bound: Socket) -> None:
    """Close a context with its sockets, and delete the files of ipc sockets."""
    for socket_ in bound:
        scheme, _, name = bound_endpoint(socket_).partition("://")
        if scheme == "ipc":  # before it is closed: later, another process may own the file
            Path(name).unlink(missing_ok=True)
    context.destroy()


def _encode_number(number: int) -> bytes:
    return number.to_bytes(8, "big")
