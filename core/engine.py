"""The engine core: moves requests through scheduler and executor, one step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hardpoint.plugins import (
    Component,
    EngineCoreOutputs,
    EngineCoreRequest,
    Executor,
    FinishReason,
    KVCacheManager,
    Manifest,
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

    def abort_requests(self, request_ids: Iterable[str] | None) -> dict[int, EngineCoreOutputs]:
        """End requests; unknown ids are ignored, None is all of them.

        Returns:
            Their last outputs by client.
        """
        return self._scheduler.finish_requests(request_ids, FinishReason.ABORT)

    def has_requests(self) -> bool:
        """Whether a step has anything to do."""
        return self._scheduler.has_requests()

    def num_unfinished_requests(self) -> int:
        """Return the number of live requests."""
        return self._scheduler.num_unfinished_requests()

    def step(
        self, late_aborts: Callable[[], Sequence[str]] = tuple
    ) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Schedule, execute, sample, update. Without requests, does nothing.

        Args:
            late_aborts: asked once the results are in; these requests get no tokens of this step.

        Returns:
            Outputs by client, and whether any token was computed.
        """
        if not self._scheduler.has_requests():
            return {}, False
        plan = self._scheduler.schedule()
        try:
            self._parts.kv_events.publish(self._parts.kv_cache.take_events())
            result = self._executor.execute_model(plan).result()
            if result is None:
                result = self._executor.sample_tokens(plan).result()
        except BaseException:
            self._scheduler.plan_lost(plan)
            raise
        if aborted := late_aborts():
            self.abort_requests(aborted)
        return self._scheduler.update(plan, result), plan.total_num_scheduled_tokens > 0

    def why_waiting(self, request_ids: list[str]) -> list[WaitReason | None]:
        """Return per live request why it got no tokens in the last step; None if it got some."""
        return [self._scheduler.why_waiting(request_id) for request_id in request_ids]

    def set_policy(self, manifest: Manifest) -> None:
        """Take the scheduling policy of another generation of the manifest, or nothing of it."""
        self._parts.policy.replace(PluginSet(manifest), self._scheduler)

    def reset_prefix_cache(self, recompute_running: bool = False) -> None:
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
