"""The IO threads of an engine process and its ZMQ sockets."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from hardpoint.host.system.encoding import (
    MOST_BYTES,
    Encoder,
)
from hardpoint.plugins import EngineCoreOutputs
from hardpoint.process.protocol import (
    ENGINE_CORE_DEAD,
    ENGINE_CORE_EXITED,
    EngineAddresses,
    EngineCoreReadyResponse,
)
from hardpoint.process.send_buffers import SendTracker
from hardpoint.process.zmq_resources import end_context

from .loop import LoopFailure, LoopQueues
from .receiver import Check, HashPrompt, MessageReader
from .sender import OutputEncoder

_log = logging.getLogger("hardpoint")

_DISCONNECTED, _CONNECTED = zmq.Event.DISCONNECTED, zmq.Event.HANDSHAKE_SUCCEEDED


class DealerConnection:
    """A DEALER socket that accepts no frame of more than `MOST_BYTES`. For one thread.

    Attributes:
        socket: to be read; `reconnect` may replace it.
        events: the monitor socket, to be polled as well; readable when `reconnect` is to be called.
    """

    # ZMQ cuts a connection as soon as a larger frame is announced, before it allocates memory for
    # it, and never restores it.

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], identity: bytes, address: str, client: int
    ) -> None:
        self._context, self._identity, self._address = context, identity, address
        self._client = client
        # ZMQ notifies of a cut before it delivers what came before, which the thread that it works
        # in has done when that has made a new connection. So the socket is kept until then.
        self._cut: zmq.Socket[bytes] | None = None
        self._connect()

    def reconnect(self) -> Iterator[list[zmq.Frame]]:
        """Read the monitor's events; connect again if the connection was cut.

        Yields:
            The messages that came before the cut and were not read yet.
        """
        while self.events.poll(0):
            event = recv_monitor_message(self.events)["event"]
            if event == _DISCONNECTED:
                yield from self._unread()
                self._close_cut()
                self.socket.disable_monitor()
                self.events.close(0)
                self._cut = self.socket
                self._connect()
            elif event == _CONNECTED and self._cut is not None:  # never, if the client is gone
                yield from self._unread()
                self._close_cut()
                _log.warning(
                    "the connection to client %d was cut, as for a frame of more than %d bytes; "
                    "it is restored, messages in between are lost",
                    self._client,
                    MOST_BYTES,
                )

    def close(self) -> None:
        """Close the socket; unsent messages are lost."""
        self._close_cut()
        self.socket.disable_monitor()
        self.events.close(0)
        self.socket.close(0)

    def _connect(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, self._identity)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self.events: zmq.Socket[bytes] = self.socket.get_monitor_socket(_DISCONNECTED | _CONNECTED)
        try:
            self.socket.connect(self._address)
        except zmq.ZMQError:  # else the context waits for these sockets when it ends
            self.close()
            raise

    def _unread(self) -> Iterator[list[zmq.Frame]]:
        cut = self._cut or self.socket
        while cut.poll(0):
            yield cut.recv_multipart(copy=False)

    def _close_cut(self) -> None:
        if self._cut is not None:
            self._cut.close(0)
            self._cut = None


_LINGER_MS = 4000  # how long clients may take at the end to read the rest
_SEND_HWM = 64  # messages that ZMQ buffers for a client; later ones are merged
_RETRY_INTERVAL_MS = 20  # how often it is checked whether a full queue has room again
_STOP_ADDRESS = "inproc://stop"


class EngineIO:
    """The sockets of one engine, its input thread and its output thread.

    Each client binds its addresses before the engine connects to them.
    """

    def __init__(
        self,
        identity: bytes,
        addresses: EngineAddresses,
        queues: LoopQueues,
        check: Check = lambda _request: None,
        *,
        hash_prompt: HashPrompt = lambda _request: [],
    ) -> None:
        """Create the threads; `start` starts them, and they connect.

        Args:
            identity: the ZMQ identity of the engine: its index, 2 bytes, little-endian.
            addresses: one input and one output per client.
            check: called with each request in the input thread, before the loop gets it; raises
                HardpointError for an invalid one.
            hash_prompt: called with each request, in the input thread.
        """
        self._identity = identity
        self._index = int.from_bytes(identity, "little")
        self._addresses = addresses
        self._queues = queues
        self._messages = MessageReader(queues, check, hash_prompt)
        self._encoder = OutputEncoder(queues.abort)
        self._linger_ms, self._end_marker = _LINGER_MS, ENGINE_CORE_EXITED
        self._context = zmq.Context(io_threads=1)
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind(_STOP_ADDRESS)
        self._reader = threading.Thread(target=self._read, name="EngineInput", daemon=True)
        self._writer = threading.Thread(target=self._write, name="EngineOutput", daemon=True)

    def start(self, ready: EngineCoreReadyResponse) -> None:
        """Start the threads; the first message on every input socket is `ready`."""
        self._ready = ready  # a ROUTER cannot address the engine before it has sent a message
        self._reader.start()
        self._writer.start()

    def close(self, *, failed: bool, has_clients: bool = True) -> None:
        """Send the remaining messages and the end marker; stop both threads.

        Args:
            failed: whether the engine failed.
            has_clients: whether any client is left to read the messages.
        """
        self._end_marker = ENGINE_CORE_DEAD if failed else ENGINE_CORE_EXITED
        self._linger_ms = _LINGER_MS if has_clients else 0
        timeout_s = self._linger_ms / 1000
        self._queues.output.end(timeout_s)
        self._writer.join(timeout_s + 1)
        if self._writer.is_alive():
            _log.critical("the output thread did not end")
        with contextlib.suppress(zmq.Again):  # the input thread has ended
            self._stop.send(b"", zmq.NOBLOCK)
        self._reader.join(timeout_s + 1)
        self._stop.close(0)
        end_context(self._context, f"the sockets of engine {self._index}", timeout_s + 5)

    def requests_ended(self, client: int, request_ids: Iterable[str]) -> None:
        """Expect no last outputs of requests that a client has aborted."""
        for request_id in request_ids:
            self._messages.request_ended(client, request_id)

    def _read(self) -> None:
        with contextlib.ExitStack() as undo:
            try:
                stop = self._context.socket(zmq.PAIR)
                undo.callback(stop.close, 0)
                stop.connect(_STOP_ADDRESS)
                connections = []
                for client, address in enumerate(self._addresses.inputs):
                    connection = DealerConnection(self._context, self._identity, address, client)
                    undo.callback(connection.close)
                    connection.socket.send_multipart(Encoder().encode(self._ready))
                    connections.append(connection)
                self._read_until_stopped(stop, connections)
            except BaseException as error:
                self._queues.input.put(LoopFailure(error))

    def _read_until_stopped(
        self, stop: zmq.Socket[bytes], connections: Sequence[DealerConnection]
    ) -> None:
        while True:
            poller, any_full = zmq.Poller(), False
            poller.register(stop, zmq.POLLIN)
            for client, connection in enumerate(connections):
                is_full = self._queues.output.is_full(client)
                poller.register(connection.socket, 0 if is_full else zmq.POLLIN)
                poller.register(connection.events, zmq.POLLIN)
                any_full |= is_full
            ready = dict(poller.poll(_RETRY_INTERVAL_MS if any_full else None))
            if stop in ready:
                return
            for client, connection in enumerate(connections):
                if connection.socket in ready:
                    self._receive(client, connection.socket.recv_multipart(copy=False))
                if connection.events in ready:
                    for frames in connection.reconnect():
                        self._receive(client, frames)

    def _receive(self, client: int, frames: Sequence[zmq.Frame]) -> None:
        self._messages.receive(client, [frame.buffer for frame in frames])

    def _write(self) -> None:
        sockets: list[zmq.Socket[bytes]] = []
        try:
            for address in self._addresses.outputs:
                socket = self._context.socket(zmq.PUSH)
                sockets.append(socket)
                socket.setsockopt(zmq.LINGER, _LINGER_MS)
                socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
                socket.connect(address)
            self._send_all(sockets)
            for socket in sockets if self._linger_ms else ():
                _send_marker(socket, self._end_marker)
        except BaseException as error:
            self._queues.input.put(LoopFailure(error))
        finally:
            for socket in sockets:
                socket.close(self._linger_ms)

    def _send_all(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        tracker = SendTracker()

        def can_send(client: int) -> bool:
            return bool(int(sockets[client].getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

        while (item := self._queues.output.pop(can_send)) is not None:
            client, message = item
            if isinstance(message, EngineCoreOutputs):
                message.engine_index = self._index
            buffer = tracker.buffer()
            frames = self._encoder.encode_into(message, buffer, client)
            if isinstance(message, EngineCoreOutputs):
                for output in message.outputs:
                    if output.finish_reason is not None:
                        self._messages.request_ended(client, output.request_id)
            sockets[client].send_multipart(tracker.frames(frames, buffer), copy=False)


def _send_marker(socket: zmq.Socket[bytes], marker: bytes) -> None:
    try:
        socket.send(marker, zmq.NOBLOCK)
    except zmq.Again:
        _log.warning("a client reads nothing, so the end marker cannot be sent to it")
