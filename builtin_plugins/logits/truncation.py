"""Processors that mask unlikely tokens: top_k, top_p and min_p, in this order."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch

from hardpoint import plugins
from hardpoint.plugins import LogitsContext, LogitsProcessor, Meta, Phase, Reads, Rows

from .row_cache import RowCache

_ROUNDING = 1e-6
"""How far a float32 probability may be from the limit and still count as equal to it."""

_WIDE = 1 << 14  # logits per row from which searching the nucleus's end beats sorting the row
_STRIDE = 16  # one of so many logits is sorted to estimate where the nucleus ends
_MARGIN = 96  # sorted logits on each side of the estimate between which the end is searched

_CERTAIN = 1e-9
"""How far a sum must be from the limit for its order not to matter: float64 sums of a vocabulary's
probabilities differ by less."""

_BLOCK = 16  # logits per block in the coarse search of `largest`


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
        """Create the processor with an empty cache."""
        super().__init__(context)
        self._cache = RowCache[tuple[int, torch.Tensor, torch.Tensor]]()

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set the logits below each row's k-th largest one to -inf, in place."""
        largest_k, index, off = self._cache.get(rows, lambda: self._build(rows))
        if not largest_k:
            return logits
        threshold = largest(logits, largest_k).gather(1, index).masked_fill_(off, -math.inf)
        return mask_below_(logits, threshold)

    def _build(self, rows: Rows) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return the largest k (0: all off), the rows' indices k - 1, and which rows are off."""
        size = self.context.vocab_size
        requested = [arguments.top_k for arguments in rows.arguments()]
        largest_k = max((k for k in requested if 0 < k < size), default=0)
        k = rows.tensor("top_k")
        off = (k <= 0) | (k >= size)
        return largest_k, (k - 1).clamp(0, max(largest_k - 1, 0)), off


class TopP(LogitsProcessor):
    """Keeps the smallest set of most likely tokens whose probability reaches p.

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
        top_p = rows.tensor("top_p")
        threshold = torch.empty_like(top_p)
        best = logits.amax(-1, keepdim=True)
        best_prob = _best_probability(logits).double()
        pending = torch.arange(len(rows), device=logits.device)
        for width in self._widths():
            if width == self.context.vocab_size >= _WIDE and logits.device.type == "cpu":
                limits = top_p.double() - _ROUNDING
                left = [
                    row
                    for row in pending.tolist()
                    if not _search(logits[row], best_prob[row], limits[row], threshold[row])
                ]
                pending = pending.new_tensor(left)
                if not left:
                    break
            part = slice(None) if len(pending) == len(rows) else pending
            found, value = _nucleus(
                _best(logits[part], width), best[part], best_prob[part], top_p[part]
            )
            threshold[pending] = value
            if width == self.context.vocab_size:
                break
            pending = pending[~found]
            if not len(pending):
                break
        return mask_below_(logits, threshold)

    def _widths(self) -> tuple[int, ...]:
        """Return the numbers of largest logits to try, ascending; the last is the vocabulary."""
        # Sorting a whole vocabulary costs much more than finding its largest few; on a GPU,
        # checking whether those were enough would make the host wait. Searching a wide row, though,
        # costs less than finding its largest 1024.
        size = self.context.vocab_size
        if self.context.device.type != "cpu":
            return (size,)
        few = (64,) if size >= _WIDE else (64, 1024)
        return (*(width for width in few if width < size), size)


def _best_probability(logits: torch.Tensor) -> torch.Tensor:
    """Return the probability of each row's most likely token, [rows, 1]."""
    # softmax, unlike a sum, is bitwise the same for a row alone and in any batch.
    if logits.device.type != "cpu":
        return logits.softmax(-1).amax(-1, keepdim=True)
    # Row by row: one row's probabilities stay in the processor's cache.
    return torch.stack([row.softmax(-1).amax(-1, keepdim=True) for row in logits.unbind()])


def _best(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Return each row's `width` largest logits, descending."""
    if width < logits.shape[1]:
        return largest(logits, width)
    if logits.device.type == "cpu":  # numpy sorts values without indices, three times as fast
        return torch.from_numpy(np.sort(logits.numpy())).flip(-1)
    return logits.sort(descending=True).values


def _nucleus(
    values: torch.Tensor, best: torch.Tensor, best_prob: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find each row's smallest logit of the nucleus among its largest logits.

    Args:
        values: the row's largest logits, descending, [rows, width].
        best: the largest, [rows, 1].
        best_prob: its probability, float64 [rows, 1].
        top_p: the probability to reach, but for rounding, [rows, 1].

    Returns:
        bool [rows], whether it was found, and the logits, [rows, 1]. The cumulative sums are
        float64, in order, so they do not depend on the width.
    """
    width = values.shape[1]
    reached = (values - best).double().exp_().mul_(best_prob).cumsum(-1)
    # The number of tokens before the one that reaches p.
    needed = torch.searchsorted(reached, top_p.double() - _ROUNDING)
    value = values.gather(1, needed.clamp(max=width - 1))
    value.masked_fill_(top_p >= 1, -math.inf)
    found = (needed < width) | (values[:, -1:] == -math.inf) | (top_p >= 1)
    return found.squeeze(1), value


def _search(
    logits: torch.Tensor, best_prob: torch.Tensor, limit: torch.Tensor, threshold: torch.Tensor
) -> bool:
    """Find the smallest logit of a row's nucleus without sorting the row.

    A sample of the row says about where the nucleus ends. The probabilities above are summed in any
    order, those nearby in descending order.

    Args:
        logits: on a CPU, float32 [vocab].
        best_prob: probability of the largest, float64 [1].
        limit: the probability to reach, float64 [1].
        threshold: float32 [1]; is set to what `_nucleus` finds.

    Returns:
        Whether it was found: not if the sample misled, or if the order of summing might matter.
    """
    row, goal = logits.numpy(), float(limit)
    best, scale = row.max(), float(best_prob)
    if not math.isfinite(best) or goal >= 1 - 2 * _ROUNDING:
        return False
    probs = np.exp((row - best).astype(np.float64))
    # From the least likely on: these are many, so that a sample says their sum.
    sample = np.sort(row[::_STRIDE])
    tail = np.exp((sample - best).astype(np.float64)).cumsum() * _STRIDE
    end = int(np.searchsorted(tail, probs.sum() - goal / scale))
    low = sample[end - _MARGIN] if end > _MARGIN else -np.inf
    high = sample[end + _MARGIN] if end + _MARGIN < len(sample) else best
    above = float((row > high).astype(np.float64) @ probs) * scale
    near = np.sort(row[(row <= high) & (row >= low)])[::-1]
    reached = np.exp((near - best).astype(np.float64)).cumsum() * scale + above
    index = int(np.searchsorted(reached, goal))
    if index == len(near):
        return False
    threshold.fill_(float(near[index]))
    before = reached[index - 1] if index else above
    return bool(before < goal - _CERTAIN and reached[index] > goal + _CERTAIN)


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

    def __init__(self, context: LogitsContext) -> None:
        """Create the processor with an empty cache."""
        super().__init__(context)
        self._cache = RowCache[torch.Tensor]()

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Set the logits below each row's maximum + log(min_p) to -inf, in place."""
        distance = self._cache.get(rows, lambda: rows.tensor("min_p").log())
        return mask_below_(logits, logits.amax(-1, keepdim=True) + distance)


def mask_below_(logits: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Set the logits below each row's threshold to -inf, in place.

    Args:
        logits: float32 [rows, vocab].
        threshold: float32 [rows, 1]; logits equal to it are kept.

    Returns:
        `logits`.
    """
    if logits.device.type != "cpu":
        return logits.masked_fill_(logits < threshold, -math.inf)
    # Comparing and masking take three passes, two of them slow; torch.threshold_ takes one, but
    # has one bound for all rows and masks what equals it. So: row by row, with the next smaller
    # float as the bound.
    bounds = threshold.nextafter(threshold.new_tensor(-math.inf)).flatten().tolist()
    for row, bound in zip(logits.unbind(), bounds, strict=True):
        torch.threshold_(row, bound, -math.inf)
    return logits


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return each row's `count` largest logits, descending, as [rows, count].

    Args:
        logits: float32 [rows, vocab].
        count: from 1 to vocab.
    """
    rows, vocab = logits.shape
    width = vocab // _BLOCK  # the number of blocks
    if logits.device.type != "cpu" or count * _BLOCK * 2 > vocab or not logits.is_contiguous():
        return logits.topk(count).values
    # The `count` blocks with the largest maxima hold the `count` largest logits: any other logit is
    # at most its own block's maximum, and so at most each of theirs. A block is a column of the
    # view, so that the maxima are computed many at a time.
    blocks = logits[:, : width * _BLOCK].view(rows, _BLOCK, width)
    best = blocks.amax(1).topk(count, sorted=False).indices
    index = best.unsqueeze(1).expand(rows, _BLOCK, count)
    candidates = [blocks.gather(2, index).flatten(1), logits[:, width * _BLOCK :]]
    return torch.cat(candidates, 1).topk(count).values
