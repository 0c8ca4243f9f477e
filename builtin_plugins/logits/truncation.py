"""Processors that mask unlikely tokens: top_k, top_p and min_p, in this order."""

from __future__ import annotations

from typing import Annotated

import torch

from hardpoint import plugins
from hardpoint.plugins import LogitsContext, LogitsProcessor, Meta, Phase, Reads, Rows

from .row_cache import RowCache


class TopK(LogitsProcessor):
    """Keeps the k most likely tokens (Fan et al., arXiv:1805.04833).

    Ties with the k-th token are all kept, so that the result does not depend on their order.
    """

    contract = 1
    phase = Phase.TRUNCATE
    argmax_invariant = True
    params_fields = ("top_k",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """The number of tokens to keep.

        Attributes:
            top_k: number of tokens; 0 or -1 disables it.
        """

        top_k: Annotated[int, Meta(ge=-1)] = 0

    context: LogitsContext

    def __init__(self, context: LogitsContext) -> None:
        super().__init__(context)
        self._cache = RowCache[int]()

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set the logits below each row's k-th largest one to -inf, in place."""
        if largest_k := self._cache.get(rows, lambda: self._largest_k(rows)):
            self.context.ops.keep_top_k(logits, rows.tensor("top_k"), largest_k)
        return logits

    def _largest_k(self, rows: Rows) -> int:
        """Return the largest k of rows that it is not off for; 0 if it is for all."""
        size = self.context.vocab_size
        requested = [arguments.top_k for arguments in rows.arguments()]
        return max((k for k in requested if 0 < k < size), default=0)


class TopP(LogitsProcessor):
    """Keeps the smallest set of most likely tokens with a probability of at least p.

    Nucleus sampling (Holtzman et al., arXiv:1904.09751). Ties with the last token needed are all
    kept, so that the result does not depend on their order. A probability that is less than 1e-6
    under p reaches it, so that rounding adds no token to a set that reaches p exactly.
    """

    contract = 1
    phase = Phase.TRUNCATE
    argmax_invariant = True
    after = ("top_k",)
    params_fields = ("top_p",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """The probability to keep.

        Attributes:
            top_p: total probability of the kept tokens; 1 disables it.
        """

        top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0

    context: LogitsContext

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set the logits below each row's nucleus to -inf, in place."""
        self.context.ops.keep_top_p(logits, rows.tensor("top_p"))
        return logits


class MinP(LogitsProcessor):
    """Masks tokens less likely than min_p times the most likely one (arXiv:2407.01082).

    Logits are compared, so nothing underflows; a token exactly at the threshold is kept.
    """

    contract = 1
    phase = Phase.TRUNCATE
    argmax_invariant = True
    after = ("top_k", "top_p")
    params_fields = ("min_p",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """The relative threshold.

        Attributes:
            min_p: share of the most likely token's probability; 0 disables it.
        """

        min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0

    context: LogitsContext

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set the logits below each row's maximum + log(min_p) to -inf, in place."""
        self.context.ops.keep_min_p(logits, rows.tensor("min_p"))
        return logits
