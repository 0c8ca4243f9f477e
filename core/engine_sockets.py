"""The client's end of the sockets to an engine process, and the thread that reads it."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq

from hardpoint.plugins import EngineCoreOutputs, EngineDeadError, EngineTimeoutError, typed

from .error_kinds import error_of
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

__all__ = ["EngineSockets", "dead"]

_STOP = "inproc://stop"
_SEND_TIMEOUT_MS = 10_000

OnOutputs = Callable[[EngineCoreOutputs], None]
OnEnd = Callable[[Exception | None], None]


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
        self._input.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
        self._input.bind(self.addresses.inputs[0])
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind(_STOP)
        self._stopped = self._context.socket(zmq.PAIR)  # the reader's
        self._stopped.connect(_STOP)
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

    def read(self, on_outputs: OnOutputs, on_end: OnEnd) -> None:
        """Begin to read, in a thread.

        Args:
            on_outputs: takes every batch.
            on_end: is told when no more will come: of the error, or None if the engine said
                itself that it failed.
        """
        self._reader = threading.Thread(
            target=self._read, args=(on_outputs, on_end), name="EngineCoreOutputs", daemon=True
        )
        self._reader.start()

    def send(self, kind: RequestType, message: Any) -> None:
        """Send one message.

        Raises:
            EngineDeadError: the engine is gone.
            EngineTimeoutError: it takes no more messages.
            WireError: the message cannot travel.
        """
        with self._lock:
            if self._dead is not None:
                raise dead(self._dead)
            self._tracker.collect()
            frames = self._encoder.encode(message)
            try:
                self._input.send_multipart(
                    [self.identity, kind, *self._tracker.frames(frames)], copy=False
                )
            except zmq.Again:
                raise EngineTimeoutError(
                    f"the engine took no message for {_SEND_TIMEOUT_MS / 1000:g} s"
                ) from None
            except zmq.ZMQError as cause:
                raise EngineDeadError(f"the engine cannot be reached: {cause}") from cause

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call one of the engine's utilities.

        Raises:
            EngineDeadError, EngineTimeoutError, WireError: as `send`.
        """
        future: Future[Any] = Future()
        call_id = next(self._serials)
        self._calls[call_id] = (method, future)
        try:
            self.send(RequestType.UTILITY, UtilityCall(0, call_id, method, list(args)))
        except BaseException:
            self._calls.pop(call_id, None)
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
            if future.set_running_or_notify_cancel():
                future.set_exception(dead(error))

    def close(self) -> None:
        """Stop reading; close and remove everything. Not from the thread that reads."""
        self.fail(EngineDeadError("the engine was closed"))
        if self._reader is not None:
            with contextlib.suppress(zmq.Again):  # it has ended already
                self._stop.send(b"", zmq.NOBLOCK)
            self._reader.join()
        for socket in (self._input, self._stop, self._stopped):
            socket.close(0)
        self._context.destroy(0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, on_outputs: OnOutputs, on_end: OnEnd) -> None:
        output, stop = self._context.socket(zmq.PULL), self._stopped
        try:
            output.bind(self.addresses.outputs[0])
            poller = zmq.Poller()
            poller.register(output, zmq.POLLIN)
            poller.register(stop, zmq.POLLIN)
            decoder: Decoder[Any] = Decoder(EngineCoreOutputs | UtilityOutput)
            while stop not in dict(poller.poll()):
                frames = output.recv_multipart(copy=False)
                if frames[0].bytes == ENGINE_CORE_DEAD:
                    on_end(None)
                    return
                message = decoder.decode([frame.buffer for frame in frames])
                if isinstance(message, EngineCoreOutputs):
                    on_outputs(message)
                else:
                    self._answer(message)
        except Exception as error:
            on_end(error)
        finally:
            output.close(0)

    def _answer(self, message: UtilityOutput) -> None:
        """Complete a call; one that nobody waits for any more is forgotten."""
        method, future = self._calls.pop(message.call_id, ("", None))
        if future is None or not future.set_running_or_notify_cancel():
            return
        if message.result is None:
            future.set_exception(error_of(message.kind, message.failure))
            return
        try:
            future.set_result(typed.convert(message.result.value, result_type(method), path=method))
        except Exception as error:
            future.set_exception(error)


def dead(error: Exception) -> EngineDeadError:
    """Return what to raise for an engine that an error ended, anew for each who waits."""
    raised = EngineDeadError(str(error))
    if isinstance(error, EngineDeadError):
        raised.__cause__ = error.__cause__
        for note in getattr(error, "__notes__", ()):
            raised.add_note(note)
    else:
        raised.__cause__ = error
    return raised
