"""Top-a sampling for Hardpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hardpoint import plugins
from hardpoint.plugins import Annotated, LogitsProcessor, Meta, Phase, PrepareContext, Rows

if TYPE_CHECKING:
    import torch

Share = Annotated[float, Meta(gt=0, le=1)]


class TopA(LogitsProcessor):
    """Keep tokens with p >= a * p_max**2: the surer the model, the fewer stay.

    Source: BlinkDL, https://github.com/BlinkDL/RWKV-LM#the-top-a-sampling-method
    """

    contract = 1
    phase = Phase.TRUNCATE
    argmax_invariant = True
    after = ("top_k", "top_p", "min_p")

    class Options(plugins.Options):
        """What the operator allows: `max_a`, the largest `a` that a request may ask for."""

        max_a: Share = 1.0

    class Arguments(plugins.Arguments):
        """What a request asks for: `a`, the share of the squared largest probability."""

        a: Share

    @classmethod
    def prepare(cls, arguments: TopA.Arguments, context: PrepareContext) -> TopA.Arguments:
        """Refuse more than the operator allows."""
        if arguments.a > context.options.max_a:
            raise ValueError(f"a: expected at most {context.options.max_a}, got {arguments.a}")
        return arguments

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set the logits of unlikely tokens to -inf. `logits` is [rows, vocab]."""
        probs = logits.softmax(-1)
        limit = rows.tensor("a") * probs.amax(-1, keepdim=True) ** 2
        return logits.masked_fill(probs < limit, -math.inf)
