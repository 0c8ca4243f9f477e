"""The client of an engine in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import msgspec

from hardpoint.core.client.base import OneEngine
from hardpoint.errors import EngineClosedError, EngineDeadError
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.errors import engine_dead
from hardpoint.host.boundary.hang_watch import HangWatch
from hardpoint.host.registry.kinds import KINDS, Process
from hardpoint.host.system.descriptors import check_descriptors
from hardpoint.plugins import EngineConfig, EngineCoreOutputs, EngineCoreRequest
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.parallel import Placement
from hardpoint.process.child_processes.launch import Interpreter, main_objects
from hardpoint.process.engine_process import EngineHost, EngineProcess
from hardpoint.process.launch import Launch
from hardpoint.process.protocol import EngineCoreReadyResponse, RequestType

from .base import Attempt, UtilityCalls
from .output_check import OutputCheck
from .output_queue import OutputQueue
from .sockets import READER_THREAD, EngineSockets

_log = logging.getLogger("hardpoint")

T = TypeVar("T")
_POLL_INTERVAL_MS = 20
_FAILURE_REPORT_TIMEOUT_S = 0.7
_LAST_OUTPUTS_TIMEOUT_S = 5.0

Sink = Callable[[EngineCoreOutputs | Exception], None]
"""Called with every batch of outputs, and last with the error that ended them; in other threads."""


@dataclass(frozen=True)
class EngineStart:
    """The parameters that an engine process is started with.

    Attributes:
        log_level: level of its logger.
        engine_index: the number of the engine, from 0; its ZMQ identity.
        num_sharing: engines of this host that are started at the same time, this one included.
        engines: see EnginePlace.
        vocab_size: tokens of the model.
        vocabulary: vocabulary of the tokenizer, for grammars; None is an engine without them.
        reports_load, reports_cache, inputs: as in Launch.
        interpreter: the Python to start. A restart uses it again, as by then the program may be
            in another directory.
    """

    config: EngineConfig
    config_sources: ConfigSources
    manifest: Manifest
    vocab_size: int = 1 << 31
    log_level: str = "WARNING"
    engine_index: int = 0
    num_sharing: int = 1
    engines: Placement | None = None
    vocabulary: Vocabulary | None = None
    reports_load: bool = False
    reports_cache: bool = False
    inputs: str = ""
    interpreter: Interpreter = field(default_factory=Interpreter.current)


class _State(Enum):
    """The states of an engine process as its client sees it.

    SERVING -> DEAD -> CLOSED, or SERVING -> CLOSED; each transition happens once.
    """

    SERVING = "serving"
    DEAD = "dead"
    """Pending calls have failed, the sink has the error, and messages are rejected."""
    CLOSED = "closed"
    """The client closed it; nothing is reported any more."""


class EngineMonitor:
    """Detects the death of an engine process and notifies senders, calls and the sink once.

    The threads hold the monitor, never the client, so that a client can be collected.
    """

    # Who calls what, in which thread:
    #
    # * watcher ("EngineWatch"): `_watch`, when the process has ended or has reported a failure.
    # * reader ("EngineCoreOutputs"): `_outputs_ended`, after the end marker, or for a message
    #   that cannot be decoded.
    # * any sender: `check_process`, before each message, so that none is lost between the death of
    #   the process and the watcher's notification.
    # * any thread, also the garbage collector's: `close`.
    #
    # The first two call `_die`, the only transition to DEAD; `close` is the only one to CLOSED.
    # `_changed` guards the state and is notified of each transition. It is reentrant: the
    # collector may call `close` in a thread that holds it.
    #
    # An engine that fails reports its error over the launch socket first, then sends its last
    # outputs and an end marker. An engine that ends in order sends them before it exits. In both
    # cases the watcher waits until the reader has seen the marker, for `_LAST_OUTPUTS_TIMEOUT_S`
    # at most, so that the sink gets these outputs before the error.

    def __init__(
        self, process: EngineHost, sockets: EngineSockets, sink: Sink, hang_watch: HangWatch
    ) -> None:
        self._process, self._sockets, self._sink = process, sockets, sink
        self._owner_pid = os.getpid()
        self._hang_watch = hang_watch
        self._state = _State.SERVING
        self._has_all_outputs = False
        self._changed = threading.Condition()
        sentinels = select.poll()
        for descriptor in process.sentinels:
            sentinels.register(descriptor, select.POLLIN)
        sockets.read(sink, self._outputs_ended, self.check_process, process.failure)
        self._watcher = threading.Thread(
            target=self._watch, args=(sentinels,), name=_WATCHER_THREAD, daemon=True
        )
        self._watcher.start()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    @property
    def was_killed(self) -> bool:
        """See `EngineProcess.was_killed`."""
        return self._process.was_killed

    def check_process(self) -> None:
        """Raise EngineDeadError if the process has ended and that is not yet reported."""
        if self._state is _State.SERVING and self._process.has_ended:
            raise engine_dead(self._reason(0))

    def close(self) -> None:
        """End the engine and release everything. Closing twice does nothing."""
        with self._changed:
            if self._state is _State.CLOSED:
                return
            self._state = _State.CLOSED
            self._changed.notify_all()
        if os.getpid() != self._owner_pid:  # a fork has neither the threads nor the engine
            return
        close_outside(self._close)

    def _close(self) -> None:
        self._sockets.close()
        self._process.close()
        self._watcher.join()

    def _watch(self, sentinels: select.poll) -> None:
        interval_s = self._hang_watch.interval_s
        while not sentinels.poll(None if interval_s is None else interval_s * 1000):
            if self._state is not _State.SERVING:
                return
            if (hung := self._hang_watch.check()) is not None:
                self._end_hung(EngineDeadError(f"the {self._process.label} {hung}"))
                return
        if self._state is _State.CLOSED:
            return
        error = self._reason(_FAILURE_REPORT_TIMEOUT_S)
        if self._process.sends_end_marker:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._has_all_outputs or self._state is not _State.SERVING,
                    _LAST_OUTPUTS_TIMEOUT_S,
                )
        self._die(error)

    def _end_hung(self, error: EngineDeadError) -> None:
        _log.error("%s; it is killed", error)
        self._die(error)  # first, so that no caller takes the signal for the reason
        self._process.kill()

    def _outputs_ended(self, error: Exception | None) -> None:
        if error is not None:
            self._die(error)
        with self._changed:
            self._has_all_outputs = True
            self._changed.notify_all()

    def _reason(self, timeout_s: float) -> Exception:
        deadline = time.monotonic() + timeout_s
        while (failure := self._process.failure()) is None:
            if self._state is _State.CLOSED or time.monotonic() > deadline:
                return EngineDeadError("the engine failed; see its log")
            time.sleep(_POLL_INTERVAL_MS / 1000)
        return failure

    def _die(self, error: Exception) -> None:
        if self._state is _State.CLOSED:
            return
        try:
            # Before the state changes: a request that is sent concurrently is rejected rather
            # than lost. Of several threads that come here, all wait until sending has stopped.
            self._sockets.fail(error)
        finally:
            with self._changed:
                is_first = self._state is _State.SERVING
                if is_first:
                    self._state = _State.DEAD
                    self._changed.notify_all()
            if is_first:
                self._sink(engine_dead(error))


_WATCHER_THREAD = "EngineWatch"


def close_outside(close: Callable[[], None]) -> None:
    """Call a function; in a new thread if the collector runs in a thread that it waits for."""
    if threading.current_thread().name in (READER_THREAD, _WATCHER_THREAD):
        threading.Thread(target=close, name="EngineClose").start()
    else:
        close()


def _wait_until_ready(
    sockets: EngineSockets, process: EngineHost, began: float, timeout_s: float
) -> EngineCoreReadyResponse:
    prepared, deadline = time.monotonic() - began, began + timeout_s
    while time.monotonic() < deadline:
        if (ready := sockets.poll_ready(_POLL_INTERVAL_MS)) is not None:
            return ready
        if (failure := process.failure()) is not None:
            raise failure
    raise EngineDeadError(
        f"the engine was not ready within {timeout_s:g} s (engine.start_timeout_seconds); "
        f"the program took {prepared:.1f} s of it before the launch"
    )


def _launch(start: EngineStart, sockets: EngineSockets) -> Launch:
    entries = [entry for entry in start.manifest.tree() if _is_needed(entry)]
    return Launch(
        address=msgspec.json.encode(sockets.addresses).decode(),
        manifest=start.manifest,
        config=msgspec.to_builtins(start.config.without_tables()),
        config_sources=start.config_sources.by_path,
        main_objects=main_objects(entry.value for entry in entries),
        log_level=start.log_level,
        engine_index=start.engine_index,
        local_rank=start.engine_index,
        num_sharing=start.num_sharing,
        engines=start.engines,
        vocabulary=start.vocabulary,
        reports_load=start.reports_load,
        reports_cache=start.reports_cache,
        inputs=start.inputs,
        folder=str(sockets.folder),
    )


def _is_needed(entry: PluginEntry) -> bool:
    return KINDS[entry.kind].processes != (Process.FRONTEND,) and not entry.stays


class RequestSockets:
    """Base of clients with sockets of their own for requests and outputs."""

    _sockets: EngineSockets
    _outputs: OutputQueue
    _check: OutputCheck | None = None  # of an engine; that of a relay has been checked

    def _send(self, requests: Sequence[EngineCoreRequest], send: Callable[[], T]) -> T:
        return send() if self._check is None else self._check.expect(requests, send)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request. If the engine rejects it, its first output is the error.

        Raises:
            EngineDeadError: the engine is gone.
            EngineTimeoutError: it accepted no message for some seconds.
            RequestError: the request cannot be encoded.
        """
        self._send([request], lambda: self._sockets.send(RequestType.ADD, request))

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Send the requests of one call in one message. If one is rejected, all are.

        Raises:
            As `add_request`.
        """
        self._send(requests, lambda: self._sockets.send(RequestType.ADD_ALL, list(requests)))

    def offer_requests(self, requests: Sequence[EngineCoreRequest]) -> Attempt:
        """Return a function that tries to send the requests of one call without waiting.

        Raises:
            RequestError: one cannot be encoded.
            EngineDeadError: the engine is gone; the returned function raises it too.
        """
        is_one = len(requests) == 1
        kind = RequestType.ADD if is_one else RequestType.ADD_ALL
        attempt = self._sockets.attempt(kind, requests[0] if is_one else list(requests))
        return partial(self._send, requests, attempt)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without waiting; a request sent later reaches the engine after this."""
        if ids := list(request_ids):
            if self._check is not None:
                self._check.forget(ids)
            with contextlib.suppress(EngineDeadError):  # its requests have ended with it
                self._sockets.post(RequestType.ABORT, ids)

    def get_output(self, *, wait: bool, timeout: float | None = None) -> EngineCoreOutputs | None:
        """Return the next batch of outputs; an empty one if there is none and `wait` is false.

        Args:
            wait: whether outputs are expected.
            timeout: seconds to wait; None is without limit.

        Returns:
            None if nothing came in time.

        Raises:
            EngineDeadError: the engine is gone.
            EngineClosedError: `end_waiting` was called.
        """
        return self._outputs.pop(wait=wait, timeout_s=timeout)

    def end_waiting(self) -> None:
        """Let a thread that waits in `get_output` raise EngineClosedError, before `close`."""
        self._outputs.put(EngineClosedError("the engine is closed"))


class ProcessClient(RequestSockets, OneEngine, UtilityCalls):
    """Starts an engine process, sends it requests, and receives its outputs.

    Implements `EngineCoreClient`. A client that is collected before it is closed closes its engine.

    Attributes:
        start: the parameters that the engine was started with.
        ready: the engine's ready response.
        activity: what the engine is doing, or was doing when it died.
    """

    in_process = False
    is_serving = True

    def __init__(
        self,
        start: EngineStart,
        sink: Sink | None = None,
        process: EngineHost | None = None,
    ) -> None:
        """Start the engine and wait until it is ready.

        Args:
            sink: called with outputs, and last with the error that ended them, in other threads;
                must not hold this client. Without a sink they wait for `get_output`.
            process: where the engine runs, waiting for its launch; None spawns a process.

        Raises:
            HardpointError: the error that the engine raised while it was built.
            EngineDeadError: it ended without a report, or was not ready in time.
            HardpointError: too few file descriptors are free, or no folder can hold the sockets.
        """
        self.start = start
        self._outputs = OutputQueue()
        UtilityCalls.__init__(self, start.config.engine.call_timeout_seconds)
        if process is None:  # else its starter has checked
            check_descriptors()
        with contextlib.ExitStack() as undo:
            self._sockets = EngineSockets(start.engine_index, manifest_hash=start.manifest.hash)
            undo.callback(self._sockets.close)
            self.activity = Activity.create(self._sockets.folder)
            undo.callback(self.activity.close)
            process = process or EngineProcess.spawn(start.interpreter)
            undo.callback(process.close, 0)
            process.activity = self.activity
            process.launch(_launch(start, self._sockets))
            began = time.monotonic()
            if isinstance(process, EngineProcess):
                began = process.started_at
            timeout_s = start.config.engine.start_timeout_seconds
            self.ready = _wait_until_ready(self._sockets, process, began, timeout_s)
            undo.pop_all()
        self._check = self._sockets.check = OutputCheck(
            start.vocab_size, self.ready.max_model_len, is_remote=process.is_remote
        )
        sink = self._outputs.put if sink is None else sink
        settings = start.config.engine
        watch = HangWatch(self.activity, settings.hung_process_seconds, settings.hung_step_seconds)
        self._monitor = EngineMonitor(process, self._sockets, sink, watch)
        self._release = weakref.finalize(self, self._monitor.close)

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._monitor.pid

    @property
    def pids(self) -> Mapping[int, int]:
        """The engine's process id, by its rank."""
        return {0: self.pid}

    @property
    def was_killed(self) -> bool:
        """Whether a signal that others send ended the engine, so that no plugin is to blame."""
        return self._monitor.was_killed

    def call(self, method: str, *args: Any, rank: int | None = None) -> Future[Any]:  # noqa: ARG002
        """Call one of the engine's utilities without waiting.

        Raises:
            EngineDeadError: the engine is gone.
            RequestError: the arguments cannot be encoded.
        """
        return self._sockets.call(method, *args)

    def close(self) -> None:
        """End the engine and release everything. Closing twice does nothing."""
        self._release()
        self.activity.close()
