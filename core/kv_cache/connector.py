"""The KV connector of an engine: its scheduler half, with faults caught and waits that end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hardpoint.core.faults import StepFaults
from hardpoint.core.wire.kv_step import KVStepMetadata
from hardpoint.plugins import BlockIds, EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from hardpoint.plugins.config import KVConnectorConfig
from hardpoint.plugins.errors import RequestError, shown
from hardpoint.plugins.kv_cache import KVEvent
from hardpoint.plugins.kv_connector import KVConnector, KVConnectorScheduler
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.plan import KVReport
from hardpoint.plugins.request import Request
from hardpoint.plugins.stats import KVTierStats
from hardpoint.registry.blame import raise_unless_fault

_COMPUTED = "the engine goes on, and computes what could not be loaded"
_NONE: tuple[int, bool] = (0, False)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0002, 0.005


@dataclass(slots=True)
class _Load:
    """An asynchronous load.

    Attributes:
        blocks: that it fills.
        deadline: on the engine's clock.
        ranks: that have not finished.
        step: of the plan that starts it; None before that.
        invalid: blocks that could not be loaded.
        cancelled_in: step of the plan that cancels it.
    """

    blocks: frozenset[int]
    deadline: float
    ranks: set[int]
    step: int | None = None
    invalid: frozenset[int] = frozenset()
    cancelled_in: int | None = None


@dataclass(slots=True)
class _Save:
    """An ended request whose blocks are kept for the connector."""

    deadline: float
    ranks: set[int]


@dataclass(slots=True)
class _Step:
    """What was planned for a step whose result has not come.

    Attributes:
        metadata: of the scheduler half.
        loads: (request id, blocks) of what is loaded in the step itself.
        cancelled: requests whose loads it cancels.
        failed: whether the loads cannot be trusted, since the scheduler half raised.
    """

    metadata: Any
    loads: list[tuple[str, frozenset[int]]]
    cancelled: list[str] = field(default_factory=list)
    failed: bool = False


class EngineConnector(KVConnectorScheduler):
    """The connector as schedulers see it: no method raises, and every wait has a deadline.

    A load that fails or takes too long is reported to the scheduler as one whose blocks are
    invalid, so that they are computed. Whatever comes late is ignored.
    """

    def __init__(
        self,
        connector: KVConnector,
        half: KVConnectorScheduler,
        source: Source,
        *,
        world_size: int,
        block_size: int,
        clock: Callable[[], float],
        faults: StepFaults,
        publish: Callable[[list[KVEvent]], None],
    ) -> None:
        """Own the connector and its half.

        Args:
            connector: of the engine's process.
            half: its scheduler half.
            source: names it in messages.
            world_size: number of ranks.
            block_size: tokens per block.
            clock: of the engine.
            faults: counts what fails.
            publish: publishes KV events.
        """
        self._connector = connector
        self._half = half
        self._config: KVConnectorConfig = connector.context.config
        self._ranks = frozenset(range(world_size))
        self._block_size = block_size
        self._clock = clock
        self._faults = faults
        self._report = faults.reporter(source, _COMPUTED)
        self._publish = publish
        self._asked: dict[str, float] = {}
        self._matched: dict[str, tuple[int, bool]] = {}
        self._without: set[str] = set()  # requests whose lookup took too long
        self._loads: dict[str, _Load] = {}
        self._saves: dict[str, _Save] = {}
        self._in_step: list[tuple[str, frozenset[int]]] = []
        self._steps: dict[int, _Step] = {}
        self._untold: list[str] = []  # to cancel
        self._broken = False  # since the last plan
        self._tiers: dict[int, Mapping[str, KVTierStats]] = {}
        self._wait_s = _FIRST_WAIT_S

    # For the scheduler

    def check_request(self, request: EngineCoreRequest) -> None:
        """Let the connector check a new request.

        Raises:
            RequestError: it is refused.
        """
        try:
            self._half.check_request(request)
        except RequestError:
            raise
        except BaseException as cause:
            self._note("check_request() failed", cause)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded; none if the connector fails or takes too long."""
        request_id = request.request_id
        if request_id in self._loads or request_id in self._saves or request_id in self._without:
            return _NONE  # an earlier request of this id, or one that has waited long enough
        try:
            count, asynchronous = self._half.get_num_new_matched_tokens(
                request, num_computed_tokens
            )
        except BaseException as cause:
            self._note("get_num_new_matched_tokens() failed", cause)
            return _NONE
        if count is None:
            now = self._clock()
            if now - self._asked.setdefault(request_id, now) < self._config.load_seconds:
                return None, False
            self._note(
                f"get_num_new_matched_tokens() did not know how much of request {request_id!r} can "
                f"be loaded for {self._config.load_seconds:g} s (kv_connector.load_seconds)"
            )
            self._without.add(request_id)
            count = 0
        self._asked.pop(request_id, None)
        if type(count) is not int or count < 0:
            self._note(f"get_num_new_matched_tokens() gave {shown(count)}, expected tokens >= 0")
            return _NONE
        self._matched[request_id] = num_computed_tokens, bool(asynchronous)
        return count, bool(asynchronous)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Tell the connector of blocks; remember those that it is to fill."""
        request_id = request.request_id
        start, asynchronous = self._matched.pop(request_id, _NONE)
        if num_external_tokens:
            first = start // self._block_size
            end = -(-(start + num_external_tokens) // self._block_size)
            blocks = frozenset(block_ids[0][first:end])
            if asynchronous:
                deadline = self._clock() + self._config.load_seconds
                self._loads[request_id] = _Load(blocks, deadline, set(self._ranks))
            else:
                self._in_step.append((request_id, blocks))
        try:
            self._half.update_state_after_alloc(request, block_ids, num_external_tokens)
        except BaseException as cause:
            self._broken = True
            self._note("update_state_after_alloc() failed", cause)

    def build_connector_meta(self, plan: SchedulerOutput) -> bytes | None:
        """Return what the plan says to the worker halves, a KVStepMetadata as msgpack."""
        metadata = data = None
        failed, self._broken = self._broken, False
        try:
            metadata = self._half.build_connector_meta(plan)
            if metadata is not None:
                data = msgspec.msgpack.encode(metadata)
        except BaseException as cause:
            failed = True
            self._note("build_connector_meta() failed", cause)
        in_step, self._in_step = self._in_step, []
        cancelled, self._untold = self._untold, []
        for load in self._loads.values():
            if load.step is None:
                load.step = plan.step
        for request_id in cancelled:
            self._loads[request_id].cancelled_in = plan.step
        self._steps[plan.step] = _Step(metadata, in_step, cancelled, failed)
        if data is None and not cancelled:
            return None
        return msgspec.msgpack.encode(KVStepMetadata(data, cancelled))

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Tell the connector of the end of a request; its blocks are kept for a limited time."""
        request_id = request.request_id
        self._asked.pop(request_id, None)
        self._matched.pop(request_id, None)
        self._without.discard(request_id)
        try:
            keep, params = self._half.request_finished(request, block_ids)
            if params is not None:
                msgspec.msgpack.encode(params)
        except BaseException as cause:
            self._note("request_finished() failed", cause)
            return False, None
        if keep and any(block_ids):
            deadline = self._clock() + self._config.lease_seconds
            self._saves[request_id] = _Save(deadline, set(self._ranks))
            return True, params
        return False, params

    # For the engine

    def set_handshakes(self, handshakes: Sequence[Any]) -> None:
        """Tell the connector what its workers said at their start."""
        decoded = [None if data is None else msgspec.msgpack.decode(data) for data in handshakes]
        self._half.set_handshakes(decoded)

    def process(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, str]:
        """Set what a result says of transfers, from what the workers report.

        Returns:
            The requests that end with an error, since their load failed, with its message.
        """
        step = self._steps.pop(plan.step, None) or _Step(None, [])
        invalid: set[int] = set()
        for report in result.kv_reports:
            invalid.update(report.invalid_block_ids)
            if report.failure is not None:
                step.failed = True
            self._take(report)
        ended = self._end_loads(plan.step, step, invalid)
        lacking = _lacking(step, invalid) + list(ended.items())
        result.kv_loaded, result.kv_saved = frozenset(ended), self._end_saves()
        result.invalid_block_ids = frozenset().union(*(blocks for _, blocks in lacking))
        if result.kv_loaded or result.kv_saved or plan.total_num_scheduled_tokens:
            self._wait_s = _FIRST_WAIT_S
        if self._config.on_load_failure == "recompute":
            return {}
        return {
            request_id: "kv_connector: the keys and values of its prompt could not be loaded "
            "(kv_connector.on_load_failure)"
            for request_id, blocks in lacking
            if blocks
        }

    def plan_lost(self, plan: Any) -> None:
        """Take back what a plan says that was not executed, or not to its end."""
        step = self._steps.pop(plan.step, None)
        if step is None:
            return
        self._untold += [r for r in step.cancelled if r in self._loads]
        if step.metadata is not None:
            try:
                self._half.plan_lost(step.metadata)
            except BaseException as cause:
                self._note("plan_lost() failed", cause)

    def wait(self) -> None:
        """Wait a moment after a step without tokens, while a transfer or a lookup is under way."""
        if self._asked or self._loads or self._saves:
            time.sleep(self._wait_s)
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)

    def stats(self) -> dict[str, KVTierStats]:
        """Return totals by tier, of all ranks together."""
        return _summed(self._tiers.values())

    def close(self) -> None:
        """Close the connector."""
        try:
            self._half.close()
        finally:
            self._connector.close()

    def _note(self, message: str, cause: BaseException | None = None) -> None:
        if cause is not None:
            raise_unless_fault(cause)
        self._report(message, cause)

    def _take(self, report: KVReport) -> None:
        """Take what a rank reports."""
        for name, message in report.faults:
            self._faults.note(name, message, consequence=_COMPUTED)
        if report.tiers is not None:
            self._tiers[report.rank] = report.tiers
        if report.events:
            self._publish(list(report.events))
        for request_id in report.loaded:
            if (load := self._loads.get(request_id)) is not None:
                load.ranks.discard(report.rank)
        for request_id in report.saved:
            if (save := self._saves.get(request_id)) is not None:
                save.ranks.discard(report.rank)
        if report.message is not None:
            try:
                message = msgspec.msgpack.decode(report.message, type=self._connector.Message)
                self._half.receive(report.rank, message)
            except BaseException as cause:
                self._note("receive() failed", cause)

    def _end_loads(self, number: int, step: _Step, invalid: set[int]) -> dict[str, frozenset[int]]:
        """Return the requests whose loads have ended, each with the blocks that it lacks."""
        now, ended = self._clock(), dict[str, frozenset[int]]()
        for request_id, load in list(self._loads.items()):
            load.invalid |= load.blocks & invalid
            if step.failed and load.step == number:
                self._give_up(request_id, load)
            elif load.ranks and now > load.deadline and load.cancelled_in is None:
                self._note(
                    f"the load of request {request_id!r} took more than "
                    f"{self._config.load_seconds:g} s (kv_connector.load_seconds)"
                )
                self._give_up(request_id, load)
            elif load.cancelled_in == number:
                load.ranks.clear()
            if not load.ranks:
                del self._loads[request_id]
                ended[request_id] = load.invalid
                self._tell_end(request_id, load)
        return ended

    def _give_up(self, request_id: str, load: _Load) -> None:
        """Let the next plan cancel a load: the blocks are free once no worker writes to them."""
        load.invalid |= load.blocks
        load.deadline = math.inf
        self._untold.append(request_id)

    def _tell_end(self, request_id: str, load: _Load) -> None:
        try:
            self._half.load_ended(request_id, bool(load.invalid))
        except BaseException as cause:
            self._note("load_ended() failed", cause)

    def _end_saves(self) -> frozenset[str]:
        """Return the requests whose blocks are not kept any more."""
        now, saved = self._clock(), set()
        for request_id, save in list(self._saves.items()):
            if save.ranks and now > save.deadline:
                self._note(
                    f"get_finished() did not say within {self._config.lease_seconds:g} s "
                    f"(kv_connector.lease_seconds) that the blocks of request {request_id!r} are "
                    f"saved"
                )
                save.ranks.clear()
            if not save.ranks:
                del self._saves[request_id]
                saved.add(request_id)
        return frozenset(saved)


def _lacking(step: _Step, invalid: set[int]) -> list[tuple[str, frozenset[int]]]:
    """Return the loads in a step, each with the blocks that could not be loaded."""
    return [(name, blocks if step.failed else blocks & invalid) for name, blocks in step.loads]


def _summed(totals: Iterable[Mapping[str, KVTierStats]]) -> dict[str, KVTierStats]:
    """Return the sums of the ranks' totals, by tier."""
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
