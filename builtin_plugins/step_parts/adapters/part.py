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
        """Merge answers of engines; some may lack adapters, as after a restart.

        Paths and numbers may differ: each engine has links of its own to the files of tensors.

        Raises:
            HardpointError: engines have different contents of a name.
        """
        if method in ("remove", "pin"):
            return any(answers)
        if method == "removed":
            return sorted({number for answer in answers for number in answer})
        if method == "list":
            by_name = [{lora["name"]: lora for lora in answer} for answer in answers]
            names = dict.fromkeys(name for loras in by_name for name in loras)
            return [cls._merged(method, [has.get(name) for has in by_name]) for name in names]
        if method == "resolve":
            columns = zip(*answers, strict=True)
            return [cls._merged(method, has) if None not in has else None for has in columns]
        return cls._merged(method, answers)

    @classmethod
    def _merged(cls, method: str, answers: Sequence[Any]) -> Any:
        """Return the first answer, without engines that lack the adapter."""
        present = [answer for answer in answers if answer is not None]
        super().merge_answers(method, [_content_of(answer) for answer in present])
        return present[0]

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


def _content_of(answer: Any) -> Any:
    return (answer.get("name"), answer.get("content_hash")) if isinstance(answer, dict) else answer
