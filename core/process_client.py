"""A client of an engine in a process of its own."""

from __future__ import annotations

import contextlib
import queue
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from hardpoint.plugins import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineTimeoutError,
)

from .engine_connection import EngineConnection, EngineStart, Sink
from .engine_sockets import dead
from .wire import EngineCoreReadyResponse, RequestType

__all__ = ["EngineStart", "ProcessClient", "no_answer"]


class ProcessClient:
    """Starts an engine process, sends it requests, and reads what comes of them.

    Implements `EngineCoreClient`. When it is collected without having been closed, it is closed.
    """

    in_process = False

    def __init__(self, start: EngineStart, sink: Sink | None = None) -> None:
        """Start the engine and wait until it is ready.

        Args:
            start: what it is to be.
            sink: takes outputs, and at last the error that ended them, in other threads; must
                not hold this client. Without one they wait for `get_output`.

        Raises:
            HardpointError: what the engine raised when it was built.
            EngineDeadError: it ended without a word, or was not ready in time.
        """
        # What waits here is bounded by the tokens that live requests may still give.
        self._inbox: queue.SimpleQueue[EngineCoreOutputs | Exception] = queue.SimpleQueue()
        self._timeout_s = start.config.engine.call_timeout_seconds
        self._connection = EngineConnection(start, sink or self._inbox.put)
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
        """Send a request. If the engine refuses it, its first output says so."""
        self._connection.send(RequestType.ADD, request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; they give no more outputs."""
        if ids := list(request_ids):
            with contextlib.suppress(EngineDeadError):  # it has ended them all
                self._connection.send(RequestType.ABORT, ids)

    def get_output(self, *, wait: bool) -> EngineCoreOutputs:
        """Return the next batch of outputs; an empty one if there is none and `wait` is false.

        Raises:
            EngineDeadError: the engine is gone.
        """
        try:
            item = self._inbox.get(block=wait)
        except queue.Empty:
            return EngineCoreOutputs()
        if isinstance(item, Exception):
            self._inbox.put(item)  # for whoever asks again
            raise dead(item)
        return item

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call one of the engine's utilities.

        Raises:
            EngineDeadError: the engine is gone.
        """
        return self._connection.call(method, *args)

    def ask(self, method: str, *args: Any) -> Any:
        """Call one of the engine's utilities and wait for its result.

        Raises:
            EngineDeadError: the engine is gone.
            EngineTimeoutError: it did not answer in time.
            HardpointError: what the utility raised.
        """
        future = self.call(method, *args)
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            if future.done():  # the engine's own words
                raise
            future.cancel()
            raise no_answer(method, self._timeout_s) from None

    def close(self) -> None:
        """End the engine, and give back everything. Closing twice does nothing."""
        self._release()


def no_answer(method: str, seconds: float) -> EngineTimeoutError:
    """Return what to raise when a call was not answered in time."""
    return EngineTimeoutError(
        f"the engine did not answer {method} within {seconds:g} s (engine.call_timeout_seconds)"
    )
