"""temperature: flatten or sharpen the distribution."""

from __future__ import annotations

from typing import Annotated, Any

import torch

from hardpoint import plugins
from hardpoint.plugins import (
    LogitsContext,
    LogitsProcessor,
    Meta,
    Phase,
    PrepareContext,
    Reads,
    Rows,
)

# Logits divided by more than this are equal in float32; a larger divisor could become infinite,
# and -inf / inf is NaN.
_LARGEST = 1e30


class Temperature(LogitsProcessor):
    """Divides logits by the temperature. It does not run for greedy requests.

    A temperature below 1e-5 is greedy. The value in `plugin_args` must equal the field of
    `SamplingParams`.
    """

    contract = 1
    phase = Phase.TEMPERATURE
    params_fields = ("temperature",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """The divisor.

        Attributes:
            temperature: larger values make sampling more random.
        """

        temperature: Annotated[float, Meta(ge=0)] = 1.0

    context: LogitsContext

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Raise ValueError for a temperature other than SamplingParams has."""
        # The field of SamplingParams also decides whether the request is greedy.
        if arguments.temperature != context.params.temperature:
            raise ValueError(
                f"expected SamplingParams.temperature "
                f"({context.params.temperature}), got {arguments.temperature}; set it there"
            )
        return arguments

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Divide each row of [rows, vocab] by its temperature, in place."""
        self.context.ops.divide(logits, rows.tensor("temperature").clamp(max=_LARGEST))
        return logits
