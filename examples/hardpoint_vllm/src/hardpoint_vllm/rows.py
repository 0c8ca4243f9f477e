"""Base of the adapters for vLLM's classes: arguments of requests, and calls on some rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import LogitsContext, LogitsProcessor, PrepareContext, SamplingParams
from hardpoint.plugins.sampling import FollowsBatch
from hardpoint.toolkit.logits_calls import AdaptedProcessor, HandedOver

from .objects import AdapterArguments, ExternalParams

if TYPE_CHECKING:
    import torch


class VLLMClass(AdaptedProcessor, FollowsBatch, LogitsProcessor):
    """Base of the adapters for vLLM's classes."""

    contract = 1
    context: LogitsContext

    class Options(AdaptedProcessor.Options):
        """Options of the class."""

    class Arguments(AdapterArguments):
        """Arguments that the class reads."""

    @classmethod
    def prepare(cls, arguments: AdapterArguments, context: PrepareContext) -> AdapterArguments:
        """Call the class's `validate_params`, if it has one."""
        validate = getattr(cls.external.target, "validate_params", None)
        if validate is not None:
            validate(ExternalParams(context.params, arguments.extra_args, context.stop_token_ids))
        return arguments

    def params_of(self, params: SamplingParams) -> ExternalParams | None:
        """Return the parameters of a request in the batch; None if it does not use the plugin."""
        arguments = params.plugin_args.get(self.name)
        return None if arguments is None else ExternalParams(params, arguments.extra_args)


def run_on(
    logits: torch.Tensor,
    source: list[int],
    call: Callable[[torch.Tensor], Any],
    place: tuple[list[int], int] | None = None,
) -> torch.Tensor:
    """Return logits with some rows replaced by the results of a class.

    Args:
        logits: float32 [rows, vocab]; may be edited in place.
        source: the rows.
        call: gets them as [rows, vocab], and returns as many.
        place: where they are in what the class gets, and how many rows that has; the others are 0.
    """
    from hardpoint.plugins.device import to_device  # noqa: PLC0415 - it imports torch

    count = len(logits)
    target, size = (list(range(len(source))), len(source)) if place is None else place
    whole = list(range(count))
    if source == whole and target == whole and size == count:
        handed_over = HandedOver(logits)
        return handed_over.result(call(logits))
    source_index = to_device(source, logits.device)
    part = logits.index_select(0, source_index)
    if place is None:
        handed_over = HandedOver(part)
        return logits.index_copy_(0, source_index, handed_over.result(call(part)))
    target_index = to_device(target, logits.device)
    batch = logits.new_zeros(size, logits.shape[1]).index_copy_(0, target_index, part)
    handed_over = HandedOver(batch)
    result = handed_over.result(call(batch))
    return logits.index_copy_(0, source_index, result.index_select(0, target_index))
