"""Processors that drop unlikely tokens: top_k, top_p and min_p, in this order."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch

from hardpoint import plugins
from hardpoint.plugins import LogitsContext, LogitsProcessor, Meta, Phase, Reads, Rows

from .row_cache import RowCache
from .selection import drop_below_, largest


class TopK(LogitsProcessor):
    """Keeps the k likeliest tokens (Fan et al., arXiv:1805.04833).

    Tokens as likely as the k-th are all kept, so that the outcome does not hang on their order.
    """

    contract = 1
    phase = Phase.TRUNCATE
    argmax_invariant = True
    params_fields = ("top_k",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """A count.

        Attributes:
            top_k: how many tokens to keep; 0 or -1 is off.
        """

        top_k: Annotated[int, Meta(ge=-1)] = 0

    context: LogitsContext

    def __init__(self, context: LogitsContext) -> None:
        """Start with nothing cached."""
        super().__init__(context)
        self._cache = RowCache[tuple[int, torch.Tensor, torch.Tensor]]()

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set what is under each row's k-th logit to -inf, in place."""
        most, place, off = self._cache.get(rows, lambda: self._build(rows))
        if not most:
            return logits
        smallest = largest(logits, most).gather(1, place).masked_fill_(off, -math.inf)
        return drop_below_(logits, smallest)

    def _build(self, rows: Rows) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return the largest k (0: all off), each row's index of its k-th logit, who is off."""
        size = self.context.vocab_size
        wanted = [arguments.top_k for arguments in rows.arguments()]
        most = max((k for k in wanted if 0 < k < size), default=0)
        k = rows.tensor("top_k")
        off = (k <= 0) | (k >= size)
        return most, (k - 1).clamp(0, max(most - 1, 0)), off


class TopP(LogitsProcessor):
    """Keeps the smallest set of likeliest tokens whose probability reaches p.

    Nucleus sampling (Holtzman et al., arXiv:1904.09751). Tokens as likely as the last one needed
    are all kept, so that the outcome does not hang on their order.
    """

    contract = 1
    phase = Phase.TRUNCATE
    argmax_invariant = True
    after = ("top_k",)
    params_fields = ("top_p",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """A probability.

        Attributes:
            top_p: the probability to keep; 1 is off.
        """

        top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0

    context: LogitsContext

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set what is under each row's smallest needed logit to -inf, in place."""
        top_p = rows.tensor("top_p")
        smallest = torch.empty_like(top_p)
        best = logits.amax(-1, keepdim=True)
        best_prob = _best_probability(logits).double()
        pending = torch.arange(len(rows), device=logits.device)
        for width in self._widths():
            part = slice(None) if len(pending) == len(rows) else pending
            found, value = _nucleus(
                _best(logits[part], width), best[part], best_prob[part], top_p[part]
            )
            smallest[pending] = value
            if width == self.context.vocab_size:
                break
            pending = pending[~found]
            if not len(pending):
                break
        return drop_below_(logits, smallest)

    def _widths(self) -> tuple[int, ...]:
        """Return how many of the best tokens to look at, in turn; the last is all.

        Sorting a whole vocabulary costs much more than finding its best few, but on a GPU asking
        whether those were enough would make the host wait.
        """
        size = self.context.vocab_size
        if self.context.device.type != "cpu":
            return (size,)
        return (*(width for width in (64, 1024) if width < size), size)


def _best_probability(logits: torch.Tensor) -> torch.Tensor:
    """Return the probability of each row's likeliest token, [rows, 1]."""
    # softmax, unlike a sum, gives a row the same bits alone and in any batch.
    if logits.device.type != "cpu":
        return logits.softmax(-1).amax(-1, keepdim=True)
    # One row's probabilities stay in the cache; all rows' need not even exist.
    return torch.stack([row.softmax(-1).amax(-1, keepdim=True) for row in logits.unbind()])


def _best(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Return each row's `width` largest logits, falling."""
    if width < logits.shape[1]:
        return largest(logits, width)
    if logits.device.type == "cpu":  # numpy sorts floats alone, three times as fast
        return torch.from_numpy(np.sort(logits.numpy())).flip(-1)
    return logits.sort(descending=True).values


def _nucleus(
    values: torch.Tensor, best: torch.Tensor, best_prob: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look for each row's smallest needed logit among its largest.

    Args:
        values: the row's largest logits, falling, [rows, width].
        best: the largest, [rows, 1].
        best_prob: its probability, float64 [rows, 1].
        top_p: the probability to reach, [rows, 1].

    Returns:
        bool [rows], whether it is there for sure, and the logits, [rows, 1]. The sums are made
        in float64, one token after the other, so they do not depend on the width.
    """
    width = values.shape[1]
    reached = (values - best).double().exp_().mul_(best_prob).cumsum(-1)
    needed = (reached < top_p).sum(-1, keepdim=True)  # tokens before the one that reaches p
    value = values.gather(1, needed.clamp(max=width - 1))
    value.masked_fill_(top_p >= 1, -math.inf)
    found = (needed < width) | (values[:, -1:] == -math.inf) | (top_p >= 1)
    return found.squeeze(1), value


class MinP(LogitsProcessor):
    """Drops tokens less likely than min_p times the likeliest (arXiv:2407.01082).

    Compared as logits, so nothing underflows; a token exactly at the border stays.
    """

    contract = 1
    phase = Phase.TRUNCATE
    argmax_invariant = True
    after = ("top_k", "top_p")
    params_fields = ("min_p",)
    reads = Reads.LOGITS

    class Arguments(plugins.Arguments):
        """A share.

        Attributes:
            min_p: of the likeliest token's probability; 0 is off.
        """

        min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def __init__(self, context: LogitsContext) -> None:
        """Start with nothing cached."""
        super().__init__(context)
        self._cache = RowCache[torch.Tensor]()

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set what is under each row's maximum + log(min_p) to -inf, in place."""
        distance = self._cache.get(rows, lambda: rows.tensor("min_p").log())
        return drop_below_(logits, logits.amax(-1, keepdim=True) + distance)
