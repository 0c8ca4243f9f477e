"""A client of an engine in a process of its own."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from hardpoint.core.engine.utility_calls import UNHURRIED
from hardpoint.core.engine_process.process import EngineProcess
from hardpoint.core.wire import EngineCoreReadyResponse, RequestType
from hardpoint.plugins import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineTimeoutError,
)

from .engine_connection import EngineConnection, EngineStart, Sink
from .outgoing import Attempt
from .output_queue import Inbox
from .sockets import dead

__all__ = ["EngineStart", "ProcessClient"]


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
        return None if method in UNHURRIED else self._timeout_s

    def no_answer(self, method: str) -> EngineTimeoutError:
        """Return what to raise when a call was not answered in time."""
        return EngineTimeoutError(
            f"the engine did not answer {method} within {self._timeout_s:g} s "
            "(engine.call_timeout_seconds)"
        )

    def close(self) -> None:
        """End the engine, and give back everything. Closing twice does nothing."""
        self._release()
