"""The client's end of the sockets to an engine process, and the thread that reads it."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from hardpoint.core.engine.utility_calls import result_type
from hardpoint.core.errors import error_of
from hardpoint.core.wire import (
    ENGINE_CORE_DEAD,
    MOST_BYTES,
    Decoder,
    Encoder,
    EngineAddresses,
    EngineCoreReadyResponse,
    RequestType,
    SendTracker,
    TensorConsumer,
    TensorProvider,
    UtilityCall,
    UtilityOutput,
    WireError,
    decode_handshake,
)
from hardpoint.plugins import EngineCoreOutputs, HardpointError, RequestError, typed
from hardpoint.plugins.errors import (
    EngineDeadError,
    EngineFaultError,
    EngineTimeoutError,
    PluginFaultError,
    PluginLoadError,
)

MOST_UNREAD = 256
"""Messages that ZMQ keeps for an engine that reads none."""

Attempt = Callable[[], bool]
"""Sends a message now or not at all; returns whether it was sent. For one message, once sent."""

_Frames = Sequence[zmq.Frame]


def checked(check: Callable[[], None], attempt: Attempt) -> Attempt:
    """Return an attempt that asks first whether there is any use in it."""

    def after_check() -> bool:
        check()
        return attempt()

    return after_check


@dataclass(frozen=True)
class _Waiting:
    """A message that the engine has not taken yet.

    Attributes:
        future: whoever waits for the answer to it.
    """

    frames: _Frames
    future: Future[Any] | None

    @property
    def wanted(self) -> bool:
        return self.future is None or not self.future.cancelled()


class Outgoing:
    """Sends messages in order, from any thread.

    While the engine takes none, small ones that must not be lost (aborts and calls) wait here,
    and requests, which may be large and many, are turned away.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        identity: bytes,
        consumer: TensorConsumer | None = None,
    ) -> None:
        """Send over a ROUTER with ROUTER_MANDATORY; the caller closes it.

        Large tensors are offered to `consumer`.
        """
        self._socket = socket
        self._identity = identity
        self._lock = threading.Lock()
        self._encoder, self._tracker = Encoder(consumer=consumer), SendTracker()
        self._backlog: deque[_Waiting] = deque()

    def attempt(self, kind: RequestType, message: Any) -> Attempt:
        """Return what tries to send a message; what tries again does not encode it again.

        Raises:
            EngineDeadError: when it is called: the engine cannot be reached.
            RequestError: the message cannot travel.
        """
        with self._lock:
            frames = self._frames(kind, message)

        def attempt() -> bool:
            with self._lock:
                return self._flushed() and self._sent(frames)

        return attempt

    def post(self, kind: RequestType, message: Any, future: Future[Any] | None = None) -> bool:
        """Send a message now, or later when `flush` is called.

        Args:
            future: of the answer; a message that waits is dropped once it is cancelled.

        Returns:
            Whether it is the first one that waits.

        Raises:
            EngineDeadError: the engine cannot be reached.
            RequestError: the message cannot travel.
        """
        with self._lock:
            frames = self._frames(kind, message)
            behind = not self._flushed()
            if not behind and self._sent(frames):
                return False
            if future is not None:  # so that calls which are given up do not pile up
                self._backlog = deque(each for each in self._backlog if each.wanted)
            self._backlog.append(_Waiting(frames, future))
            return not behind

    def flush(self) -> bool:
        """Send what waits as far as the engine takes it; return whether nothing waits any more.

        Raises:
            EngineDeadError: the engine cannot be reached.
        """
        with self._lock:
            return self._flushed()

    def drop(self) -> None:
        """Forget what waits; the engine is gone."""
        with self._lock:
            self._backlog.clear()

    def close(self) -> None:
        """Close the socket; nothing is sent any more."""
        with self._lock:
            self._socket.close(0)

    def _flushed(self) -> bool:
        while self._backlog:
            if self._backlog[0].wanted and not self._sent(self._backlog[0].frames):
                return False
            self._backlog.popleft()
        return True

    def _frames(self, kind: RequestType, message: Any) -> _Frames:
        self._tracker.collect()
        try:
            frames = self._encoder.encode(message)
        except WireError as cause:
            raise RequestError(str(cause)) from None
        return [zmq.Frame(kind), *self._tracker.frames(frames)]

    def _sent(self, frames: _Frames) -> bool:
        """Send all frames, or none if the engine takes no more now."""
        try:
            self._socket.send_multipart([self._identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as cause:
            self._backlog.clear()
            raise EngineDeadError(f"the engine cannot be reached: {cause}") from cause
        return True


SEND_SECONDS = 10.0
"""How long an engine may take no message before whoever sends is told so."""

_TO_READER = "inproc://reader"
_END, _LOOK = b"end", b"look"
_LOOK_AGAIN_MS = 20  # how often an engine that was behind is asked whether it takes more
_PAUSE_S = 0.002

OnOutputs = Callable[[EngineCoreOutputs], None]
OnEnd = Callable[[Exception | None], None]


class EngineSockets:
    """Sends to one engine, and reads what comes of it.

    `send`, `attempt`, `post` and `call` may be used from several threads.

    Attributes:
        identity: what the engine is addressed by.
        addresses: what it connects to.
        folder: where its sockets are; `close` removes it.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        manifest_hash: str = "",
        consumer: TensorConsumer | None = None,
        provider: TensorProvider | None = None,
    ) -> None:
        """Bind; the engine connects when it is there.

        Args:
            index: of the engine.
            manifest_hash: of the plugin set that the engine is to have.
            consumer: is offered large tensors of requests and calls.
            provider: finds those of outputs that the engine's consumer took, in the reader.
        """
        self.identity = index.to_bytes(2, "little")
        self._manifest_hash = manifest_hash
        self.folder = Path(tempfile.mkdtemp(prefix="hardpoint-"))
        self.addresses = EngineAddresses(
            inputs=[f"ipc://{self.folder / 'input'}"], outputs=[f"ipc://{self.folder / 'output'}"]
        )
        self._context = zmq.Context(io_threads=2)
        self._input = self._context.socket(zmq.ROUTER)
        self._input.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._input.setsockopt(zmq.SNDHWM, MOST_UNREAD)
        self._input.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._input.bind(self.addresses.inputs[0])
        self._output = self._context.socket(zmq.PULL)
        self._output.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._output.bind(self.addresses.outputs[0])
        self._to_reader = self._context.socket(zmq.PAIR)
        self._to_reader.bind(_TO_READER)
        self._words = self._context.socket(zmq.PAIR)  # the reader's, as is the PULL
        self._words.connect(_TO_READER)
        self._outgoing = Outgoing(self._input, self.identity, consumer)
        self._provider = provider
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        self._serials = itertools.count()
        self._dead: Exception | None = None
        self._reader: threading.Thread | None = None

    def poll_ready(self, milliseconds: int) -> EngineCoreReadyResponse | None:
        """Return the engine's first message, if it comes in time.

        Raises:
            WireError: it is none, of another protocol, or of an engine that nobody expects.
            PluginLoadError: the engine has other plugins.
        """
        if not self._input.poll(milliseconds):
            return None
        identity, *frames = self._input.recv_multipart()
        if identity != self.identity:
            raise WireError(f"an engine said {identity!r}, expected {self.identity!r}")
        ready = decode_handshake(b"".join(frames), EngineCoreReadyResponse)
        if ready.manifest_hash != self._manifest_hash:
            raise PluginLoadError(
                f"manifest: the engine has the plugin set {ready.manifest_hash}, "
                f"expected {self._manifest_hash}"
            )
        return ready

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
        """Send one message; wait a while if the engine takes none.

        Raises:
            EngineDeadError: the engine is gone.
            EngineTimeoutError: it took no message for `SEND_SECONDS`.
            RequestError: the message cannot travel.
        """
        until = time.monotonic() + SEND_SECONDS
        attempt = self.attempt(kind, message)
        while not attempt():
            if time.monotonic() >= until:
                raise behind()
            time.sleep(_PAUSE_S)

    def attempt(self, kind: RequestType, message: Any) -> Attempt:
        """Return what sends one message now, or not at all, and may try that again.

        Raises:
            RequestError: the message cannot travel.
            EngineDeadError: now or when it is called: the engine is gone.
        """
        self._check()
        return checked(self._check, self._outgoing.attempt(kind, message))

    def post(self, kind: RequestType, message: Any, future: Future[Any] | None = None) -> None:
        """Send one message now, or as soon as the engine takes it.

        Args:
            future: of the answer; once it is cancelled, a message that still waits is dropped.

        Raises:
            EngineDeadError, RequestError: as `send`.
        """
        self._check()
        if self._outgoing.post(kind, message, future):
            self._tell_reader(_LOOK)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call one of the engine's utilities; as `post`, this does not wait.

        Raises:
            EngineDeadError, RequestError: as `send`.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._check()
            call_id = next(self._serials)
            self._calls[call_id] = (method, future)
        future.add_done_callback(lambda _: self._taken(call_id))  # also when it is given up
        try:
            self.post(RequestType.UTILITY, UtilityCall(0, call_id, method, list(args)), future)
        except BaseException:
            self._taken(call_id)
            raise
        return future

    def fail(self, error: Exception) -> None:
        """Take it that the engine is gone: whoever waits is told, and nothing is sent any more."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error
            calls, self._calls = self._calls, {}
        self._outgoing.drop()
        for _, future in calls.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(dead(error))

    def close(self) -> None:
        """Stop reading; close and remove everything. Not from the thread that reads."""
        self.fail(EngineDeadError("the engine was closed"))
        if self._reader is not None:
            self._tell_reader(_END)
            self._reader.join()
        self._outgoing.close()
        for socket in (self._output, self._to_reader, self._words):
            socket.close(0)
        self._context.destroy(0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self) -> None:
        if self._dead is not None:
            raise dead(self._dead)

    def _tell_reader(self, word: bytes) -> None:
        with self._lock, contextlib.suppress(zmq.ZMQError):  # it has ended already
            self._to_reader.send(word, zmq.NOBLOCK)

    def _read(self, on_outputs: OnOutputs, on_end: OnEnd) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._output, zmq.POLLIN)
            poller.register(self._words, zmq.POLLIN)
            decoder: Decoder[Any] = Decoder(
                EngineCoreOutputs | UtilityOutput, provider=self._provider
            )
            while (frames := self._received(poller)) is not None:
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
            self._output.close(0)

    def _received(self, poller: zmq.Poller) -> list[zmq.Frame] | None:
        """Wait for a message, and meanwhile send what waits; return None at the end."""
        while True:
            ready = dict(poller.poll(None if self._all_sent() else _LOOK_AGAIN_MS))
            if self._words in ready and self._words.recv() == _END:
                return None  # what came and was not read is nobody's any more
            if self._output in ready:
                return self._output.recv_multipart(copy=False)

    def _all_sent(self) -> bool:
        try:
            return self._outgoing.flush()
        except EngineDeadError:  # others find that out, and tell how it ended
            return True

    def _taken(self, call_id: int) -> tuple[str, Future[Any] | None]:
        """Return a call, which is no longer waited for; no future if nobody waits."""
        with self._lock:
            return self._calls.pop(call_id, ("", None))

    def _answer(self, message: UtilityOutput) -> None:
        """Complete a call; one that nobody waits for any more is forgotten."""
        method, future = self._taken(message.call_id)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if message.result is None:
            future.set_exception(error_of(message.kind, message.failure))
            return
        try:
            future.set_result(typed.convert(message.result.value, result_type(method), path=method))
        except Exception as error:
            future.set_exception(error)


def behind() -> EngineTimeoutError:
    """Return what to raise when an engine takes no messages."""
    return EngineTimeoutError(f"the engine took no message for {SEND_SECONDS:g} s")


def dead(error: Exception) -> EngineDeadError:
    """Return what to raise for an engine that an error ended, anew for each who waits."""
    words = str(error)
    if not isinstance(error, HardpointError):
        words = f"the engine failed: {type(error).__name__}: {error}"
    by_plugin = isinstance(error, PluginFaultError)
    raised = EngineFaultError(words) if by_plugin else EngineDeadError(words)
    if isinstance(error, EngineDeadError):
        raised.__cause__ = error.__cause__
        for note in getattr(error, "__notes__", ()):
            raised.add_note(note)
    else:
        raised.__cause__ = error
    return raised
