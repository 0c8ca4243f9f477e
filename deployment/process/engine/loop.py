"""The busy loop of an engine process: handle input, run a step, queue outputs."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hardpoint.core.engine.core import EngineCore
from hardpoint.errors import EngineDeadError, PluginFaultError
from hardpoint.host.boundary.errors import RefusedInCallError, rejection_output
from hardpoint.plugins import EngineCoreOutputs, EngineCoreRequest, HardpointError
from hardpoint.process.cache_changes import CacheChangeLog, CacheReports
from hardpoint.process.protocol import SHUTDOWN_REASON, ShutdownState, UtilityCall
from hardpoint.process.utility_calls import call_utility, failed_call

from .reports import ClientReports
from .sender import ClientSendQueues
from .watchdog import Watchdog

_log = logging.getLogger("hardpoint")

_IDLE_S = 0.001  # left to other threads while requests wait for something outside of the loop
_PAUSE_POLL_INTERVAL_S = 0.25  # how often the deadlines of paused requests are checked


@dataclass(frozen=True)
class LoopOptions:
    """Settings of a loop.

    Attributes:
        drain_seconds: how long requests may run after the first signal; 0 aborts them at once.
        watchdog_seconds: the stacks of all threads are written to stderr when a step takes longer;
            0 switches that off.
        watchdog_exits: whether such a step also ends the process.
        watchdog_later_seconds: left to an executor that ends such a step by itself.
        reports_load: as in Launch.
        cache_changes: collects the changes of the KV cache; None if they are not reported.
    """

    drain_seconds: float = 0.0
    watchdog_seconds: float = 0.0
    watchdog_exits: bool = False
    watchdog_later_seconds: float = 0.0
    reports_load: bool = False
    cache_changes: CacheChangeLog | None = None


class Wakeup:
    """Wakes up a loop that waits for input."""


@dataclass(frozen=True)
class LoopFailure:
    """The error that ends the loop: of the executor, or of an IO thread."""

    error: BaseException


@dataclass(frozen=True)
class Rejection:
    """A request with the id of a live request, rejected before it reached the loop."""

    request_id: str
    client_index: int
    error: HardpointError


@dataclass(frozen=True)
class Prepared:
    """A request with the values that the input thread computed for it.

    Attributes:
        block_hashes: block hashes of its prompt.
        arrived: when it was received, in seconds on the engine's clock.
    """

    request: EngineCoreRequest
    block_hashes: list[bytes]
    arrived: float


@dataclass
class Abort:
    """Ids of requests to abort.

    Attributes:
        client_index: client whose requests they are; those of another one go on.
        is_handled: whether the input queue has delivered it, so that its urgent copy is void.
    """

    request_ids: list[str]
    client_index: int
    is_handled: bool = False


@dataclass(frozen=True)
class PreparedCall:
    """The requests of one call: all are added, or none."""

    requests: list[Prepared]


Message = Prepared | PreparedCall | Abort | UtilityCall | Rejection | LoopFailure | Wakeup
"""The input of a loop."""


@dataclass(frozen=True)
class LoopQueues:
    """The queues between a loop and the IO threads.

    Attributes:
        input: messages in the order of arrival.
        urgent_aborts: every `Abort` of `input` as well, so that the step that runs can apply it.
        output: messages to the clients.
    """

    # SimpleQueue, because a signal handler may call `put` even while its thread is in `get`.
    input: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    urgent_aborts: queue.SimpleQueue[Abort] = field(default_factory=queue.SimpleQueue)
    output: ClientSendQueues = field(default_factory=ClientSendQueues)

    def abort(self, request_ids: list[str], client_index: int) -> None:
        """Queue an abort of a client's requests. In any thread."""
        abort = Abort(request_ids, client_index)
        self.urgent_aborts.put(abort)
        self.input.put(abort)


class EngineLoop:
    """Applies the messages of the input queue to an engine core, and queues its outputs."""

    def __init__(
        self,
        core: EngineCore,
        queues: LoopQueues,
        options: LoopOptions = LoopOptions(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._queues = queues
        self._options = options
        self._watchdog = Watchdog(
            options.watchdog_seconds,
            exits=options.watchdog_exits,
            activity=core.activity,
            later_s=options.watchdog_later_seconds,
        )
        self._clock = clock
        self._state = ShutdownState.RUNNING
        self._drain_until = 0.0
        self._signals = 0
        self._reports: ClientReports | None = None
        self._cache_reports = CacheReports(options.cache_changes, core.cached_blocks)
        if options.reports_load or options.cache_changes is not None:
            self._reports = ClientReports(
                len(queues.output),
                clock,
                stats=core.stats if options.reports_load else None,
                cache=self._cache_reports.pop,
            )
        core.enter_loop()
        core.on_executor_failure(lambda failed: queues.input.put(LoopFailure(failed)))

    def request_shutdown(self) -> None:
        """Drain, then stop; stop at once when called twice. Safe in a signal handler."""
        self._signals += 1
        self.wake_up()

    def wake_up(self) -> None:
        """Wake up the loop if it waits for input. In any thread."""
        self._queues.input.put(Wakeup())

    def run(self) -> None:
        """Run until shut down.

        Raises:
            BaseException: the error that ended the engine.
        """
        try:
            while not self._is_over():
                self._handle_input()
                if self._core.has_requests():
                    self._watchdog.start_step()
                    self._core.activity.turn()
                    outputs, executed = self._core.step(self._late_aborts)
                    self._core.activity.turn()
                    is_idle = not (executed or outputs)
                    if self._reports is not None:
                        outputs = self._reports.with_reports(outputs, executed=executed)
                    self._send(outputs)
                    if is_idle and self._core.has_requests():
                        time.sleep(_IDLE_S)
            for outputs in self._core.flush():
                self._send(outputs)
            self._handle_queued()  # what came too late is rejected
        finally:
            self._watchdog.stop()
            self._core.leave_loop(SHUTDOWN_REASON)

    def _is_over(self) -> bool:
        if self._signals and self._state is ShutdownState.RUNNING:
            self._state = ShutdownState.REQUESTED
            seconds = self._options.drain_seconds
            self._drain_until = self._clock() + seconds
            live = self._core.num_unfinished_requests()
            _log.info(
                "shutting down; unfinished requests: %d, which may continue for %g s", live, seconds
            )
            if self._reports is not None:
                self._send(self._reports.leave())
        if self._state is ShutdownState.RUNNING:
            return False
        # Without work, the requests that are left are held by a pause: waiting would not end them.
        nothing_can_run = not self._core.has_requests()
        if nothing_can_run or self._signals > 1 or self._clock() >= self._drain_until:
            self._state = ShutdownState.SHUTTING_DOWN
            aborted = self._core.abort_requests(None)
            if self._reports is None:  # else they go on at another engine
                self._send(aborted)
        return self._core.num_unfinished_requests() == 0

    def _handle_input(self) -> None:
        if not self._core.has_requests():
            self._watchdog.stop()
            self._core.went_idle()
            if self._state is ShutdownState.RUNNING and not self._core.has_requests():
                self._wait_for_input()
        self._handle_queued()

    def _handle_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._queues.input.get_nowait())

    def _wait_for_input(self) -> None:
        self._late_aborts()  # drops them; the input queue has them too
        if self._reports is not None:
            self._send(self._reports.with_reports({}))
        while self._queues.input.empty() and self._core.work_when_idle():
            pass  # one at a time, so that a request waits for one at most
        timeout_s = _PAUSE_POLL_INTERVAL_S if self._core.num_unfinished_requests() else None
        if self._reports is not None and (wait_s := self._reports.wait_s) is not None:
            timeout_s = wait_s if timeout_s is None else min(timeout_s, wait_s)
        with contextlib.suppress(queue.Empty):
            self._handle(self._queues.input.get(timeout=timeout_s))

    def _late_aborts(self) -> list[str]:
        # An abort stays in the input queue as well, because there it comes after the request that
        # it ends, which may not be in the core yet. One that the input queue has delivered is left
        # out here: by now, another request may have the id of the one that it ended.
        ids: list[str] = []
        with contextlib.suppress(queue.Empty):
            while True:
                abort = self._queues.urgent_aborts.get_nowait()
                if not abort.is_handled:
                    ids += self._core.of_client(abort.request_ids, abort.client_index)
        return ids

    def _handle(self, message: Message) -> None:
        match message:
            case Prepared():
                self._add(message)
            case PreparedCall():
                self._add_all(message)
            case Abort():
                message.is_handled = True
                request_ids = self._core.of_client(message.request_ids, message.client_index)
                self._send(self._core.abort_requests(request_ids))
            case UtilityCall():
                self._call(message)
            case Rejection():
                self._reject(message.request_id, message.client_index, message.error)
            case LoopFailure():
                raise message.error
            case Wakeup():
                pass

    def _add(self, message: Prepared) -> None:
        request = message.request
        if self._reports is not None:
            self._reports.read_request(request.client_index, request.request_id)
        if self._state is not ShutdownState.RUNNING:
            shutting_down = EngineDeadError(SHUTDOWN_REASON)
            self._reject(request.request_id, request.client_index, shutting_down)
            return
        try:
            self._core.add_request(request, message.block_hashes, message.arrived)
        except PluginFaultError:  # of a plugin whose faults end the engine
            raise
        except HardpointError as error:
            self._reject(request.request_id, request.client_index, error)

    def _add_all(self, call: PreparedCall) -> None:
        requests = [message.request for message in call.requests]
        if self._reports is not None and requests:
            self._reports.read_request(requests[-1].client_index, requests[-1].request_id)
        if self._state is not ShutdownState.RUNNING:
            shutting_down = EngineDeadError(SHUTDOWN_REASON)
            for request in requests:
                self._reject(request.request_id, request.client_index, shutting_down)
            return
        queued = [
            (prepared.request, prepared.block_hashes, prepared.arrived)
            for prepared in call.requests
        ]
        try:
            self._core.add_requests(queued)
        except RefusedInCallError as refused:
            # The one that was refused comes first, because its error is that of the call.
            first = requests.pop(refused.index)
            for request in (first, *requests):
                self._reject(request.request_id, request.client_index, refused.error)

    def _reject(self, request_id: str, client_index: int, error: HardpointError) -> None:
        # A client would mistake the error for the end of its live request of that id.
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
            answers = functools.partial(self._queues.output.put, call.client_index)
            call_utility(self._core, self._cache_reports, call, answers)
        else:
            refused = failed_call(call, EngineDeadError(SHUTDOWN_REASON))
            self._queues.output.put(call.client_index, refused)

    def _send(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client, message in outputs.items():
            self._queues.output.put(client, message)
