"""Top-a sampling for Hardpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hardpoint import plugins
from hardpoint.plugins import Annotated, LogitsProcessor, Meta, Phase, PrepareContext, Rows

if TYPE_CHECKING:
    import torch

Fraction = Annotated[float, Meta(gt=0, le=1)]


class TopA(LogitsProcessor):
    """Keeps tokens with p >= a * p_max**2: the more confident the model, the fewer are kept.

    Source: BlinkDL, https://github.com/BlinkDL/RWKV-LM#the-top-a-sampling-method
    """

    contract = 1
    phase = Phase.TRUNCATE
    argmax_invariant = True
    after = ("top_k", "top_p", "min_p")

    class Options(plugins.Options):
        """Limits set by the operator: `max_a`, the largest `a` of a request."""

        max_a: Fraction = 1.0

    class Arguments(plugins.Arguments):
        """Arguments of a request: `a`, the fraction of the squared largest probability."""

        a: Fraction

    @classmethod
    def prepare(cls, arguments: Arguments, context: PrepareContext) -> Arguments:
        """Raise ValueError if `a` exceeds the operator's limit."""
        if arguments.a > context.options.max_a:
            raise ValueError(f"a: expected at most {context.options.max_a}, got {arguments.a}")
        return arguments

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set the logits of unlikely tokens to -inf. `logits` is [rows, vocab]."""
        probs = logits.softmax(-1)
        limit = rows.tensor("a") * probs.amax(-1, keepdim=True) ** 2
        return logits.masked_fill(probs < limit, -math.inf)
