"""Adapters as a step part: low-rank changes of linear layers, by request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import EngineConfig, StepPart
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext

if TYPE_CHECKING:
    from .engine_half import AdapterSlots
    from .worker_half import AdapterProducts


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

    @classmethod
    def merge_answers(cls, method: str, answers: Sequence[Any]) -> Any:
        """Return the answer of the first engine; only paths may differ.

        Each engine has links of its own to the files of tensors.

        Raises:
            HardpointError: engines answered differently.
        """
        super().merge_answers(method, [_without_paths(answer) for answer in answers])
        return answers[0]

    def engine_half(self, context: EngineHalfContext) -> AdapterSlots | None:
        """Return the half that gives requests slots; None if adapters are off."""
        if not self.context.config.adapters.max_loras:
            return None
        from .engine_half import AdapterSlots  # noqa: PLC0415 - disabled features cost nothing

        return AdapterSlots(self.context.name, self.context.config, context)

    def worker_half(self, context: WorkerHalfContext) -> AdapterProducts | None:
        """Return the half that computes adapters; None if they are off, or there is no model."""
        if not self.context.config.adapters.max_loras or context.loaded is None:
            return None
        from .worker_half import AdapterProducts  # noqa: PLC0415 - it imports torch

        return AdapterProducts(self.context.config, context, context.loaded)


def _without_paths(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_without_paths(item) for item in answer]
    return answer | {"path": ""} if isinstance(answer, dict) else answer
