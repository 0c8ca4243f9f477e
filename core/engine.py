"""The engine core: moves requests through scheduler and executor, one step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hardpoint.plugins import (
    Component,
    EngineCoreOutputs,
    EngineCoreRequest,
    Executor,
    FinishReason,
    KVCacheManager,
    PluginMeter,
    PluginSet,
    Scheduler,
    SchedulerStats,
    StepFault,
    WaitReason,
)

from .kv_events import KVEventFanout
from .policy_slot import PolicySlot
from .step_faults import StepFaults

__all__ = ["EngineCore", "EngineCoreParts"]


@dataclass(frozen=True)
class EngineCoreParts:
    """What an engine core is made of.

    Attributes:
        components: closed with the core, beside those that are named here.
    """

    scheduler: Scheduler
    executor: Executor
    kv_cache: KVCacheManager
    policy: PolicySlot
    kv_events: KVEventFanout
    faults: StepFaults
    components: Sequence[Component] = ()


class EngineCore:
    """Scheduler and executor, and the step that joins them."""

    def __init__(self, parts: EngineCoreParts) -> None:
        """Take over the parts; `close` closes them."""
        self._parts = parts
        self._scheduler = parts.scheduler
        self._executor = parts.executor

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it could never run, or too many wait.
        """
        self._scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> dict[int, EngineCoreOutputs]:
        """End requests; unknown ids are ignored. Returns their last outputs by client."""
        return self._scheduler.finish_requests(request_ids, FinishReason.ABORT)

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Schedule, execute, sample, update; return outputs by client.

        Without requests, does nothing.
        """
        if not self._scheduler.has_requests():
            return {}
        plan = self._scheduler.schedule()
        try:
            self._parts.kv_events.publish(self._parts.kv_cache.take_events())
            result = self._executor.execute_model(plan).result()
            if result is None:
                result = self._executor.sample_tokens(plan).result()
        except BaseException:
            self._scheduler.plan_lost(plan)
            raise
        return self._scheduler.update(plan, result)

    def why_waiting(self, request_ids: Iterable[str]) -> list[WaitReason | None]:
        """Return per live request why it got no tokens in the last step; None if it got some."""
        return [self._scheduler.why_waiting(request_id) for request_id in request_ids]

    def set_policy(self, plugins: PluginSet) -> None:
        """Take the scheduling policy of another generation of the plugin set, or none of it."""
        self._parts.policy.replace(plugins, self._scheduler)

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Forget cached content; with `recompute_running`, compute anew what runs."""
        self._scheduler.reset_prefix_cache(recompute_running=recompute_running)

    def scheduler_stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""
        return self._scheduler.stats()

    def step_faults(self) -> dict[str, StepFault]:
        """Return the decisions that plugins did not take, by plugin name."""
        return self._parts.faults.report()

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name, in the first worker."""
        meters: dict[str, PluginMeter] = self._executor.collective_rpc("plugin_meters")[0]
        return meters

    def close(self) -> None:
        """Release workers, model and cache."""
        parts = self._parts
        with contextlib.ExitStack() as stack:  # each is closed, whatever another one raises
            for component in parts.components:
                stack.callback(component.close)
            stack.callback(parts.kv_events.close)
            stack.callback(parts.policy.close)
            stack.callback(self._scheduler.close)
            stack.callback(self._executor.close)
