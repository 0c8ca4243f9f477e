"""The thread that has the ZeroMQ sockets of KV events: the live stream, and replays."""

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
"""Stands in the place of the sequence number of the last message of a replay."""

Socket = zmq.Socket[bytes]

_log = logging.getLogger(__name__)
_RETRY_MS = 20  # how soon a client that could take no more is tried again
_PATIENCE = 10.0  # seconds after which a replay that does not move is given up
_TURN = 100  # messages of one client in a row, so that others get theirs meanwhile


@dataclass(slots=True)
class _Replay:
    """What a client has still to get.

    Attributes:
        start: sequence number of its next batch.
        moved: when it last took something, in seconds of the monotonic clock.
        stalled: whether it could take no more the last time.
    """

    start: int
    moved: float
    stalled: bool = False


class Stream:
    """The sockets and the thread that has them.

    Attributes:
        num_dropped: batches that nobody got, because the thread was `max_queue` behind.
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
        """Start the thread. The stream has the context and the bound sockets from now on."""
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
        self._bell, self._ringer = socket.socketpair()  # a ZeroMQ socket may have one thread only
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._bell, zmq.POLLIN)
        if replay is not None:
            self._poller.register(replay, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="hardpoint-kv-events", daemon=True)
        self._thread.start()

    def push(self, batch: KVEventBatch) -> None:
        """Queue a batch; called by one thread only."""
        if self._failure is not None:
            raise RuntimeError("the thread that publishes KV events ended") from self._failure
        if len(self._queue) == self._queue.maxlen:
            self.num_dropped += 1
        self._queue.append((next(self._numbers), batch))
        self._ring()

    def close(self) -> None:
        """Send what waits, end the thread and release everything; once is enough."""
        if not self._closing:
            self._closing = True
            self._ring()
            self._thread.join()
            self._ringer.close()
            self._bell.close()

    def _ring(self) -> None:
        try:
            self._ringer.send(b"\0")
        except BlockingIOError:
            pass  # it rings already

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait()
                self._read_requests()
                self._send_live()  # a replay has all that was published before it was asked for
                self._send_replays()
            self._send_live()
        except Exception as cause:
            _log.exception("KV events are published no more")
            self._failure = cause
        finally:
            sockets = [self._live] if self._replay is None else [self._live, self._replay]
            release(self._context, *sockets)

    def _wait(self) -> None:
        """Sleep until there is something to do."""
        stalled = all(replay.stalled for replay in self._replays.values())
        patience = (_RETRY_MS if stalled else 0) if self._replays else None
        ready = dict(self._poller.poll(patience))
        if self._bell.fileno() in ready:
            self._bell.recv(4096)

    def _send_live(self) -> None:
        """Send what was queued; a PUB socket drops rather than waits."""
        while self._queue:
            number, batch = self._queue.popleft()
            payload = self._encoder.encode(batch)
            self._live.send_multipart([self._topic, _in_bytes(number), payload])
            if self._replay is not None:
                self._sent[number] = payload
                if len(self._sent) > self._buffer_steps:
                    self._sent.popitem(last=False)

    def _read_requests(self) -> None:
        """Take requests for replays; a client has one at a time, its latest."""
        if self._replay is None:
            return
        for _ in range(_TURN):
            try:
                identity, *frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frames and not frames[0]:
                frames = frames[1:]
            understood = len(frames) == 1 and len(frames[0]) == 8
            start = int.from_bytes(frames[0], "big") if understood else 2**64
            self._replays[identity] = _Replay(start, time.monotonic())

    def _send_replays(self) -> None:
        for identity, replay in list(self._replays.items()):
            if not self._goes_on(identity, replay):
                del self._replays[identity]

    def _goes_on(self, identity: bytes, replay: _Replay) -> bool:
        """Send a client as much as it takes at once; return whether there is more to send."""
        assert self._replay is not None
        for _ in range(_TURN):
            number = self._next_sent(replay.start)
            last = [END_OF_REPLAY, b""]
            message = last if number is None else [_in_bytes(number), self._sent[number]]
            try:
                self._replay.send_multipart([identity, b"", *message], zmq.NOBLOCK)
            except zmq.Again:
                replay.stalled = True
                return time.monotonic() - replay.moved < _PATIENCE
            except zmq.ZMQError as cause:
                if cause.errno != zmq.EHOSTUNREACH:
                    raise
                return False  # the client is gone
            if number is None:
                return False
            replay.start, replay.moved, replay.stalled = number + 1, time.monotonic(), False
        return True

    def _next_sent(self, start: int) -> int | None:
        """Return the number of the first batch from `start` on that can be had again."""
        if not self._sent or start > (newest := next(reversed(self._sent))):
            return None
        number = max(start, next(iter(self._sent)))
        while number not in self._sent:  # dropped before it was sent
            number += 1
        assert number <= newest
        return number


def bound_endpoint(bound: Socket) -> str:
    """Return where a socket is bound, a port that was left open filled in."""
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)


def release(context: zmq.Context[Socket], *bound: Socket) -> None:
    """Close a context with its sockets, and delete the files of those that have one."""
    for socket_ in bound:
        scheme, _, name = bound_endpoint(socket_).partition("://")
        if scheme == "ipc":  # before it is closed, so it cannot be somebody else's by now
            Path(name).unlink(missing_ok=True)
    context.destroy()


def _in_bytes(number: int) -> bytes:
    return number.to_bytes(8, "big")
