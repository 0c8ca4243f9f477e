"""The client's ZMQ sockets to one engine process."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from hardpoint import typed
from hardpoint.errors import EngineDeadError, EngineTimeoutError, PluginLoadError
from hardpoint.host.boundary.errors import engine_dead, error_of, rejection_output
from hardpoint.host.system.encoding import (
    MOST_BYTES,
    Decoder,
    Encoder,
    WireError,
)
from hardpoint.plugins import EngineCoreOutputs, RequestError
from hardpoint.process.protocol import (
    END_MARKERS,
    ENGINE_CORE_EXITED,
    SHUTDOWN_REASON,
    EngineAddresses,
    EngineCoreReadyResponse,
    RequestType,
    UtilityCall,
    UtilityOutput,
    decode_handshake,
)
from hardpoint.process.send_buffers import to_frames
from hardpoint.process.utility_calls import result_type
from hardpoint.process.zmq_resources import (
    BREAK_TIMEOUT_S,
    CUT_S,
    SOCKET_NAMES,
    ConnectionCount,
    end_context,
    make_socket_folder,
)

from .base import Attempt
from .output_check import OutputCheck

SEND_TIMEOUT_S = 10.0
"""How long an engine may accept no message before a sender gets an error."""

_SEND_HWM = 256  # messages that ZMQ buffers for an engine that reads none
_WAKE_ADDRESS = "inproc://reader"
_STOP, _FLUSH = b"stop", b"flush"  # what the reader thread is woken up for
_FLUSH_INTERVAL_MS = 20  # how often the reader retries the backlog
_RETRY_INTERVAL_S = 0.002

READER_THREAD = "EngineCoreOutputs"
"""Name of the thread that reads outputs."""

OnOutputs = Callable[[EngineCoreOutputs], None]
OnEnd = Callable[[Exception | None], None]

_Frames = Sequence[zmq.Frame]


@dataclass(frozen=True)
class _Unsent:
    """A message in the backlog.

    Attributes:
        future: future of the answer, for a utility call.
    """

    frames: _Frames
    future: Future[Any] | None

    @property
    def is_wanted(self) -> bool:
        return self.future is None or not self.future.cancelled()


class EngineSockets:
    """Sends messages to one engine from any thread, and reads its outputs in a thread of its own.

    While the engine accepts no messages, small ones that must not be lost (aborts and utility
    calls) wait in a backlog. Requests, which may be large and many, do not: their senders retry
    for `SEND_TIMEOUT_S`.

    Attributes:
        identity: the ZMQ identity of the engine.
        addresses: the addresses that the engine connects to.
        folder: folder of the sockets; `close` removes it.
        check: checks what the engine sends, if it is set before `read`.
    """

    # Locks: `_send_lock` guards the encoder, the ROUTER and the backlog; `_lock` guards `_calls`,
    # `_error` and the socket that wakes up the reader. The reader alone sets `_left`, before it
    # fails the calls. The encoder may work for long under `_send_lock`, and the reader needs
    # `_lock` for each answer, so they are two. Neither is taken while the other is held.

    def __init__(
        self,
        index: int = 0,
        *,
        manifest_hash: str = "",
        folder: Path | None = None,
    ) -> None:
        """Bind the sockets; the engine connects later.

        Args:
            manifest_hash: hash of the plugin set that the engine must have.
            folder: folder of the sockets; None makes one.

        Raises:
            HardpointError: no folder can be made for the sockets.
        """
        self.identity = index.to_bytes(2, "little")
        self.check: OutputCheck | None = None
        self._manifest_hash = manifest_hash
        with contextlib.ExitStack() as undo:
            self.folder = folder or make_socket_folder()
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._context = zmq.Context(io_threads=2)
            undo.callback(self._context.destroy, 0)
            self._input = self._context.socket(zmq.ROUTER)
            self._input.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._input.setsockopt(zmq.SNDHWM, _SEND_HWM)
            self._connections = ConnectionCount(self._input)
            self._output = self._context.socket(zmq.PULL)
            addresses = [
                self._bind(bound, name)
                for bound, name in zip((self._input, self._output), SOCKET_NAMES, strict=True)
            ]
            self.addresses = EngineAddresses(inputs=addresses[:1], outputs=addresses[1:])
            self._wake_sender = self._context.socket(zmq.PAIR)
            self._wake_receiver = self._context.socket(zmq.PAIR)  # the reader's, as is the PULL
            self._wake_sender.sndhwm = self._wake_receiver.rcvhwm = 0  # a stop is never refused
            self._wake_sender.bind(_WAKE_ADDRESS)
            self._wake_receiver.connect(_WAKE_ADDRESS)
            undo.pop_all()
        self._send_lock = threading.Lock()
        self._encoder = Encoder()
        self._backlog: deque[_Unsent] = deque()
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        self._call_ids = itertools.count()
        self._error: Exception | None = None
        self._left: Exception | None = None
        self._check_process: Callable[[], None] = _no_check
        self._failure: Callable[[], Exception | None] | None = None
        self._reader: threading.Thread | None = None

    def poll_ready(self, milliseconds: int) -> EngineCoreReadyResponse | None:
        """Return the engine's first message, None if it does not arrive in time.

        Raises:
            WireError: it is malformed, of another version of the protocol, or of another engine.
            PluginLoadError: the engine has another plugin set.
        """
        if not self._input.poll(milliseconds):
            return None
        identity, *frames = self._input.recv_multipart()
        if identity != self.identity:
            raise WireError(f"a message of engine {identity!r}, expected one of {self.identity!r}")
        ready = decode_handshake(b"".join(frames))
        if ready.manifest_hash != self._manifest_hash:
            raise PluginLoadError(
                f"manifest: the engine has the plugin set {ready.manifest_hash}, "
                f"expected {self._manifest_hash}"
            )
        return ready

    def read(
        self,
        on_outputs: OnOutputs,
        on_end: OnEnd,
        check_process: Callable[[], None] | None = None,
        failure: Callable[[], Exception | None] | None = None,
    ) -> None:
        """Start the reader thread.

        Args:
            on_outputs: called with every batch.
            on_end: called once when no more outputs will come: with the error, or with None if
                the engine sent its end marker.
            check_process: called before each message is sent; raises EngineDeadError if the
                engine's process has ended.
            failure: returns the error of an engine that has left, None if it ends in order.
        """
        self._check_process = check_process or _no_check
        self._failure = failure
        self._reader = threading.Thread(
            target=self._read, args=(on_outputs, on_end), name=READER_THREAD, daemon=True
        )
        self._reader.start()

    def send(self, kind: RequestType, message: Any) -> None:
        """Send one message; wait up to `SEND_TIMEOUT_S` until the engine accepts it.

        Raises:
            EngineDeadError: the engine is gone.
            EngineTimeoutError: it accepted no message in that time.
            RequestError: the message cannot be encoded.
        """
        deadline = time.monotonic() + SEND_TIMEOUT_S
        attempt = self.attempt(kind, message)
        while not attempt():
            if time.monotonic() >= deadline:
                raise send_timeout()
            time.sleep(_RETRY_INTERVAL_S)

    def attempt(self, kind: RequestType, message: Any) -> Attempt:
        """Encode one message; return a function that tries to send it.

        Raises:
            RequestError: the message cannot be encoded.
            EngineDeadError: the engine is gone; the returned function raises it too.
        """
        self._check_alive()
        with self._send_lock:
            frames = self._encoded(kind, message)

        def attempt() -> bool:
            self._check_alive()
            with self._send_lock:
                return self._backlog_sent() and self._sent(frames)

        return attempt

    def post(self, kind: RequestType, message: Any, future: Future[Any] | None = None) -> None:
        """Send one message now, or from the backlog as soon as the engine accepts it.

        Args:
            future: future of the answer; cancelling it drops the message from the backlog.

        Raises:
            EngineDeadError, RequestError: as for `attempt`.
        """
        self._check_alive()
        with self._send_lock:
            frames = self._encoded(kind, message)
            is_first = self._backlog_sent()
            if is_first and self._sent(frames):
                return
            if future is not None:  # so that cancelled calls do not pile up
                self._backlog = deque(unsent for unsent in self._backlog if unsent.is_wanted)
            self._backlog.append(_Unsent(frames, future))
        if is_first:
            self._wake_reader(_FLUSH)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call one of the engine's utilities without waiting; every call fails when it dies.

        Raises:
            EngineDeadError, RequestError: as for `attempt`.
        """
        future: Future[Any] = Future()
        self._check_alive()
        with self._lock:
            self._raise_if_failed()
            call_id = next(self._call_ids)
            self._calls[call_id] = (method, future)
        future.add_done_callback(lambda _: self._pop_call(call_id))  # also if it is cancelled
        try:
            self.post(RequestType.UTILITY, UtilityCall(0, call_id, method, list(args)), future)
        except BaseException:
            self._pop_call(call_id)
            raise
        return future

    def fail(self, error: Exception) -> None:
        """Reject all further messages and fail all pending calls; only the first error counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        with self._send_lock:
            self._backlog.clear()
        self._fail_calls(error)

    def _fail_calls(self, error: Exception) -> None:
        with self._lock:
            calls, self._calls = self._calls, {}
        for _, future in calls.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(engine_dead(error))

    def close(self) -> None:
        """Stop the reader; close the sockets and remove their folder. Not in the reader thread."""
        is_dead = self._error is not None
        self.fail(EngineDeadError("the engine was closed"))
        if self._reader is not None:
            self._wake_reader(_STOP)
            self._reader.join()
        self._check_process, self._failure = _no_check, None
        if is_dead and not self._input.closed:
            self._connections.wait_until_none(BREAK_TIMEOUT_S)
            time.sleep(CUT_S)
        with self._send_lock:
            self._connections.close()
            self._input.close(0)
        with self._lock:
            self._wake_sender.close(0)
        for socket in (self._output, self._wake_receiver):  # the reader has ended
            socket.close(0)
        end_context(self._context, f"the sockets in {self.folder}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _bind(self, socket: zmq.Socket[bytes], name: str) -> str:
        path = self.folder / name
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        socket.bind(f"ipc://{path}")
        path.chmod(0o600)  # a umask may have taken the owner's permissions too
        return f"ipc://{path}"

    # Sending

    def _check_alive(self) -> None:
        self._check_process()
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if (error := self._error or self._left) is not None:
            raise engine_dead(error)

    def _encoded(self, kind: RequestType, message: Any) -> _Frames:
        try:
            frames = self._encoder.encode(message)
        except WireError as cause:
            raise RequestError(str(cause)) from None
        return to_frames([kind, *frames])

    def _backlog_sent(self) -> bool:
        while self._backlog:
            if self._backlog[0].is_wanted and not self._sent(self._backlog[0].frames):
                return False
            self._backlog.popleft()
        return True

    def _sent(self, frames: _Frames) -> bool:
        try:
            self._input.send_multipart([self.identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as cause:
            self._backlog.clear()
            if (
                cause.errno == zmq.EHOSTUNREACH and self._failure is not None
            ):  # it has closed its socket
                reason = self._failure() or EngineDeadError(SHUTDOWN_REASON)
                left = engine_dead(reason)
                raise left from left.__cause__ or cause
            raise EngineDeadError(f"the engine cannot be reached: {cause}") from cause
        return True

    # Reading

    def _wake_reader(self, reason: bytes) -> None:
        with self._lock, contextlib.suppress(zmq.ZMQError):  # the reader has ended
            self._wake_sender.send(reason, zmq.NOBLOCK)

    def _read(self, on_outputs: OnOutputs, on_end: OnEnd) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._output, zmq.POLLIN)
            poller.register(self._wake_receiver, zmq.POLLIN)
            check = self.check
            decoder: Decoder[Any] = (
                Decoder(EngineCoreOutputs | UtilityOutput) if check is None else check.decoder
            )
            while (frames := self._receive(poller)) is not None:
                if (marker := frames[0].bytes) in END_MARKERS:
                    if marker == ENGINE_CORE_EXITED:
                        self._fail_lost(on_outputs)
                    on_end(None)
                    return
                if check is not None:
                    check.check_size(len(frames[0]), len(self._calls))
                message = decoder.decode([frame.buffer for frame in frames])
                if isinstance(message, EngineCoreOutputs):
                    if check is not None:
                        check.check(message, check.decoder.rare_fields)
                    on_outputs(message)
                else:
                    self._complete_call(message)
        except Exception as error:
            on_end(error)
        finally:
            self._output.close(0)

    def _fail_lost(self, on_outputs: OnOutputs) -> None:
        """Fail the requests and calls that an engine that ended in order has not read.

        It answers what it has read before its end marker. ZMQ loses what is sent between the
        moment when the engine closes its sockets and the one when this process notices it; and
        the process may live for long afterwards.
        """
        self._left = error = EngineDeadError(SHUTDOWN_REASON)
        self._fail_calls(error)
        for request_id in () if self.check is None else self.check.forget_all():
            on_outputs(rejection_output(request_id, error))

    def _receive(self, poller: zmq.Poller) -> list[zmq.Frame] | None:
        while True:
            ready = dict(poller.poll(None if self._flush_backlog() else _FLUSH_INTERVAL_MS))
            if self._wake_receiver in ready and self._wake_receiver.recv() == _STOP:
                return None  # messages that were not read are dropped
            if self._output in ready:
                return self._output.recv_multipart(copy=False)

    def _flush_backlog(self) -> bool:
        try:
            with self._send_lock:
                return self._backlog_sent()
        except EngineDeadError:  # the process is watched elsewhere, which finds the reason too
            return True

    def _pop_call(self, call_id: int) -> tuple[str, Future[Any] | None]:
        """Remove a pending call and return it; the future is None if it was removed before."""
        with self._lock:
            return self._calls.pop(call_id, ("", None))

    def _complete_call(self, message: UtilityOutput) -> None:
        method, future = self._pop_call(message.call_id)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if message.result is None:
            future.set_exception(error_of(message.kind, message.failure))
            return
        try:
            future.set_result(typed.convert(message.result.value, result_type(method), path=method))
        except Exception as error:
            future.set_exception(error)


def _no_check() -> None:
    pass


def send_timeout() -> EngineTimeoutError:
    """Return the error for an engine that accepts no messages."""
    return EngineTimeoutError(f"the engine took no message for {SEND_TIMEOUT_S:g} s")
