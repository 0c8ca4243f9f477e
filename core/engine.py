"""The engine core: moves requests through scheduler and executor, one step at a time."""

from __future__ import annotations

from collections.abc import Iterable

from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Executor,
    FinishReason,
    PluginMeter,
    Scheduler,
)

__all__ = ["EngineCore"]


class EngineCore:
    """Scheduler and executor, and the step that joins them."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        """Take over both; `close` closes them."""
        self._scheduler = scheduler
        self._executor = executor

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self._scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests; unknown ids are ignored. Returns their last outputs."""
        return self._scheduler.finish_requests(request_ids, FinishReason.ABORT)

    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, sample, update. Without requests, does nothing."""
        if not self._scheduler.has_requests():
            return EngineCoreOutputs()
        plan = self._scheduler.schedule()
        result = self._executor.execute_model(plan).result()
        if result is None:
            result = self._executor.sample_tokens(plan).result()
        return EngineCoreOutputs(outputs=self._scheduler.update(plan, result))

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name, in the first worker."""
        meters: dict[str, PluginMeter] = self._executor.collective_rpc("plugin_meters")[0]
        return meters

    def close(self) -> None:
        """Release workers, model and cache."""
        self._executor.close()
        self._scheduler.close()
