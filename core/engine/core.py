"""The engine core: moves requests through scheduler and executor, one step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from hardpoint.errors import EngineDeadError, PluginFaultError
from hardpoint.host.boundary.errors import RefusedInCallError, close_all
from hardpoint.host.boundary.parts.gates import PartTransfers
from hardpoint.host.boundary.step_check import live_request
from hardpoint.host.live.engine import EngineChanges, LimitsSlot
from hardpoint.host.registry.blame import describe, faults_as
from hardpoint.host.system.plugin_settings import StepSettings
from hardpoint.plugins import EngineCoreRequest, HardpointError, RequestError, StepRecord
from hardpoint.plugins.requests.stats import SchedulerStats
from hardpoint.plugins.scheduling.scheduler import BlockTransfers, Gates
from hardpoint.toolkit.requests.groups import complete_members, members_of

from .step import EngineCoreParts, Outputs, StepRunner
from .utility_calls import EngineUtilities

if TYPE_CHECKING:
    from hardpoint.core.weights.worker_spec import WorkerSpec

Clock = Callable[[], float]
"""Returns seconds."""

RecordStep = Callable[[StepRecord], None]
"""Receives the record of a step."""

QueuedRequest = tuple[EngineCoreRequest, list[bytes] | None, float | None]
"""The arguments of `EngineCore.add_request`."""


class EngineCore(EngineUtilities):
    """An engine core: scheduler and executor, the steps that join them, and the control calls.

    Its methods are called by one thread at a time, except methods documented for any thread.

    Attributes:
        step: runs one step: `StepRunner.step`, or `StepRunner.step_with_batch_queue` where
            the executor runs several batches at once.
        activity: the record of the core's current activity.
    """

    def __init__(self, parts: EngineCoreParts) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._executor = parts.executor
        self._steps = steps = StepRunner(parts)
        self._settings = StepSettings(
            steps.has_batches_in_flight, threads=False
        )  # those are the worker's
        self.step = self._settings.around(steps.step_fn)
        self._abort = self._settings.around(steps.abort_requests)
        self.activity = parts.activity
        limits = LimitsSlot(parts.scheduler, parts.scheduler_label)
        self._changes = EngineChanges(
            parts.policy,
            parts.scheduler,
            limits,
            parts.executor,
            parts.step_parts,
            steps.abort_later,
        )
        self._idle_since: int | None = None  # wake-ups when workers had nothing more to do
        self._pause = parts.pause
        self._pause.use(
            parts.scheduler, parts.executor, parts.step_parts, parts.sleep_levels, steps
        )

    # Requests

    def add_request(
        self,
        request: EngineCoreRequest,
        block_hashes: list[bytes] | None = None,
        arrived: float | None = None,
    ) -> None:
        """Queue a request; set its arrival time.

        Args:
            request: validated.
            block_hashes: the result of `hash_prompt`; None to hash when the request is scheduled.
            arrived: when the engine got it, in seconds on its clock; None is now.

        Raises:
            RequestError: the request could never run, its arguments do not fit the policy, its id
                is that of a live request, too many requests wait, or the scheduler did not add it.
        """
        if live_request(self._scheduler, request.request_id) is not None:
            raise RequestError(f"request_id: {request.request_id!r} is the id of a live request")
        self._parts.policy.take_arguments(request)
        # Not the client's: its clock may be another one, and it could jump the queue.
        request.arrival_time = self._scheduler.context.clock() if arrived is None else arrived
        self._settings.begin()
        try:
            if request.members:
                complete_members(request, self._scheduler, self._parts.scheduler_label)
            self._add(request)
        finally:
            self._settings.end()
        if block_hashes and (live := live_request(self._scheduler, request.request_id)) is not None:
            self._parts.kv_cache.take_hashes(live, block_hashes)

    def add_requests(self, requests: Sequence[QueuedRequest]) -> None:
        """Queue the requests of one call, or none.

        Raises:
            RefusedInCallError: one was refused, as by `add_request`; earlier ones have ended.
            PluginFaultError: a plugin with faults of scope engine failed.
        """
        for index, queued in enumerate(requests):
            try:
                self.add_request(*queued)
            except BaseException as error:
                self.abort_requests([request.request_id for request, *_ in requests[:index]])
                if isinstance(error, PluginFaultError) or not isinstance(error, HardpointError):
                    raise
                raise RefusedInCallError(index, error) from error

    def _add(self, request: EngineCoreRequest) -> None:
        num_before = self._scheduler.num_unfinished_requests()
        try:
            for member in members_of(request) if request.members else ():
                self._parts.step_parts.add(member)
            self._scheduler.add_request(self._parts.step_parts.add(request))
            if (
                self._scheduler.num_unfinished_requests() <= num_before
                # else a signal handler has aborted other requests
                and live_request(self._scheduler, request.request_id) is None
            ):
                label = self._parts.scheduler_label
                raise RequestError(f"{label}: its add_request did not add the request")
        except BaseException:
            for refused in (request, *members_of(request)):
                self._parts.step_parts.refused(refused.request_id)
            raise

    def client_of(self, request_id: str) -> int | None:
        """Return the client index of a live request, None if no live request has that id."""
        live = live_request(self._scheduler, request_id)
        return None if live is None else live.source.client_index

    def of_client(self, request_ids: Iterable[str], client: int) -> list[str]:
        """Return the ids without the live requests of other clients."""
        return [name for name in request_ids if self.client_of(name) in (None, client)]

    def hash_prompt(self, request: EngineCoreRequest) -> list[bytes]:
        """Return the hashes of a prompt's full blocks, for `add_request`. Safe in any thread."""
        return self._parts.kv_cache.hash_prompt(request)

    def abort_requests(self, request_ids: Iterable[str] | None) -> Outputs:
        """Abort requests; unknown ids are ignored, None is all of them.

        Returns:
            Their last outputs, one message per client, with the ids that ended.
        """
        return self._abort(request_ids)

    def has_requests(self) -> bool:
        """Return whether a step has any work; paused requests are not counted."""
        return self._steps.has_requests()

    def num_unfinished_requests(self) -> int:
        """Return the number of live requests."""
        return self._scheduler.num_unfinished_requests()

    # For the busy loop

    def enter_loop(self) -> None:
        """Register the busy loop; it calls `went_idle` whenever no work is left."""
        self._pause.has_loop = True

    def went_idle(self) -> None:
        """Complete the pauses that wait for the engine to be idle."""
        self._pause.went_idle()

    def work_when_idle(self) -> bool:
        """Let workers do one piece of work ahead; return whether they have more.

        Called while no work is left.

        Raises:
            PluginFaultError: the executor failed.
        """
        method = self._parts.idle_method
        if method is None or self._pause.is_paused:
            return False
        if self._idle_since == self._pause.num_wake_ups:
            return False
        call = f"{self._parts.executor_label}: its collective_rpc"
        with faults_as(PluginFaultError, call, passing=(HardpointError,)):
            answers = list(self._executor.collective_rpc(method))
            if all(answer is None for answer in answers):
                self._idle_since = self._pause.num_wake_ups
            return any(answers)

    def stats(self) -> SchedulerStats:
        """Return the state of the scheduler, as `scheduler_stats` does for programs."""
        return self._parts.scheduler_stats()

    def cached_blocks(self) -> Iterable[bytes]:
        """Publish changes outside of steps; return the hashes of the blocks that can be found.

        Raises:
            PluginFaultError: a publisher with faults of scope engine failed.
        """
        self._parts.kv_events.publish(self._parts.kv_cache.take_events())
        return self._parts.kv_cache.pool.index[0]

    def flush(self) -> list[Outputs]:
        """Complete all steps that are under way; return the outputs that are not sent yet."""
        return self._steps.flush()

    def leave_loop(self, message: str) -> None:
        """Fail the pauses that are not complete; the loop has ended, the core is closed next."""
        self._pause.fail_pending(message)

    def on_executor_failure(self, callback: Callable[[HardpointError], None]) -> None:
        """Register a callback for a failure of the executor outside of its calls.

        Args:
            callback: called, in any thread, with the error that ends the engine: the executor's
                own EngineDeadError, such as the loss of a worker, which is no fault of a plugin.

        Raises:
            PluginFaultError: the executor takes no callback.
        """
        label = self._parts.executor_label  # the executor keeps `report`, which keeps no core

        def report(cause: BaseException) -> None:
            if isinstance(cause, EngineDeadError):
                callback(cause)
                return
            failed = PluginFaultError(f"{label} failed: {describe(cause)}")
            failed.__cause__ = cause if isinstance(cause, BaseException) else None
            callback(failed)

        with faults_as(PluginFaultError, f"{label}: its on_failure"):
            self._executor.on_failure(report)

    def close(self) -> None:
        """Release workers, model and cache."""
        parts = self._parts
        self._pause.fail_pending("the engine was closed")
        with contextlib.ExitStack() as stack:  # closes each part, even if another one raises
            stack.callback(close_all, parts.components)
            stack.callback(parts.kv_events.close)
            stack.callback(parts.policy.close)
            stack.callback(parts.step_parts.close)
            stack.callback(close_all, [self._scheduler, self._executor])


class EngineInputs:
    """The record/replay hook: all that a core reads from its environment, here unchanged.

    Subclasses record or replay it.

    Attributes:
        spec: specification of the engine's workers.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    def clock(self, clock: Clock) -> Clock:
        """Return the clock of the scheduler, the caches and the step parts."""
        return clock

    def gates(self, gates: Gates) -> Gates:
        """Return the gates of step parts for the scheduler."""
        return gates

    def transfers(self, transfers: PartTransfers | None) -> BlockTransfers | None:
        """Return the block transfers of a step part for the scheduler; None if there are none."""
        return transfers

    def recorder(self, record: RecordStep | None) -> RecordStep | None:
        """Return the receiver of step records; None if no records are needed."""
        return record

    def core(self, parts: EngineCoreParts) -> EngineCore:
        """Return the core, which gets the requests, aborts and control calls."""
        return EngineCore(parts)


OpenInputs: TypeAlias = "Callable[[WorkerSpec], EngineInputs]"
