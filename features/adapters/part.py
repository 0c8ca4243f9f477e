"""Adapters as a step part: low-rank changes of linear layers, by request."""

from __future__ import annotations

from collections.abc import Collection

from hardpoint.plugins import EngineConfig, EngineHalf, StepPart, WorkerHalf
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext


class Adapters(StepPart):
    """Low-rank adapters of linear layers (LoRA), which requests name; see `[adapters]`.

    The engine's half knows names and contents, and gives requests slots; the worker halves read
    the files and change the products of the linear layers.
    """

    contract = 1

    @classmethod
    def request_fields(cls, config: EngineConfig) -> Collection[str]:
        """Return the adapter of a request, where requests may have one."""
        return ("lora",) if config.adapters.max_loras else ()

    def engine_half(self, context: EngineHalfContext) -> EngineHalf | None:
        """Return the half that gives requests slots; None if adapters are off."""
        if not self.context.config.adapters.max_loras:
            return None
        from .engine_half import AdapterSlots  # noqa: PLC0415 - what is off costs nothing

        return AdapterSlots(self.context.config, context)

    def worker_half(self, context: WorkerHalfContext) -> WorkerHalf | None:
        """Return the half that computes adapters; None if they are off, or there is no model."""
        if not self.context.config.adapters.max_loras or context.loaded is None:
            return None
        from .worker_half import AdapterProducts  # noqa: PLC0415 - it imports torch

        return AdapterProducts(self.context.config, context, context.loaded)
