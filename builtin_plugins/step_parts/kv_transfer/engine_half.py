"""The engine half of KV transfer: the connector's scheduler half, guarded and with deadlines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.errors import PluginFaultError, RequestError, shown
from hardpoint.plugins import (
    EngineCoreRequest,
    KVConnector,
    KVTierStats,
    ModelRunnerOutput,
    PrefixCacheStats,
    Request,
    RequestFault,
    SchedulerOutput,
    SchedulerStats,
)
from hardpoint.plugins.kv_connector import KVConnectorScheduler
from hardpoint.plugins.step_part import (
    BlockTransfer,
    EngineHalfContext,
    PlanData,
    StepObserver,
)
from hardpoint.typed import prepared, read_only

from .messages import StepData, TransferReport
from .transfers import EndedLoad, PendingLoads, Saves

if TYPE_CHECKING:
    from hardpoint.plugins.requests.plan import BlockIds
    from hardpoint.plugins.step_part.components import ComponentCalls


_COMPUTED = "the engine goes on, and computes what could not be loaded"
_NONE: tuple[int, bool] = (0, False)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0002, 0.005
_LONGEST_UNPAUSED_S = 1.0  # between two counts of time; longer is a pause


@dataclass(slots=True)
class _Step:
    """The plan of a step before its result.

    Attributes:
        metadata: metadata of the scheduler half.
        reports: how many ranks have to report, at least.
        loads: (request id, blocks) of the loads in the step itself.
        failed: whether the loads cannot be trusted, since the scheduler half raised.
    """

    metadata: Any
    loads: list[tuple[str, frozenset[int]]]
    failed: bool = False
    reports: int = 0


class TransferPlanner(BlockTransfer, PlanData, StepObserver):
    """Loads and saves of an engine, as its connector plans them.

    No method raises for a fault of the connector, and every wait has a deadline. A load that fails
    or takes too long is reported to the scheduler with invalid blocks, so that they are
    computed. Late results are ignored.
    """

    every_plan = True

    def __init__(
        self,
        part: str,
        connector: KVConnector,
        half: KVConnectorScheduler,
        calls: ComponentCalls,
        context: EngineHalfContext,
    ) -> None:
        """`connector`: the connector in the engine's process."""
        self._part = part
        self._connector = connector
        self._half = half
        self._config = connector.context.config
        self._block_size = context.block_size
        self._world_size = context.world_size
        self._clock = clock = context.clock
        self._faults = context.faults
        self._describe_fault = context.describe_fault
        self._components = context.components
        self._calls = calls
        self._report = context.faults.reporter(calls.source, _COMPUTED)
        self._publish = context.publish
        self._rejected: str | None = None  # by its own check
        ranks = frozenset(range(context.world_size))
        self._asked: dict[str, float] = {}  # on the clock of `_waited`
        self._waited, self._counted_at = 0.0, clock()  # without pauses
        self._matched: dict[str, tuple[int, bool]] = {}
        self._without: set[str] = set()  # requests with a lookup that took too long
        self._loads = PendingLoads(ranks, lambda: self._waited, self._config.load_seconds)
        self._saves = Saves(ranks, clock, self._config.lease_seconds)
        self._ended: dict[str, EndedLoad] = {}  # the scheduler may not know of
        self._saved: set[str] = set()  # likewise
        self._in_step: list[tuple[str, frozenset[int]]] = []
        self._steps: dict[int, _Step] = {}
        self._broken = False  # since the last plan
        self._left_out = False
        self._tiers: dict[int, Mapping[str, KVTierStats]] = {}
        self._earlier: Mapping[str, KVTierStats] = {}  # of worker halves that are gone
        self._prefix_cache = PrefixCacheStats()
        self._wait_s = _FIRST_WAIT_S

    # For the scheduler

    def check(self, request: EngineCoreRequest) -> None:
        """Let the connector check a new request.

        Raises:
            RequestError: it is refused.
        """
        try:
            self._calls.run("check_request", self._half.check_request, read_only(request))
        except RequestError:
            self._rejected = request.request_id
            raise
        except BaseException as cause:
            self._note("check_request() failed", cause)

    def refused(self, request_id: str) -> None:
        """Notify the connector that a request that it has accepted was not added."""
        rejected, self._rejected = self._rejected, None
        if request_id != rejected:
            self._call("request_refused", request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded; none if the connector fails or takes too long."""
        request_id = request.request_id
        if self._left_out or self._is_busy(request_id) or request_id in self._without:
            return _NONE  # an earlier request of this id, or a long wait
        try:
            count, asynchronous = self._calls.run(
                "get_num_new_matched_tokens",
                self._half.get_num_new_matched_tokens,
                request,
                num_computed_tokens,
            )
            asynchronous = bool(asynchronous)
        except BaseException as cause:
            self._asked.pop(request_id, None)
            self._note("get_num_new_matched_tokens() failed", cause)
            return _NONE
        if count is None:
            self._count_time()
            waited = self._waited - self._asked.setdefault(request_id, self._waited)
            if waited < self._config.load_seconds:
                return None, False
            self._without.add(request_id)
            self._asked.pop(request_id)
            self._note(
                f"get_num_new_matched_tokens() did not know how much of request {request_id!r} can "
                f"be loaded for {self._config.load_seconds:g} s (kv_connector.load_seconds)"
            )
            return _NONE
        self._asked.pop(request_id, None)
        if type(count) is not int or count < 0:
            self._note(f"get_num_new_matched_tokens() gave {shown(count)}, expected tokens >= 0")
            return _NONE
        self._matched[request_id] = num_computed_tokens, asynchronous
        return count, asynchronous

    def _is_busy(self, request_id: str) -> bool:
        return (
            self._loads.is_busy(request_id)
            or request_id in self._saves
            or request_id in self._ended
            or request_id in self._saved
        )

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Notify the connector of blocks; remember the blocks that it is to fill."""
        request_id = request.request_id
        if (matched := self._matched.pop(request_id, None)) is not None:
            self._count_lookup(request.num_tokens - matched[0], num_external_tokens)
        start, asynchronous = matched or _NONE
        if num_external_tokens:
            first = start // self._block_size
            end = -(-(start + num_external_tokens) // self._block_size)
            blocks = block_ids[0][first:end]
            if asynchronous:
                self._count_time()
                self._loads.begin(request_id, blocks)
            else:
                self._in_step.append((request_id, frozenset(blocks)))
        self._broken |= not self._call(
            "update_state_after_alloc", request, block_ids, num_external_tokens
        )

    def begin(self, plan: SchedulerOutput) -> bytes:
        """Return the data of the worker halves, a StepData as msgpack, or nothing."""
        metadata = data = None
        failed, self._broken = self._broken, False
        if not self._left_out:
            try:
                metadata = self._calls.run(
                    "build_connector_meta", self._half.build_connector_meta, plan
                )
                data = None if metadata is None else msgspec.msgpack.encode(metadata)
            except BaseException as cause:
                failed = True
                self._note("build_connector_meta() failed", cause)
        in_step, self._in_step = self._in_step, []
        cancelled = self._loads.plan(plan.step)
        self._saves.plan(plan.step)
        step = self._steps[plan.step] = _Step(metadata, in_step, failed)
        if data is None and not cancelled:
            return b""
        step.reports = self._world_size
        return msgspec.msgpack.encode(StepData(data, cancelled))

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Notify the connector of the end of a request; its blocks are kept for a limited time.

        Its loads are given up.
        """
        request_id = request.request_id
        self._asked.pop(request_id, None)
        self._matched.pop(request_id, None)
        self._without.discard(request_id)
        self._loads.request_ended(request_id)
        if request_id in self._ended:
            self._ended[request_id] = EndedLoad()
        try:
            keep, params = self._calls.run(
                "request_finished", self._half.request_finished, request, block_ids
            )
            keep = bool(keep) and any(block_ids) and not self._left_out
            params = None if params is None else _plain(params)
        except BaseException as cause:
            self._note("request_finished() failed", cause)
            return False, None
        if keep:
            self._saves.begin(request_id)
        return keep, params

    # For the engine

    def started(self, handshakes: Sequence[bytes | None]) -> None:
        """Give the connector the handshakes of its workers.

        Work for the engine before is over: the new workers know nothing of it.
        """
        self._loads.workers_lost()
        self._saves.workers_lost()
        self._asked.clear()
        self._earlier = {
            name: msgspec.structs.replace(stats, used_bytes=None)
            for name, stats in self._totals().items()
        }
        self._tiers = {}
        self._left_out = False
        decoded = [None if data is None else msgspec.msgpack.decode(data) for data in handshakes]
        if not self._call("set_handshakes", decoded):
            self._left_out = True

    def start_failed(self, cause: BaseException) -> None:
        """Go on without the connector, and end all transfers: its workers are not there."""
        self._left_out = True
        self._loads.workers_lost()
        self._saves.workers_lost()
        self._note("it cannot be started again", cause)

    def result(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, RequestFault]:
        """Set the transfers of a result that have ended, from the reports of the workers.

        Returns:
            The requests that end with an error, since their load failed.
        """
        step = self._steps.get(plan.step) or _Step(None, [])
        self._count_time()
        invalid: set[int] = set()
        reports = result.part_reports.get(self._part, {})
        step.failed |= len(reports) < step.reports  # a worker that sleeps reports nothing
        for rank, data in sorted(reports.items()):
            report = msgspec.msgpack.decode(data, type=prepared(TransferReport))
            invalid.update(report.invalid_block_ids)
            step.failed |= report.failure is not None
            self._process(rank, report, plan.step)
        self._end(plan.step, step.failed, frozenset(invalid))
        in_step = _lacking(step, invalid)
        lacking = [*in_step, *((name, load.invalid) for name, load in self._ended.items())]
        result.kv_loaded, result.kv_saved = frozenset(self._ended), frozenset(self._saved)
        result.invalid_block_ids = frozenset().union(*(blocks for _, blocks in lacking))
        if result.kv_loaded or result.kv_saved or plan.total_num_scheduled_tokens:
            self._wait_s = _FIRST_WAIT_S
        if self._config.on_load_failure == "recompute":
            return {}
        failed = {name: blocks for name, blocks in in_step if blocks}
        failed |= {name: load.invalid for name, load in self._ended.items() if load.is_error}
        return {
            name: RequestFault(
                "kv_connector: the keys and values of its prompt could not be loaded, for "
                f"{len(blocks)} of its blocks (kv_connector.on_load_failure)"
            )
            for name, blocks in failed.items()
        }

    def updated(self, plan: SchedulerOutput) -> None:
        """Forget the transfers that have ended: the scheduler has taken the results of `result`."""
        self._steps.pop(plan.step, None)
        self._ended.clear()
        self._saved.clear()

    def lost(self, plan: SchedulerOutput) -> None:
        """Take back the data of a plan that was not executed, or not to its end.

        The reports of its workers are lost as well, so all loads are given up.
        """
        step = self._steps.pop(plan.step, None)
        if step is None:
            return
        self._loads.plan_lost(plan.step)
        if step.metadata is not None:
            self._call("plan_lost", step.metadata)

    def wait(self) -> None:
        """Wait a moment after a step without tokens, while a transfer or a lookup is under way."""
        if self._asked or self._loads or self._saves:
            time.sleep(self._wait_s)
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add totals by tier, of all ranks together, and of the lookups of admitted requests."""
        stats.external_prefix_cache = msgspec.structs.replace(self._prefix_cache)
        stats.kv_tiers = self._totals()

    def _totals(self) -> dict[str, KVTierStats]:
        return _summed([self._earlier, *self._tiers.values()])

    def close(self) -> None:
        """Close the connector.

        Raises:
            PluginFaultError: it failed.
        """
        try:
            self._calls.run("close", self._half.close)
        except BaseException as cause:
            raise PluginFaultError(
                f"{self._calls.source}: its close() failed: {self._describe_fault(cause)}"
            ) from cause
        finally:
            self._components.close(self._connector)

    def _call(self, method: str, *args: Any) -> bool:
        try:
            self._calls.run(method, getattr(self._half, method), *args)
        except BaseException as cause:
            self._note(f"{method}() failed", cause)
            return False
        return True

    def _count_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        self._prefix_cache.requests += 1
        self._prefix_cache.queried_tokens += queried_tokens
        self._prefix_cache.hit_tokens += hit_tokens

    def _note(self, message: str, cause: BaseException | None = None) -> None:
        if cause is not None:
            self._describe_fault(cause)  # raises an interrupt of the user again
        self._report(message, cause)

    def _count_time(self) -> None:
        """Add the time since the last count to the time of lookups and loads, except pauses."""
        now = self._clock()
        self._waited += min(now - self._counted_at, _LONGEST_UNPAUSED_S)
        self._counted_at = now

    def _process(self, rank: int, report: TransferReport, step: int) -> None:
        for request_id in report.loaded:
            self._loads.finished(request_id, rank, step)
        for request_id in report.saved:
            self._saves.finished(request_id, rank, step)
        if report.tiers is not None:
            self._tiers[rank] = report.tiers
        if report.events:
            self._publish(list(report.events))
        self._left_out |= report.left_out  # other ranks may still load: that is cancelled
        if report.message is not None:
            try:
                type_ = prepared(self._connector.Message)
                message = msgspec.msgpack.decode(report.message, type=type_)
                self._calls.run("receive", self._half.receive, rank, message)
            except BaseException as cause:
                self._note("receive() failed", cause)
        for name, message in report.faults:
            self._faults.record(name, message, consequence=_COMPUTED)

    def _end(self, step: int, failed: bool, invalid: frozenset[int]) -> None:
        self._loads.failed(invalid)
        if failed:
            self._loads.fail_all(step)
        late = self._loads.pop_late()
        ended = self._loads.end(step)
        self._ended |= ended  # from here on they end, whatever is raised
        saved, expired = self._saves.end()
        self._saved.update(saved)
        for request_id, load in ended.items():
            self._call("load_ended", request_id, load.failed)
        for request_id in late:
            self._note(
                f"the load of request {request_id!r} took more than "
                f"{self._config.load_seconds:g} s (kv_connector.load_seconds)"
            )
        for request_id in expired:
            self._note(
                f"get_finished() did not report within {self._config.lease_seconds:g} s "
                f"(kv_connector.lease_seconds) that the blocks of request {request_id!r} are saved"
            )


def _lacking(step: _Step, invalid: set[int]) -> list[tuple[str, frozenset[int]]]:
    return [(name, blocks if step.failed else blocks & invalid) for name, blocks in step.loads]


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the parameters of a request's last output, of plain data.

    Raises:
        TypeError, ValueError: they are not.
    """
    decoded: dict[str, Any] = msgspec.msgpack.decode(
        msgspec.msgpack.encode(params), type=dict[str, Any]
    )
    return decoded


def _summed(totals: Iterable[Mapping[str, KVTierStats]]) -> dict[str, KVTierStats]:
    result: dict[str, KVTierStats] = {}
    for of_rank in totals:
        for name, stats in of_rank.items():
            before = result.get(name)
            result[name] = stats if before is None else _added(before, stats)
    return result


def _added(a: KVTierStats, b: KVTierStats) -> KVTierStats:
    values = {}
    for name in KVTierStats.__struct_fields__:
        x, y = getattr(a, name), getattr(b, name)
        values[name] = y if x is None else x if y is None else x + y
    return KVTierStats(**values)
