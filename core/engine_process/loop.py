"""The busy loop of an engine process: input, one step, output, until it is told to end."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hardpoint.core.engine.core import EngineCore
from hardpoint.core.engine.utility_calls import call_utility, failed_call
from hardpoint.core.errors import rejection_output
from hardpoint.core.wire import ShutdownState, UtilityCall
from hardpoint.plugins import EngineCoreOutputs, EngineCoreRequest, HardpointError
from hardpoint.plugins.errors import EngineDeadError, PluginFaultError

from .sender import Outbox

_log = logging.getLogger("hardpoint")

_SLACK = 0.1


class Watchdog:
    """Has the stacks of all threads written to stderr when a step takes too long.

    It does so from outside of Python, so that it works whatever the step hangs in. Setting its
    timer costs more than a small step, so the timer is set anew only when a tenth of its time is
    over: a step is reported after 1 to 1.1 times the limit.
    """

    def __init__(self, seconds: float, *, exits: bool = False) -> None:
        """Watch nothing yet.

        Args:
            seconds: the limit; 0 watches nothing at all.
            exits: whether a step that takes longer also ends the process, at once.
        """
        self._seconds = seconds
        self._exits = exits
        self._set_at: float | None = None

    def step_begins(self) -> None:
        """Give the step that begins its time."""
        if not self._seconds:
            return
        now = time.monotonic()
        if self._set_at is None or now - self._set_at > self._seconds * _SLACK:
            timeout = self._seconds * (1 + _SLACK)
            faulthandler.dump_traceback_later(timeout, exit=self._exits)
            self._set_at = now

    def rest(self) -> None:
        """Watch nothing until the next step."""
        if self._set_at is not None:
            faulthandler.cancel_dump_traceback_later()
            self._set_at = None


_IDLE_SECONDS = 0.001  # for other threads, where requests wait for something outside of the loop
_GLANCE_SECONDS = 0.25  # how often requests that a pause holds are looked at, for their deadlines


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
    """A request that could not be taken before it reached the loop, with an id that is in use."""

    request_id: str
    client_index: int
    error: HardpointError


@dataclass(frozen=True)
class Prepared:
    """A request with what was computed of it before it reached the loop.

    Attributes:
        block_hashes: of its prompt.
    """

    request: EngineCoreRequest
    block_hashes: list[bytes]


Message = Prepared | list[str] | UtilityCall | Refusal | Failure | Wakeup
"""What the loop gets; a list of strings are ids to abort."""


@dataclass(frozen=True)
class LoopQueues:
    """What connects a loop with the threads beside it.

    `SimpleQueue.put` may be called from a signal handler, even while the same thread gets.

    Attributes:
        input: in the order in which it came.
        aborts: ids, each list also in `input`, so that an abort takes effect within the step that
            runs.
    """

    input: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    aborts: queue.SimpleQueue[list[str]] = field(default_factory=queue.SimpleQueue)
    output: Outbox = field(default_factory=Outbox)
    _order: threading.Lock = field(default_factory=threading.Lock)

    def abort(self, request_ids: list[str]) -> None:
        """End requests. In any thread; both queues have the lists in the same order."""
        with self._order:
            self.aborts.put(request_ids)
            self.input.put(request_ids)


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
        self._watchdog = Watchdog(options.watchdog_seconds, exits=options.watchdog_exits)
        self._clock = clock
        self._state = ShutdownState.RUNNING
        self._drain_until = 0.0
        self._signals = 0
        self._aborts_taken = 0  # of the fast lane
        self._aborts_handled = 0  # of the input queue, which has the same ones
        core.enter_loop(self._executor_failed)

    def request_shutdown(self) -> None:
        """Begin to end: drain, then stop. Called twice, stop at once. Safe in a signal handler."""
        self._signals += 1
        self.wake_up()

    def wake_up(self) -> None:
        """Have a loop that waits for input look around, in whatever thread."""
        self._queues.input.put(Wakeup())

    def run(self) -> None:
        """Work until shut down.

        Raises:
            BaseException: whatever ended the engine before its time.
        """
        try:
            while not self._is_over():
                self._take_input()
                if self._core.has_requests():
                    self._watchdog.step_begins()
                    outputs, executed = self._core.step(self._late_aborts)
                    self._send(outputs)
                    if not (executed or outputs) and self._core.has_requests():
                        time.sleep(_IDLE_SECONDS)
            for outputs in self._core.flush():
                self._send(outputs)
            self._handle_queued()  # whoever came too late is told so
        finally:
            self._watchdog.rest()
            self._core.leave_loop("the engine is shutting down")

    def _executor_failed(self, error: BaseException) -> None:
        failed = EngineDeadError(f"the executor failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        self._queues.input.put(Failure(failed))

    def _is_over(self) -> bool:
        """Follow the signals; return whether nothing is left to do."""
        if self._signals and self._state is ShutdownState.RUNNING:
            self._state = ShutdownState.REQUESTED
            seconds = self._options.drain_seconds
            self._drain_until = self._clock() + seconds
            live = self._core.num_unfinished_requests()
            _log.info("shutting down: %d requests may go on for %g s", live, seconds)
        if self._state is ShutdownState.RUNNING:
            return False
        held = not self._core.has_requests()  # if any are left, a pause holds them
        if held or self._signals > 1 or self._clock() >= self._drain_until:
            self._state = ShutdownState.SHUTTING_DOWN
            self._send(self._core.abort_requests(None))
        return self._core.num_unfinished_requests() == 0

    def _take_input(self) -> None:
        """Handle what is queued; without work, wait for something."""
        if not self._core.has_requests():
            self._watchdog.rest()
            self._core.went_idle()
            if self._state is ShutdownState.RUNNING and not self._core.has_requests():
                self._park()
        self._handle_queued()

    def _handle_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._queues.input.get_nowait())

    def _park(self) -> None:
        """Wait for a message, or until a request that a pause holds may have timed out."""
        self._late_aborts()  # they are in the input queue as well
        seconds = _GLANCE_SECONDS if self._core.num_unfinished_requests() else None
        with contextlib.suppress(queue.Empty):
            self._handle(self._queues.input.get(timeout=seconds))

    def _late_aborts(self) -> list[str]:
        """Return the ids on the fast lane.

        Lists that the input queue gave already are left out: by now, another request may have the
        id of one that they ended.
        """
        ids: list[str] = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken = self._queues.aborts.get_nowait()
                self._aborts_taken += 1
                if self._aborts_taken > self._aborts_handled:
                    ids += taken
        return ids

    def _handle(self, message: Message) -> None:
        match message:
            case Prepared():
                self._add(message.request, message.block_hashes)
            case list():
                self._aborts_handled += 1
                self._send(self._core.abort_requests(message))
            case UtilityCall():
                self._call(message)
            case Refusal():
                self._refuse(message.request_id, message.client_index, message.error)
            case Failure():
                raise message.error
            case Wakeup():
                pass

    def _add(self, request: EngineCoreRequest, block_hashes: list[bytes]) -> None:
        if self._state is not ShutdownState.RUNNING:
            shutting_down = EngineDeadError("the engine is shutting down")
            self._refuse(request.request_id, request.client_index, shutting_down)
            return
        try:
            self._core.add_request(request, block_hashes)
        except PluginFaultError:  # one that is to end the engine
            raise
        except HardpointError as error:
            self._refuse(request.request_id, request.client_index, error)

    def _refuse(self, request_id: str, client_index: int, error: HardpointError) -> None:
        """Tell a client, unless it would take that for the end of its live request of that id."""
        if self._core.client_of(request_id) == client_index:
            _log.warning(
                "dropped a request of client %d that has the id of its live request %r: %s",
                client_index,
                request_id,
                error,
            )
            return
        self._queues.output.put(client_index, rejection_output(request_id, error))

    def _call(self, call: UtilityCall) -> None:
        if self._state is ShutdownState.RUNNING:
            call_utility(
                self._core, call, lambda answer: self._queues.output.put(call.client_index, answer)
            )
        else:
            refused = failed_call(call, EngineDeadError("the engine is shutting down"))
            self._queues.output.put(call.client_index, refused)

    def _send(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client, message in outputs.items():
            self._queues.output.put(client, message)
