"""temperature: flatten or sharpen the distribution."""

from __future__ import annotations

from typing import Annotated, Any

import torch

from hardpoint import plugins
from hardpoint.plugins import LogitsProcessor, Meta, Phase, PrepareContext, Reads, Rows

# Logits divided by more than this are equal in float32; a larger divisor could become infinite,
# and -inf / inf is NaN.
_LARGEST = 1e30


class Temperature(LogitsProcessor):
    """Divides logits by the temperature. Greedy requests never come here."""

    contract = 1
    phase = Phase.TEMPERATURE
    params_fields = ("temperature",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """A divisor.

        Attributes:
            temperature: larger is more random.
        """

        temperature: Annotated[float, Meta(ge=0)] = 1.0

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Refuse a temperature other than the request's own, with a ValueError.

        The field of SamplingParams also says whether the request is greedy, so a second value
        under `plugin_args` could only contradict it.
        """
        if arguments.temperature != context.params.temperature:
            raise ValueError(
                f"expected SamplingParams.temperature "
                f"({context.params.temperature}), got {arguments.temperature}; set it there"
            )
        return arguments

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Divide each row of [rows, vocab] by its temperature, in place."""
        return logits.div_(rows.tensor("temperature").clamp(max=_LARGEST))
