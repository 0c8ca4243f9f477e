"""How a frontend reaches an engine core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from hardpoint.plugins import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Manifest,
    PluginMeter,
    SchedulerStats,
    StepFault,
    WaitReason,
)

from .engine import EngineCore
from .freed_memory import give_back

__all__ = ["EngineCoreClient", "InprocClient"]


class EngineCoreClient(Protocol):
    """What a frontend may ask of an engine core, wherever it runs.

    Attributes:
        in_process: whether it runs in this process.
    """

    in_process: bool

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request."""

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; they give no more outputs."""

    def get_output(self, *, wait: bool) -> EngineCoreOutputs:
        """Return the next batch of outputs; may be empty.

        Args:
            wait: whether there is something to wait for.
        """

    def why_waiting(self, request_ids: list[str]) -> Sequence[WaitReason | None]:
        """Return per live request why it got no tokens in the last step; None if it got some."""

    def set_policy(self, manifest: Manifest) -> None:
        """Take the scheduling policy of another generation of the manifest, or nothing of it."""

    def reset_prefix_cache(self, recompute_running: bool) -> None:
        """Forget cached content; with `recompute_running`, compute anew what runs."""

    def scheduler_stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""

    def step_faults(self) -> dict[str, StepFault]:
        """Return the decisions that plugins did not take, by plugin name."""

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name."""

    def close(self) -> None:
        """End the engine."""


class InprocClient:
    """Calls the core directly; `get_output` runs a step."""

    in_process = True

    def __init__(self, core: EngineCore) -> None:
        """Take over the core."""
        self._core = core

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self._core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests; they give no more outputs."""
        self._core.abort_requests(request_ids)

    def get_output(self, *, wait: bool) -> EngineCoreOutputs:  # noqa: ARG002
        """Run one step."""
        outputs, _ = self._core.step()
        return outputs.get(0) or EngineCoreOutputs()

    def why_waiting(self, request_ids: list[str]) -> Sequence[WaitReason | None]:
        """Return per live request why it got no tokens in the last step; None if it got some."""
        return self._core.why_waiting(request_ids)

    def set_policy(self, manifest: Manifest) -> None:
        """Take the scheduling policy of another generation of the manifest, or nothing of it."""
        self._core.set_policy(manifest)

    def reset_prefix_cache(self, recompute_running: bool) -> None:
        """Forget cached content; with `recompute_running`, compute anew what runs."""
        self._core.reset_prefix_cache(recompute_running)

    def scheduler_stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""
        return self._core.scheduler_stats()

    def step_faults(self) -> dict[str, StepFault]:
        """Return the decisions that plugins did not take, by plugin name."""
        return self._core.step_faults()

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name."""
        return self._core.plugin_meters()

    def close(self) -> None:
        """Close the core and let go of it."""
        core = self._core
        del self._core
        try:
            core.close()
        finally:
            del core
            give_back()
