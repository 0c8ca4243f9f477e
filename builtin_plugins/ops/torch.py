"""Operations in plain torch, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from hardpoint.plugins import Ops, OpsContext

_PACK_ROWS = 512

_FEW = 64  # largest logits among which the end of a nucleus is looked for first
_RANGE = 29.0  # weights of logits that are further below the largest one are 0
_BUCKETS = 32  # per unit of that range
_CHUNK = 2**18  # logits with weights computed at a time, so that they stay in the cache
_BLOCK = 16  # logits per block in the coarse search of `largest`


class TorchOps(Ops):
    """Operations in plain torch."""

    contract = 1
    devices = ("cpu", "cuda")

    def __init__(self, context: OpsContext) -> None:
        super().__init__(context)
        # Of the last step's angles: they are the same for all layers of a step.
        self._angles: torch.Tensor | None = None
        self._cosines = self._sines = torch.empty(0)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W; on a CPU in oneDNN's blocked layout, with unreadable bytes."""
        # Packing was measured to be 1.2 to 2 times faster than F.linear in bfloat16 and float32,
        # with equal results; float16 has no packed form on most processors, bfloat16 on some.
        if weight.device.type == "cpu" and _can_pack(weight.dtype):
            packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
                weight.contiguous(), _PACK_ROWS
            )
            return packed
        return weight

    def linear(
        self,
        packed: torch.Tensor,
        shape: tuple[int, int],  # noqa: ARG002 - packed has it
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return x -> x W^T + b."""
        multiply = _linear(packed, bias)
        if out_dtype in (None, packed.dtype):
            return multiply
        return lambda x: multiply(x).to(out_dtype)

    def gather_rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        return table[ids]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the normalized rows."""
        return _rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add delta to x in place; return the normalized rows."""
        return _rms_norm(x.add_(delta), weight, eps)

    def rotate(self, x: torch.Tensor, angles: torch.Tensor) -> None:
        """Rotate heads in place."""
        if angles is not self._angles:
            cos, sin = angles.to(x.dtype).unsqueeze(1).chunk(2, -1)
            # The sign of the rotation is in the sines, so that it needs a roll only.
            self._cosines, self._sines = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
            self._angles = angles
        rolled = torch.roll(x, x.shape[-1] // 2, -1)
        torch.addcmul(x * self._cosines, rolled, self._sines, out=rolled)
        x.copy_(rolled)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up."""
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) * up."""
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def keep_top_k(self, logits: torch.Tensor, k: torch.Tensor, largest_k: int) -> None:
        """Set the logits below each row's k-th largest one to -inf, in place."""
        if logits.device.type != "cpu":
            return super().keep_top_k(logits, k, largest_k)
        values = largest(logits, largest_k)
        smallest = values.gather(1, (k - 1).clamp(0, largest_k - 1))
        return mask_below(logits, smallest, (k < 1) | (k >= logits.shape[1]), values[:, :1])

    def keep_top_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set the logits below each row's nucleus to -inf, in place, without sorting rows."""
        if logits.device.type != "cpu":
            return super().keep_top_p(logits, p)
        best = logits.amax(-1, keepdim=True)
        smallest = torch.empty_like(best)
        step = max(1, _CHUNK // logits.shape[1])
        for start in range(0, len(logits), step):
            part = slice(start, start + step)
            smallest[part] = _smallest_of_nuclei(logits[part], best[part], p[part])
        return mask_below(logits, smallest, p >= 1, best)

    def keep_min_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set logits below each row's largest one + log(p) to -inf, in place."""
        if logits.device.type != "cpu":
            return super().keep_min_p(logits, p)
        best = logits.amax(-1, keepdim=True)
        return mask_below(logits, best + p.log(), p <= 0, best)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def _linear(
    packed: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    if packed.is_mkldnn:
        multiply = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: multiply(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, packed, bias)


def _can_pack(dtype: torch.dtype) -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")
    if not (torch.backends.mkldnn.enabled and all(hasattr(torch.ops.mkldnn, n) for n in names)):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _weights(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Return the weights of `Ops.keep_top_p`, int64."""
    return (logits - best).double().exp_().mul_(2.0**40).round_().long()


def _smallest_of_nuclei(logits: torch.Tensor, best: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return the smallest logit of each row's nucleus, float32 [rows, 1].

    Args:
        logits: on a CPU, float32 [rows, vocab].
        best: the largest, [rows, 1].
        p: the probability to reach, [rows, 1].
    """
    weights = _weights(logits, best)
    goal = ((p.double() - 1e-6) * weights.sum(-1, keepdim=True).double()).long()
    values = largest(logits, min(_FEW, logits.shape[1]))
    index = torch.searchsorted(_weights(values, best).cumsum(-1), goal)
    smallest = values.gather(1, index.clamp(max=values.shape[1] - 1))
    ends_later = (index == values.shape[1]) & best.isfinite() & (p < 1)
    for row in ends_later.flatten().nonzero().flatten().tolist():
        smallest[row] = _smallest_of_nucleus(
            logits[row], weights[row], float(best[row]), int(goal[row])
        )
    return smallest


def _smallest_of_nucleus(
    logits: torch.Tensor, weights: torch.Tensor, best: float, goal: int
) -> float:
    """Return the largest logit at which the weights of all at least as large reach `goal`.

    Args:
        logits: on a CPU, float32 [vocab].
        weights: weight of each logit, int64.
        best: the largest logit.
        goal: above 0, and at most the sum of all weights.
    """
    distance = np.minimum(best - logits.numpy(), _RANGE)
    distance *= _BUCKETS
    buckets = distance.astype(np.int64)
    sums = torch.zeros(int(_RANGE * _BUCKETS) + 1, dtype=torch.int64)
    sums.scatter_add_(0, torch.from_numpy(buckets), weights)
    reached = sums.numpy().cumsum()
    end = int(np.searchsorted(reached, goal))
    inside = buckets == end
    values, near = logits.numpy()[inside], weights.numpy()[inside]
    order = np.argsort(-values)
    before = reached[end - 1] if end else 0
    index = np.searchsorted(near[order].cumsum(), goal - before)
    return float(values[order[index]])


def mask_below(
    logits: torch.Tensor, threshold: torch.Tensor, is_off: torch.Tensor, best: torch.Tensor
) -> None:
    """Set the logits below each row's threshold to -inf, in place.

    Args:
        logits: on a CPU, float32 [rows, vocab].
        threshold: float32 [rows, 1]; logits equal to it are kept.
        is_off: bool [rows, 1]; rows to leave as they are.
        best: the largest logits, [rows, 1]; a row in which that is not finite is left as it is.
    """
    # Comparing and masking take three passes, two of them slow; torch.threshold_ takes one, but
    # has one bound for all rows and masks equal values. So: row by row, with the next smaller
    # float as the bound.
    threshold = threshold.masked_fill(is_off | ~best.isfinite(), -math.inf)
    bounds = threshold.nextafter(threshold.new_tensor(-math.inf)).flatten().tolist()
    for row, bound in zip(logits.unbind(), bounds, strict=True):
        if bound > -math.inf:
            torch.threshold_(row, bound, -math.inf)


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
