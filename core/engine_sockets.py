"""The client's end of the sockets to an engine process, and the thread that reads it."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq

from hardpoint.plugins import EngineCoreOutputs, EngineDeadError, HardpointError, typed

from .utilities import result_type
from .wire import (
    ENGINE_CORE_DEAD,
    Decoder,
    Encoder,
    EngineAddresses,
    EngineCoreReadyResponse,
    RequestType,
    SendTracker,
    UtilityCall,
    UtilityOutput,
    WireError,
)

__all__ = ["EngineSockets"]

_STOP = "inproc://stop"

Sink = Callable[[EngineCoreOutputs | Exception], None]
"""Takes every batch of outputs, and at last the error that ended them. Called in another thread."""


class EngineSockets:
    """Sends to one engine, and reads what comes of it.

    `send` and `call` may be used from several threads.

    Attributes:
        identity: what the engine is addressed by.
        addresses: what it connects to.
    """

    def __init__(self, index: int = 0) -> None:
        """Bind; the engine connects when it is there."""
        self.identity = index.to_bytes(2, "little")
        self._folder = Path(tempfile.mkdtemp(prefix="hardpoint-"))
        self.addresses = EngineAddresses(
            inputs=[f"ipc://{self._folder / 'input'}"], outputs=[f"ipc://{self._folder / 'output'}"]
        )
        self._context = zmq.Context(io_threads=2)
        self._input = self._context.socket(zmq.ROUTER)
        self._input.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._input.bind(self.addresses.inputs[0])
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind(_STOP)
        self._lock = threading.Lock()
        self._encoder, self._tracker = Encoder(), SendTracker()
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        self._serials = itertools.count()
        self._dead: Exception | None = None
        self._reader: threading.Thread | None = None

    def poll_ready(self, milliseconds: int) -> EngineCoreReadyResponse | None:
        """Return the engine's first message, if it comes in time."""
        if not self._input.poll(milliseconds):
            return None
        identity, *frames = self._input.recv_multipart()
        if identity != self.identity:
            raise WireError(f"an engine said {identity!r}, expected {self.identity!r}")
        decoder: Decoder[EngineCoreReadyResponse] = Decoder(EngineCoreReadyResponse)
        return decoder.decode(frames)

    def read(self, sink: Sink) -> None:
        """Begin to read; every batch goes to the sink."""
        self._reader = threading.Thread(
            target=self._read, args=(sink,), name="EngineCoreOutputs", daemon=True
        )
        self._reader.start()

    def send(self, kind: RequestType, message: Any) -> None:
        """Send one message.

        Raises:
            EngineDeadError: the engine is gone.
            WireError: the message cannot travel.
        """
        with self._lock:
            if self._dead is not None:
                raise EngineDeadError(str(self._dead)) from self._dead
            self._tracker.collect()
            frames = self._encoder.encode(message)
            try:
                self._input.send_multipart(
                    [self.identity, kind, *self._tracker.frames(frames)], copy=False
                )
            except zmq.ZMQError as cause:
                raise EngineDeadError(f"the engine cannot be reached: {cause}") from cause

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call one of the engine's utilities."""
        future: Future[Any] = Future()
        call_id = next(self._serials)
        self._calls[call_id] = (method, future)
        try:
            self.send(RequestType.UTILITY, UtilityCall(0, call_id, method, list(args)))
        except BaseException:
            del self._calls[call_id]
            raise
        return future

    def fail(self, error: Exception) -> None:
        """Take it that the engine is gone: whoever waits is told, and nothing is sent any more."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error
        while self._calls:
            _, (_, future) = self._calls.popitem()
            future.set_exception(EngineDeadError(str(error)))

    def close(self) -> None:
        """Stop reading; close and remove everything."""
        self.fail(EngineDeadError("the engine was closed"))
        if self._reader is not None:
            self._stop.send(b"")
            self._reader.join()
        for socket in (self._input, self._stop):
            socket.close(0)
        self._context.destroy(0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, sink: Sink) -> None:
        output, stop = self._context.socket(zmq.PULL), self._context.socket(zmq.PAIR)
        try:
            output.bind(self.addresses.outputs[0])
            stop.connect(_STOP)
            poller = zmq.Poller()
            poller.register(output, zmq.POLLIN)
            poller.register(stop, zmq.POLLIN)
            decoder: Decoder[Any] = Decoder(EngineCoreOutputs | UtilityOutput)
            while stop not in dict(poller.poll()):
                frames = output.recv_multipart(copy=False)
                if frames[0].bytes == ENGINE_CORE_DEAD:
                    raise EngineDeadError("the engine failed; its log says why")
                self._take(decoder.decode([frame.buffer for frame in frames]), sink)
        except Exception as error:
            self.fail(error)
            sink(error)
        finally:
            output.close(0)
            stop.close(0)

    def _take(self, message: EngineCoreOutputs | UtilityOutput, sink: Sink) -> None:
        if isinstance(message, EngineCoreOutputs):
            sink(message)
            return
        method, future = self._calls.pop(message.call_id, ("", Future()))
        if not future.set_running_or_notify_cancel():
            return
        if message.result is None:
            future.set_exception(HardpointError(message.failure))
            return
        try:
            future.set_result(typed.convert(message.result.value, result_type(method), path=method))
        except Exception as error:
            future.set_exception(error)
