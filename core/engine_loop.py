"""The busy loop of an engine process: input, one step, output, until it is told to end."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    FinishReason,
    HardpointError,
)

from .engine import EngineCore
from .error_kinds import kind_of
from .utilities import call_utility
from .wire import ShutdownState, UtilityCall, UtilityOutput

__all__ = ["EngineLoop", "LoopOptions", "LoopQueues"]

_log = logging.getLogger("hardpoint")
_IDLE_SECONDS = 0.001  # for other threads, where requests wait for something outside of the loop


@dataclass(frozen=True)
class LoopOptions:
    """How a loop behaves.

    Attributes:
        drain_seconds: how long requests may go on after the first signal; 0 aborts them at once.
        watchdog_seconds: a step that takes longer has the stacks of all threads written to
            stderr; 0 watches nothing.
        watchdog_exits: whether such a step also ends the process.
    """

    drain_seconds: float = 0.0
    watchdog_seconds: float = 0.0
    watchdog_exits: bool = False


class Wakeup:
    """A message that says nothing but that there is something to look at."""


@dataclass(frozen=True)
class Failure:
    """Why the loop must end: the executor failed, or a thread beside the loop did."""

    error: BaseException


@dataclass(frozen=True)
class Refusal:
    """A request that could not be taken before it reached the loop."""

    request_id: str
    client_index: int
    error: HardpointError


Message = EngineCoreRequest | list[str] | UtilityCall | Refusal | Failure | Wakeup
"""What the loop gets; a list of strings are ids to abort."""


@dataclass(frozen=True)
class LoopQueues:
    """What connects a loop with the threads beside it.

    `SimpleQueue.put` may be called from a signal handler, even while the same thread gets.

    Attributes:
        input: in the order in which it came.
        aborts: ids, beside `input`, so that an abort takes effect within the step that runs.
        output: messages by client index; None ends the thread that sends them, bytes are sent to
            every client as they are and end it too.
    """

    input: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    aborts: queue.SimpleQueue[list[str]] = field(default_factory=queue.SimpleQueue)
    output: queue.SimpleQueue[tuple[int, EngineCoreOutputs | UtilityOutput] | bytes | None] = field(
        default_factory=queue.SimpleQueue
    )


class EngineLoop:
    """Moves messages from the input queue into an engine core, and its outputs to their clients."""

    def __init__(
        self,
        core: EngineCore,
        queues: LoopQueues,
        options: LoopOptions = LoopOptions(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The caller closes the core."""
        self._core = core
        self._queues = queues
        self._options = options
        self._clock = clock
        self._state = ShutdownState.RUNNING
        self._drain_until = 0.0
        self._signals = 0

    def request_shutdown(self) -> None:
        """Begin to end: drain, then stop. Called twice, stop at once. Safe in a signal handler."""
        self._signals += 1
        self._queues.input.put(Wakeup())

    def run(self) -> None:
        """Work until shut down.

        Raises:
            BaseException: whatever ended the engine before its time.
        """
        while not self._is_over():
            self._take_input()
            if self._core.has_requests():
                with self._watched():
                    outputs, executed = self._core.step(self._late_aborts)
                self._send(outputs)
                if not executed and self._core.has_requests():
                    time.sleep(_IDLE_SECONDS)

    def _is_over(self) -> bool:
        """Follow the signals; return whether nothing is left to do."""
        if self._signals and self._state is ShutdownState.RUNNING:
            self._state = ShutdownState.REQUESTED
            self._drain_until = self._clock() + self._options.drain_seconds
            live = self._core.num_unfinished_requests()
            _log.info("shutting down: %d requests may go on for %g s", live, self._drain_seconds)
        if self._state is ShutdownState.RUNNING:
            return False
        if self._signals > 1 or self._clock() >= self._drain_until:
            self._state = ShutdownState.SHUTTING_DOWN
            self._send(self._core.abort_requests(None))
        return self._core.num_unfinished_requests() == 0

    @property
    def _drain_seconds(self) -> float:
        return self._options.drain_seconds

    def _take_input(self) -> None:
        """Handle what is queued; without work, wait for something."""
        if not self._core.has_requests() and self._state is ShutdownState.RUNNING:
            self._handle(self._wait())
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._queues.input.get_nowait())

    def _wait(self) -> Message:
        """Wait for a message. Whatever is to be aborted now is in the input queue as well."""
        if self._queues.input.empty():
            self._late_aborts()
        return self._queues.input.get()

    def _late_aborts(self) -> list[str]:
        """Return the ids on the fast lane."""
        ids: list[str] = []
        with contextlib.suppress(queue.Empty):
            while True:
                ids += self._queues.aborts.get_nowait()
        return ids

    def _handle(self, message: Message) -> None:
        match message:
            case EngineCoreRequest():
                self._add(message)
            case list():
                self._send(self._core.abort_requests(message))
            case UtilityCall():
                self._call(message)
            case Refusal():
                self._refuse(message.request_id, message.client_index, message.error)
            case Failure():
                raise message.error
            case Wakeup():
                pass

    def _add(self, request: EngineCoreRequest) -> None:
        if self._state is not ShutdownState.RUNNING:
            shutting_down = EngineDeadError("the engine is shutting down")
            self._refuse(request.request_id, request.client_index, shutting_down)
            return
        try:
            self._core.add_request(request)
        except HardpointError as error:
            self._refuse(request.request_id, request.client_index, error)

    def _refuse(self, request_id: str, client_index: int, error: HardpointError) -> None:
        output = EngineCoreOutput(
            request_id=request_id,
            finish_reason=FinishReason.ERROR,
            error=str(error),
            error_kind=kind_of(error),
        )
        self._send({client_index: EngineCoreOutputs(outputs=[output])})

    def _call(self, call: UtilityCall) -> None:
        if self._state is ShutdownState.RUNNING:
            answer = call_utility(self._core, call)
        else:
            words = f"Call to {call.method} method failed: the engine is shutting down"
            answer = UtilityOutput.failed(call.call_id, words)
        self._queues.output.put((call.client_index, answer))

    def _send(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for item in outputs.items():
            self._queues.output.put(item)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Have the stacks of all threads written if the step takes too long."""
        seconds = self._options.watchdog_seconds
        if not seconds:
            yield
            return
        faulthandler.dump_traceback_later(seconds, exit=self._options.watchdog_exits)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
