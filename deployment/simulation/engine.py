"""A simulated engine: its scheduler, policy, KV cache and eviction policy are the real ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hardpoint.core.engine.prepare import limits_of
from hardpoint.core.kv_cache import BlockManager, BlockMetadata, Eviction
from hardpoint.errors import PluginFaultError, shown
from hardpoint.host.boundary.errors import close_all, rejection_output
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.policy import PolicySlot
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EvictionContext,
    HardpointError,
    SchedulerContext,
    SchedulerStats,
    StepCost,
)
from hardpoint.plugins.requests.engine_state import KVCacheChanges
from hardpoint.process.cache_changes import CacheChangeLog
from hardpoint.process.engine.reports import ClientReports
from hardpoint.toolkit.step_cost import StepCostFit

from .device import SimulatedDevice
from .step_costs import CostFile
from .stepping import SteppedScheduler
from .timeline import Timeline

_VOCABULARY = 2**32


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings that all engines of a fleet share.

    Attributes:
        config: their configuration, with `kv_cache.num_blocks`.
        plugins: the components that it names.
        step_cost: the time of their steps.
        faults: counts those of the components.
        first_token: returns the first token that a request generates, by its id.
        reports_cache: whether they report changes of their KV caches.
    """

    config: EngineConfig
    plugins: PluginSet
    step_cost: StepCost | CostFile
    faults: StepFaults
    first_token: Callable[[str], int]
    reports_cache: bool

    @property
    def num_blocks(self) -> int:
        """Blocks of each cache."""
        count = self.config.kv_cache.num_blocks
        assert count is not None, "`check` refuses that"
        return count

    def check(self) -> None:
        """Check that all of the configuration can be simulated.

        Raises:
            ConfigError: naming what cannot.
        """
        config = self.config
        simulated: dict[str, tuple[Any, Any]] = {
            "scheduler.asynchronous": (config.scheduler.asynchronous is True, False),
            "parallel.pipeline": (config.parallel.pipeline, 1),
            "kv_connector.use": (config.kv_connector.use, None),
            "speculation.use": (config.speculation.use, []),
        }
        for path, (value, right) in simulated.items():
            if value != right:
                raise ConfigError(
                    f"{path}: expected {shown(right)}, which alone is simulated, got {shown(value)}"
                )
        if config.kv_cache.num_blocks is None:
            raise ConfigError(
                "kv_cache.num_blocks: expected the number of blocks of a simulated engine, which "
                "has no memory to measure, got null"
            )


class SimulatedEngine:
    """An engine with its loop on a timeline; without work, nothing is planned there.

    Attributes:
        rank: its number.
        device: executes its steps.
        kv_cache: its KV cache manager.
        is_lost: whether it has died; it does nothing any more.
    """

    # The loop is that of deployment/process/engine/loop.py: read all messages, take a step, send
    # outputs with the reports that are due; without work, report once more and wait.

    def __init__(
        self,
        rank: int,
        settings: EngineSettings,
        timeline: Timeline,
        send: Callable[[SimulatedEngine, EngineCoreOutputs], None],
    ) -> None:
        """Build the components.

        Args:
            settings: those of the fleet.
            timeline: the fleet's clock, and what is planned on it.

        Raises:
            PluginError: a component cannot be built.
            ConfigError: limits that cannot work together.
        """
        self.rank = rank
        self.is_lost = False
        self._timeline, self._send = timeline, send
        self.device = SimulatedDevice(settings.step_cost, settings.first_token)
        cost, limits_prompts = settings.step_cost, settings.config.scheduler.step_milliseconds
        known = cost if isinstance(cost, StepCost) else cost.step_cost
        # As one that has served for a while. A cost that all steps have exactly teaches nothing.
        self._fit = StepCostFit(known if limits_prompts else None)
        self._fits = bool(limits_prompts) and known is not cost
        self._changes = CacheChangeLog() if settings.reports_cache else None
        self._build(settings)
        self._stepped = SteppedScheduler(self._scheduler)
        self._reports = ClientReports(
            1, timeline, stats=self.stats, cache=self._take_changes if self._changes else None
        )
        self._inbox: deque[EngineCoreRequest] = deque()
        self._is_idle = True

    def _build(self, settings: EngineSettings) -> None:
        plugins, config, clock = settings.plugins, settings.config, self._timeline
        faults, cache = settings.faults, settings.config.kv_cache
        blocks = BlockMetadata(clock)
        entry = plugins.one("eviction_policies")
        self._eviction = plugins.create(
            entry, EvictionContext, blocks=blocks, history=blocks.start_history, clock=clock
        )
        calls = faults.calls("eviction_policies", entry.source)
        num_blocks = settings.num_blocks
        self.kv_cache = BlockManager(
            num_blocks,
            cache.block_size,
            prefix_caching=cache.prefix_caching,
            hash_algorithm=cache.hash_algorithm,
            eviction=Eviction(self._eviction, faults.reporter(entry.source), calls),
            metadata=blocks,
            events=settings.reports_cache,
        )
        self._policy = PolicySlot(plugins, faults, _VOCABULARY)
        length = config.max_model_len
        if not isinstance(length, int):
            length = num_blocks * cache.block_size
        self._scheduler = plugins.create(
            plugins.one("schedulers"),
            SchedulerContext,
            limits=limits_of(config, length),
            kv_cache=self.kv_cache,
            policy=self._policy.policy,
            policy_fault=self._policy.report_fault,
            clock=clock,
            watermark=cache.watermark,
            step_cost=self._fit.current,
        )

    def stats(self) -> SchedulerStats:
        """Return the state of its scheduler."""
        return self._scheduler.stats()

    def submit(self, request: EngineCoreRequest) -> None:
        """Send a request, which it reads after the step that it computes."""
        self._inbox.append(request)
        if self._is_idle:
            self._is_idle = False
            self._timeline.after(0.0, self._turn)

    def lose(self) -> None:
        """End it at once, as a killed process."""
        self.is_lost = True
        self._inbox.clear()
        self._stepped.in_flight.clear()

    def close(self) -> None:
        """Close its components."""
        close_all([self._eviction, self._scheduler])
        self._policy.close()

    def _turn(self) -> None:
        if self.is_lost:
            return
        while self._inbox:
            self._read(self._inbox.popleft())
        if not self._scheduler.has_requests():
            self._wait()
            return
        plan = self._stepped.start(self.device.execute)
        waits = self._scheduler.num_unfinished_requests() > 0
        seconds = self.device.seconds(plan, waits=waits)
        if self._fits:  # as the engine does, so that prompts get as many tokens of a step
            self._fit.learn(plan, 1e3 * seconds)
        self._timeline.after(seconds, self._end_step)

    def _read(self, request: EngineCoreRequest) -> None:
        self._reports.read_request(0, request.request_id)
        try:
            self._policy.take_arguments(request)
            self._scheduler.add_request(request)
        except PluginFaultError:
            raise
        except HardpointError as error:
            self._send(self, rejection_output(request.request_id, error))

    def _end_step(self) -> None:
        if self.is_lost:
            return
        delivered = self._stepped.deliver()
        executed = delivered.plan.total_num_scheduled_tokens > 0
        self._report(self._reports.with_reports(delivered.outputs, executed=executed))
        self._turn()

    def _wait(self) -> None:
        self._is_idle = True
        self._report(self._reports.with_reports({}))
        if (wait_s := self._reports.wait_s) is not None:
            self._timeline.after(wait_s, self._wake)

    def _wake(self) -> None:
        if self._is_idle:
            self._turn()

    def _report(self, messages: dict[int, EngineCoreOutputs]) -> None:
        if (outputs := messages.get(0)) is not None:
            self._send(self, outputs)

    def _take_changes(self) -> KVCacheChanges | None:
        changes = self._changes
        assert changes is not None, "it is asked only where they are reported"
        if events := self.kv_cache.take_events():
            changes.add(events)
        return changes.pop()
