"""A client of an engine in a process of its own."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hardpoint.core.engine.utility_calls import NO_TIMEOUT
from hardpoint.core.engine_process.launch import Interpreter, Launch, main_objects
from hardpoint.core.engine_process.process import EngineProcess
from hardpoint.core.wire import EngineCoreReadyResponse, RequestType
from hardpoint.plugins import EngineConfig, EngineCoreOutputs, EngineCoreRequest
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.errors import EngineDeadError, EngineTimeoutError
from hardpoint.plugins.kinds import KINDS, Process
from hardpoint.plugins.manifest import Manifest, PluginEntry

from .output_queue import Inbox
from .sockets import Attempt, EngineSockets, checked, dead

_GLANCE_MS = 20
_LAST_WORDS_S = 0.7
_LAST_OUTPUTS_S = 5.0

Sink = Callable[[EngineCoreOutputs | Exception], None]
"""Takes every batch of outputs, and at last the error that ended them. Called in other threads."""


@dataclass(frozen=True)
class EngineStart:
    """What an engine process is started with.

    Attributes:
        log_level: of its logger.
        engine_index: which engine it is, from 0; clients address it by that.
        interpreter: what it runs in. Whoever starts the engine anew keeps it, for by then the
            program may be in another directory.
    """

    config: EngineConfig
    config_sources: ConfigSources
    manifest: Manifest
    log_level: str = "WARNING"
    engine_index: int = 0
    interpreter: Interpreter = field(default_factory=Interpreter.current)


class EngineConnection:
    """Sends to an engine process, and tells a sink of its outputs and of its end.

    Its threads hold it, so it lives until it is closed.

    Attributes:
        ready: what the engine said when it was there.
    """

    def __init__(
        self, start: EngineStart, sink: Sink, process: EngineProcess | None = None
    ) -> None:
        """Start the engine and wait until it is ready.

        Args:
            start: what it is to be.
            sink: takes what comes of it.
            process: one that was spawned already, and waits for its launch.

        Raises:
            HardpointError: what the engine raised when it was built.
            EngineDeadError: it ended without a word, or was not ready in time.
        """
        self._sink = sink
        self._owner = os.getpid()
        self._closing, self._told = False, threading.Event()
        self._telling, self._listening = threading.Lock(), threading.Lock()
        with contextlib.ExitStack() as undo:
            self._sockets = EngineSockets(start.engine_index, manifest_hash=start.manifest.hash)
            undo.callback(self._sockets.close)
            self._process = process or EngineProcess.spawn(start.interpreter)
            undo.callback(self._process.close, 0)
            self._process.launch(_launch(start, self._sockets))
            self.ready = self._wait_until_ready(start.config.engine.start_timeout_seconds)
            undo.pop_all()
        self._sockets.read(sink, self._no_more_outputs)
        self._watcher = threading.Thread(
            target=self._watch, args=(self._sentinels(),), name="EngineWatch", daemon=True
        )
        self._watcher.start()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def send(self, kind: RequestType, message: Any) -> None:
        """Send one message; wait a while if the engine takes none.

        Raises:
            EngineDeadError: the engine is gone.
            EngineTimeoutError: it took no message in that time.
            RequestError: the message cannot travel.
        """
        self._check_alive()
        self._sockets.send(kind, message)

    def attempt(self, kind: RequestType, message: Any) -> Attempt:
        """Return what sends one message now, or not at all, and may try that again.

        Raises:
            RequestError: the message cannot travel.
            EngineDeadError: now or when it is called: the engine is gone.
        """
        self._check_alive()
        return checked(self._check_alive, self._sockets.attempt(kind, message))

    def post(self, kind: RequestType, message: Any) -> None:
        """Send one message now, or as soon as the engine takes it.

        Raises:
            EngineDeadError, RequestError: as `send`.
        """
        self._check_alive()
        self._sockets.post(kind, message)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call one of the engine's utilities; all calls fail when it dies. Does not wait.

        Raises:
            EngineDeadError, RequestError: as `send`.
        """
        self._check_alive()
        return self._sockets.call(method, *args)

    def close(self) -> None:
        """End the engine, and give back everything. Closing twice does nothing."""
        with self._telling:
            if self._closing:
                return
            self._closing = True
            self._told.set()
        if os.getpid() != self._owner:  # a fork has neither the threads nor the engine
            return
        if threading.current_thread().name in _OWN_THREADS:
            # A collection may run in one of the threads that closing waits for.
            threading.Thread(target=self._close, name="EngineClose").start()
        else:
            self._close()

    def _close(self) -> None:
        self._sockets.close()
        self._process.close()
        self._watcher.join()

    def _check_alive(self) -> None:
        """Find out now about an end that nobody was told of yet."""
        if not self._told.is_set() and self._process.returncode is not None:
            self._end(self._last_words(0))

    def _wait_until_ready(self, seconds: float) -> EngineCoreReadyResponse:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (ready := self._sockets.poll_ready(_GLANCE_MS)) is not None:
                return ready
            if (failure := self._process.failure()) is not None:
                raise failure
        raise EngineDeadError(
            f"the engine was not ready within {seconds:g} s (engine.start_timeout_seconds)"
        )

    def _sentinels(self) -> select.poll:
        poller = select.poll()
        for descriptor in self._process.sentinels:
            poller.register(descriptor, select.POLLIN)
        return poller

    def _watch(self, sentinels: select.poll) -> None:
        """Tell everybody when the process is gone, or has said that it fails."""
        sentinels.poll()
        if self._closing:
            return
        error = self._last_words(_LAST_WORDS_S)
        if self._process.reported:  # it sends what is left, and the reader tells at the end of it
            self._told.wait(_LAST_OUTPUTS_S)
        self._end(error)

    def _no_more_outputs(self, error: Exception | None) -> None:
        """Tell everybody why the reader ended."""
        self._end(error or self._last_words(_LAST_WORDS_S))

    def _last_words(self, seconds: float) -> Exception:
        """Return why the engine serves no more; wait so long for it to say so itself."""
        deadline = time.monotonic() + seconds
        while True:
            with self._listening:
                failure = self._process.failure()
            if failure is not None:
                return failure
            if self._closing or time.monotonic() > deadline:
                return EngineDeadError("the engine failed; its log says why")
            time.sleep(_GLANCE_MS / 1000)

    def _end(self, error: Exception) -> None:
        """Tell everybody who waits, once.

        Nothing can be sent any more before it counts as told: a request that comes at this moment
        would be lost otherwise, and its sender would not know whether it ran.
        """
        if self._closing:
            return
        try:
            self._sockets.fail(error)
        finally:
            with self._telling:
                first = not self._told.is_set()
                self._told.set()
            if first:
                self._sink(dead(error))


_OWN_THREADS = ("EngineCoreOutputs", "EngineWatch")


def _launch(start: EngineStart, sockets: EngineSockets) -> Launch:
    return Launch(
        address=msgspec.json.encode(sockets.addresses).decode(),
        manifest=start.manifest,
        config=msgspec.to_builtins(start.config),
        config_sources=start.config_sources.by_path,
        main_objects=main_objects(entry.value for entry in start.manifest.entries if _goes(entry)),
        log_level=start.log_level,
        engine_index=start.engine_index,
        folder=str(sockets.folder),
    )


def _goes(entry: PluginEntry) -> bool:
    """Whether a plugin is needed in the engine's process."""
    return KINDS[entry.kind].lives_in != (Process.FRONTEND,)


class ProcessClient:
    """Starts an engine process, sends it requests, and reads what comes of them.

    Implements `EngineCoreClient`. When it is collected without having been closed, it is closed.

    Attributes:
        start: what the engine was started with.
    """

    in_process = False

    def __init__(
        self,
        start: EngineStart,
        sink: Sink | None = None,
        process: EngineProcess | None = None,
    ) -> None:
        """Start the engine and wait until it is ready.

        Args:
            start: what it is to be.
            sink: takes outputs, and at last the error that ended them, in other threads; must
                not hold this client. Without one they wait for `get_output`.
            process: one that was spawned already, and waits for its launch.

        Raises:
            HardpointError: what the engine raised when it was built.
            EngineDeadError: it ended without a word, or was not ready in time.
        """
        self._inbox = Inbox()
        self.start = start
        self._timeout_s = start.config.engine.call_timeout_seconds
        self._connection = EngineConnection(
            start, self._inbox.put if sink is None else sink, process
        )
        self._release = weakref.finalize(self, self._connection.close)

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._connection.pid

    @property
    def ready(self) -> EngineCoreReadyResponse:
        """What the engine said when it was there."""
        return self._connection.ready

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request. If the engine refuses it, its first output says so.

        Raises:
            EngineDeadError: the engine is gone.
            EngineTimeoutError: it took no message for some seconds.
            RequestError: the request cannot travel.
        """
        self._connection.send(RequestType.ADD, request)

    def offer_request(self, request: EngineCoreRequest) -> Attempt:
        """Return what sends a request if the engine takes it at once, and may try that again.

        Raises:
            RequestError: the request cannot travel.
            EngineDeadError: now or when it is called: the engine is gone.
        """
        return self._connection.attempt(RequestType.ADD, request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; they give no more outputs. Does not wait; later requests come after it."""
        if ids := list(request_ids):
            with contextlib.suppress(EngineDeadError):  # it has ended them all
                self._connection.post(RequestType.ABORT, ids)

    def get_output(self, *, wait: bool, timeout: float | None = None) -> EngineCoreOutputs | None:
        """Return the next batch of outputs; an empty one if there is none and `wait` is false.

        Args:
            wait: whether there is something to wait for.
            timeout: seconds to wait; None is as long as it takes.

        Returns:
            None if nothing came in time.

        Raises:
            EngineDeadError: the engine is gone.
        """
        item = self._inbox.get(timeout if wait else 0)
        if isinstance(item, Exception):
            raise dead(item)
        return EngineCoreOutputs() if item is None and not wait else item

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call one of the engine's utilities.

        Raises:
            EngineDeadError: the engine is gone.
        """
        return self._connection.call(method, *args)

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call one of the engine's utilities and wait for its result.

        Raises:
            EngineDeadError: the engine is gone.
            EngineTimeoutError: it did not answer in time.
            HardpointError: what the utility raised.
        """
        future = self.call(method, *args)
        try:
            return future.result(self.patience(method))
        except TimeoutError:
            if future.done():  # the engine's own words
                raise
            future.cancel()
            raise self.no_answer(method) from None

    def patience(self, method: str) -> float | None:
        """Return within how many seconds a call is to be answered, None if that is open."""
        return None if method in NO_TIMEOUT else self._timeout_s

    def no_answer(self, method: str) -> EngineTimeoutError:
        """Return what to raise when a call was not answered in time."""
        return EngineTimeoutError(
            f"the engine did not answer {method} within {self._timeout_s:g} s "
            "(engine.call_timeout_seconds)"
        )

    def close(self) -> None:
        """End the engine, and give back everything. Closing twice does nothing."""
        self._release()
