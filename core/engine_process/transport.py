"""The threads beside the busy loop of an engine process: messages in, messages out."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from hardpoint.core.wire import (
    ENGINE_CORE_DEAD,
    MOST_BYTES,
    Encoder,
    EngineAddresses,
    EngineCoreReadyResponse,
    SendTracker,
    TensorConsumer,
    TensorProvider,
)
from hardpoint.plugins import EngineCoreOutputs

from .loop import Failure, LoopQueues
from .receiver import Check, HashPrompt, MessageReader
from .sender import OutputFrames

_log = logging.getLogger("hardpoint")

_CUT, _JOINED = zmq.Event.DISCONNECTED, zmq.Event.HANDSHAKE_SUCCEEDED


class InputLine:
    """A DEALER that takes no frame of more than `MOST_BYTES`.

    ZMQ cuts a connection over which a larger one is announced, before it has memory for it, and
    leaves it cut. For one thread.

    Attributes:
        socket: to be read; `renew` may put another one in its place.
        events: to be polled beside it; readable when `renew` has something to look at.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], identity: bytes, address: str, client: int
    ) -> None:
        """Connect to a client, which may not be there yet."""
        self._context, self._identity, self._address = context, identity, address
        self._client = client
        self._was_cut = False
        self._connect()

    def renew(self) -> Iterator[list[zmq.Frame]]:
        """Look at what became of the connection; if it was cut, connect again.

        Yields:
            What came before the cut and was not read yet.
        """
        while self.events.poll(0):
            event = recv_monitor_message(self.events)["event"]
            if event == _CUT:
                yield from self._unread()
                self.close()
                self._was_cut = True
                self._connect()
            elif event == _JOINED and self._was_cut:  # where the client is gone, nobody joins
                self._was_cut = False
                _log.warning(
                    "the connection to client %d was cut, as for a frame of more than %d bytes; "
                    "it is there again, what was sent meanwhile is lost",
                    self._client,
                    MOST_BYTES,
                )

    def close(self) -> None:
        """Close the socket; what was not sent is lost."""
        self.socket.disable_monitor()
        self.events.close(0)
        self.socket.close(0)

    def _connect(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, self._identity)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self.events: zmq.Socket[bytes] = self.socket.get_monitor_socket(_CUT | _JOINED)
        self.socket.connect(self._address)

    def _unread(self) -> Iterator[list[zmq.Frame]]:
        while self.socket.poll(0):
            yield self.socket.recv_multipart(copy=False)


_LINGER_MS = 4000  # how long clients may take at the end to read what they have not read
_MOST_UNREAD = 64  # messages that ZMQ keeps for a client; what comes after them is merged
_LOOK_AGAIN_MS = 20  # how often it is asked whether a client that was behind has caught up
_STOP = "inproc://stop"


class EngineIO:
    """Sockets of one engine, and the thread that reads and the one that writes.

    The engine connects: clients were there first and own the addresses.
    """

    def __init__(
        self,
        identity: bytes,
        addresses: EngineAddresses,
        queues: LoopQueues,
        check: Check = lambda _request: None,
        *,
        consumer: TensorConsumer | None = None,
        provider: TensorProvider | None = None,
        hash_prompt: HashPrompt = lambda _request: [],
    ) -> None:
        """Connect nothing yet; `start` does.

        Args:
            identity: what clients address the engine by: its index, 2 bytes, little-endian.
            addresses: one input and one output per client.
            queues: to and from the loop.
            check: looks at requests before the loop gets them, in the thread that reads; raises
                HardpointError where one is wrong.
            consumer: is offered large tensors of outputs, in the thread that writes.
            provider: finds those of requests that the clients' consumer took.
            hash_prompt: is called for each request, in the thread that reads.
        """
        self._identity = identity
        self._index = int.from_bytes(identity, "little")
        self._addresses = addresses
        self._queues = queues
        self._messages = MessageReader(queues, check, provider, hash_prompt)
        self._outputs = OutputFrames(queues.abort, consumer)
        self._linger_ms, self._failed = _LINGER_MS, False
        self._context = zmq.Context(io_threads=1)
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind(_STOP)
        self._reader = threading.Thread(target=self._read, name="EngineInput", daemon=True)
        self._writer = threading.Thread(target=self._write, name="EngineOutput", daemon=True)

    def start(self, ready: EngineCoreReadyResponse) -> None:
        """Connect, and say `ready` on every input socket, for clients cannot address it before."""
        self._ready = ready
        self._reader.start()
        self._writer.start()

    def close(self, *, failed: bool, heard: bool = True) -> None:
        """Send what is left, with the dead marker behind it if the engine failed; stop both.

        Args:
            failed: whether the engine ends before its time.
            heard: whether anybody is left to be told.
        """
        self._failed = failed
        self._linger_ms = _LINGER_MS if heard else 0
        seconds = self._linger_ms / 1000
        self._queues.output.end(seconds)
        self._writer.join(seconds + 1)
        if self._writer.is_alive():
            _log.critical("the thread that sends outputs did not end")
        with contextlib.suppress(zmq.Again):  # it has ended already
            self._stop.send(b"", zmq.NOBLOCK)
        self._reader.join(seconds + 1)
        self._stop.close(0)
        self._context.destroy(linger=0 if self._writer.is_alive() else self._linger_ms)

    def _read(self) -> None:
        with contextlib.ExitStack() as undo:
            try:
                stop = self._context.socket(zmq.PAIR)
                undo.callback(stop.close, 0)
                stop.connect(_STOP)
                lines = []
                for client, address in enumerate(self._addresses.inputs):
                    line = InputLine(self._context, self._identity, address, client)
                    undo.callback(line.close)
                    line.socket.send_multipart(Encoder().encode(self._ready))
                    lines.append(line)
                self._read_until_stopped(stop, lines)
            except BaseException as error:
                self._queues.input.put(Failure(error))

    def _read_until_stopped(self, stop: zmq.Socket[bytes], lines: Sequence[InputLine]) -> None:
        while True:
            poller, behind = zmq.Poller(), False
            poller.register(stop, zmq.POLLIN)
            for client, line in enumerate(lines):
                full = self._queues.output.is_full(client)
                poller.register(line.socket, 0 if full else zmq.POLLIN)
                poller.register(line.events, zmq.POLLIN)
                behind |= full
            ready = dict(poller.poll(_LOOK_AGAIN_MS if behind else None))
            if stop in ready:
                return
            for client, line in enumerate(lines):
                if line.socket in ready:
                    self._take(client, line.socket.recv_multipart(copy=False))
                if line.events in ready:
                    for frames in line.renew():
                        self._take(client, frames)

    def _take(self, client: int, frames: Sequence[zmq.Frame]) -> None:
        self._messages.take(client, [frame.buffer for frame in frames])

    def _write(self) -> None:
        sockets: list[zmq.Socket[bytes]] = []
        try:
            for address in self._addresses.outputs:
                socket = self._context.socket(zmq.PUSH)
                sockets.append(socket)
                socket.setsockopt(zmq.LINGER, _LINGER_MS)
                socket.setsockopt(zmq.SNDHWM, _MOST_UNREAD)
                socket.connect(address)
            self._send_all(sockets)
            if self._failed:
                for socket in sockets:
                    _send_marker(socket)
        except BaseException as error:
            self._queues.input.put(Failure(error))
        finally:
            for socket in sockets:
                socket.close(self._linger_ms)

    def _send_all(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        tracker = SendTracker()

        def can_take(client: int) -> bool:
            return bool(int(sockets[client].getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

        while (item := self._queues.output.take(can_take)) is not None:
            client, message = item
            if isinstance(message, EngineCoreOutputs):
                message.engine_index = self._index
            buffer = tracker.buffer()
            frames = self._outputs.encode_into(message, buffer)
            if isinstance(message, EngineCoreOutputs):
                for output in message.outputs:
                    if output.finish_reason is not None:
                        self._messages.told_of_end(client, output.request_id)
            sockets[client].send_multipart(tracker.frames(frames, buffer), copy=False)


def _send_marker(socket: zmq.Socket[bytes]) -> None:
    """Send the dead marker; a client that reads nothing finds out in other ways."""
    try:
        socket.send(ENGINE_CORE_DEAD, zmq.NOBLOCK)
    except zmq.Again:
        _log.warning("a client reads nothing, so that it cannot be told that the engine failed")
