"""The threads beside the busy loop of an engine process: messages in, messages out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import zmq

from hardpoint.plugins import EngineCoreRequest

from .engine_loop import Failure, LoopQueues, Message
from .wire import (
    ENGINE_CORE_DEAD,
    Decoder,
    Encoder,
    EngineAddresses,
    EngineCoreReadyResponse,
    RequestType,
    SendTracker,
    UtilityCall,
    WireError,
)

__all__ = ["EngineIO"]

_log = logging.getLogger("hardpoint")
_LINGER_MS = 4000
_STOP = "inproc://stop"


class EngineIO:
    """Sockets of one engine, and the thread that reads and the one that writes.

    The engine connects: clients were there first and own the addresses.
    """

    def __init__(self, identity: bytes, addresses: EngineAddresses, queues: LoopQueues) -> None:
        """Connect nothing yet; `start` does.

        Args:
            identity: what clients address the engine by.
            addresses: one input and one output per client.
            queues: to and from the loop.
        """
        self._identity = identity
        self._addresses = addresses
        self._queues = queues
        self._linger_ms = _LINGER_MS
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
        self._linger_ms = _LINGER_MS if heard else 0
        self._queues.output.put(ENGINE_CORE_DEAD if failed else None)
        self._writer.join(self._linger_ms / 1000 + 1)
        self._stop.send(b"")
        self._reader.join(self._linger_ms / 1000 + 1)
        self._stop.close(0)
        self._context.destroy(linger=0 if self._writer.is_alive() else self._linger_ms)

    def _read(self) -> None:
        poller = zmq.Poller()
        stop = self._context.socket(zmq.PAIR)
        stop.connect(_STOP)
        poller.register(stop, zmq.POLLIN)
        sockets = []
        try:
            for address in self._addresses.inputs:
                socket = self._context.socket(zmq.DEALER)
                socket.setsockopt(zmq.IDENTITY, self._identity)
                socket.connect(address)
                socket.send_multipart(Encoder().encode(self._ready))
                poller.register(socket, zmq.POLLIN)
                sockets.append(socket)
            reader = _Reader(self._queues)
            while True:
                ready = dict(poller.poll())
                if stop in ready:
                    return
                for socket in ready:
                    reader.take(socket.recv_multipart(copy=False))
        except BaseException as error:
            self._queues.input.put(Failure(error))
        finally:
            for socket in (*sockets, stop):
                socket.close(0)

    def _write(self) -> None:
        sockets = []
        try:
            for address in self._addresses.outputs:
                socket = self._context.socket(zmq.PUSH)
                socket.setsockopt(zmq.LINGER, _LINGER_MS)
                socket.connect(address)
                sockets.append(socket)
            self._send_all(sockets)
        except BaseException as error:
            self._queues.input.put(Failure(error))
        finally:
            for socket in sockets:
                socket.close(self._linger_ms)

    def _send_all(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        encoder, tracker = Encoder(), SendTracker()
        while (item := self._queues.output.get()) is not None:
            if isinstance(item, bytes):
                for socket in sockets:
                    socket.send(item)
                return
            client, message = item
            if client < len(sockets):
                buffer = tracker.buffer()
                frames = encoder.encode_into(message, buffer)
                sockets[client].send_multipart(tracker.frames(frames, buffer), copy=False)


class _Reader:
    """Turns frames into messages for the loop. What is no message is dropped, and logged."""

    def __init__(self, queues: LoopQueues) -> None:
        self._queues = queues
        self._requests: Decoder[EngineCoreRequest] = Decoder(EngineCoreRequest)
        self._ids: Decoder[list[str]] = Decoder(list[str])
        self._calls: Decoder[UtilityCall] = Decoder(UtilityCall)

    def take(self, frames: Sequence[zmq.Frame]) -> None:
        """Decode one message and queue it."""
        try:
            kind = RequestType.from_wire(frames[0].buffer)
            message = self._decoded(kind, [frame.buffer for frame in frames[1:]])
        except WireError as error:
            _log.warning("dropped a message that is none: %s", error)
            return
        if isinstance(message, list):
            self._queues.aborts.put(message)
        self._queues.input.put(message)

    def _decoded(self, kind: RequestType, frames: list[Any]) -> Message:
        match kind:
            case RequestType.ADD:
                return self._requests.decode(frames)
            case RequestType.ABORT:
                return self._ids.decode(frames)
            case RequestType.UTILITY:
                return self._calls.decode(frames)
        raise WireError(f"request type: {kind.name} is for data-parallel engines, this is none")
