"""Operations of models and samplers between the large ones, on one device."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Protocol

from .component import Component, Context
from .quantization import AffineCodes

if TYPE_CHECKING:
    import torch

__all__ = ["Op", "Ops", "OpsContext", "Recorded"]

# Multipliers of splitmix64 (Steele, Lea, Flood, OOPSLA 2014) and of lowbias32 (Wellons, "hash
# prospector"), as the signed numbers that torch's integers hold.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_64 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_MIX_32 = (0x7FEB352D, 0x846CA68B - 2**32)

# Scales (whole number + 0.5) to (0, 1 - 2**-24]: float32 would round the largest ones up to 1.
_TO_UNIT = 2.0**-31 * (1 - 2.0**-24)

_MAX_LISTED = 4096
"""With more unmasked tokens per row than this, listing them costs more than it saves."""

_CHUNK = 2**19
"""Number of logits whose noise is computed at a time on a CPU, so that it stays in its cache."""


@dataclass(frozen=True, kw_only=True)
class OpsContext(Context["Ops"]):
    """Context of operations.

    Attributes:
        device: of the tensors.
        dtype: of weights and hidden states.
    """

    device: torch.device
    dtype: torch.dtype


class Recorded(Protocol):
    """Operations that were recorded; called, it repeats them and returns their result.

    Attributes:
        num_bytes: of the tensors that it keeps.
    """

    num_bytes: int

    def __call__(self) -> torch.Tensor:
        """Repeat the operations; return the tensor with the result, always the same one."""


class Op(Enum):
    """Effect of an edit on its logit."""

    ADD = "add"
    """Add the value. A token at -inf stays there. Values for one token are summed first."""
    SET = "set"
    """Replace by the value; of several for one token, by the last."""
    KEEP_ONLY = "keep_only"
    """Set all other tokens of the row to -inf; values are unused. A kept token keeps its logit,
    also -inf."""


class Ops(Component):
    """The operations of models besides attention, and of samplers. One per device.

    Those on logits, `experts`, `add_lora`, `scale` and `add` have an implementation in torch here,
    which says what is right; write those that you can make faster.

    Tensors have the context's dtype and device unless said otherwise. The last dimension is
    contiguous; rows may be parts of wider ones. A row's result must not depend on the other rows.
    Sums are of float32 at least, and results are rounded once. On a CPU they compute in as many
    threads as `torch.get_num_threads()` says, which may change between steps.

    A constructor raises ModelError if the operations cannot run here, so that `backend = "auto"`
    tries the next ones.
    """

    devices: ClassVar[tuple[str, ...]]
    """Device types that they run on."""

    context: OpsContext

    def describe(self) -> str:
        """Return what runs, for the line that the engine logs: "native_cpu (avx2)" for example.

        By default the name, and why the engine does not use the one that it prefers.
        """
        reason = self.context.reason
        return f"{self.name} ({reason})" if reason else self.name

    @property
    def replayable(self) -> bool:
        """Whether `record` works. It holds for the class that says so, not for those derived."""
        return False

    def record(self, run: Callable[[], torch.Tensor]) -> Recorded | None:  # noqa: ARG002
        """Call `run` and return what repeats its operations; None if that is not possible.

        The operations of `run` are those of this object, of an attention backend and views. They
        are repeated on the same tensors, whose elements may have changed: those that `run` read.
        With `record_sizes`, `run` may be called more than once, for its step is of padding alone;
        an error is logged, and no more steps are recorded.
        """
        return None

    def record_sizes(self, max_num_seqs: int) -> Sequence[int]:  # noqa: ARG002
        """Return the numbers of sequences of which decode steps are recorded, ascending.

        Empty, the default: what `record` returns serves every step with as many tokens, whatever
        their sequences. With sizes, it serves steps with one token per sequence alone, which are
        padded to the next size (`AttentionStep`): a recording has the numbers that its kernels were
        started with, as CUDA graphs do.

        Args:
            max_num_seqs: the most that a step has.
        """
        return ()

    @property
    def code_bits(self) -> tuple[int, ...]:
        """Bits of the codes that `pack_codes` keeps as codes; none by default."""
        return ()

    @property
    def layout(self) -> str:
        """Name of the layout of packed matrices; it differs where their bytes may differ.

        With a name, what `pack` returns may be written to a file, and `linear` may get it back
        in another process, from memory that cannot be written to. Empty, the default: it is not
        kept.
        """
        return ""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W in the layout that `linear` takes; by default W itself.

        Called once per matrix while weights are loaded. The caller may free `weight` afterwards.
        With a `layout`, the result is a contiguous tensor.
        """
        return weight

    def pack_codes(self, parts: Sequence[AffineCodes]) -> torch.Tensor:
        """Return W, some matrices stacked by rows, in the layout that `linear` takes.

        It stays as small as its codes where this object has a kernel for them (`code_bits`). By
        default it is dequantised, rounded to the context's dtype, and packed.

        Args:
            parts: on the CPU; they have as many columns, and may differ in everything else.
        """
        import torch  # noqa: PLC0415 - the contract is imported without it

        weight = torch.cat([part.dequantize() for part in parts])
        return self.pack(weight.to(self.context.device, self.context.dtype))

    def embedding(
        self,
        packed: torch.Tensor,  # noqa: ARG002
        shape: tuple[int, int],  # noqa: ARG002
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the function ids -> rows of W, [ids, columns of W].

        None, the default: rows of packed matrices cannot be read, so that an embedding keeps a
        table of numbers.

        Args:
            packed: what `pack_codes` returned for W.
            shape: rows and columns of W.
        """
        return None

    @abstractmethod
    def linear(
        self,
        packed: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function x [rows, columns of W] -> x W^T + b [rows, rows of W].

        Called once per matrix. The function may keep `packed` and `bias`, which stay as they are.

        Args:
            packed: what `pack` or `pack_codes` returned for W.
            shape: rows and columns of W.
            bias: b, [rows of W].
            out_dtype: of the results, which may have been rounded to the context's before; None
                is the context's.
        """

    @abstractmethod
    def gather_rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return table[ids], [ids, columns]. The table may be of another dtype; ids are int64."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467).

        The weight may be float32 with x of another dtype.
        """

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add delta to x in place, both [rows, size], and return `rms_norm` of the sum."""

    @abstractmethod
    def rotate(self, x: torch.Tensor, angles: torch.Tensor) -> None:
        """Rotate heads in place (RoPE, arXiv:2104.09864).

        The halves a and b of a head become a cos - b sin and b cos + a sin.

        Args:
            x: [rows, heads, head_size]; the heads may be parts of wider ones.
            angles: float32 [rows, head_size]; of each row, cosines, then sines.
        """

    def scale(self, x: torch.Tensor, factor: float) -> None:
        """Multiply x [rows, size] by a number, in place."""
        x.mul_(factor)

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> None:
        """Add delta to x in place, both [rows, size]."""
        x.add_(delta)

    @abstractmethod
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [rows, size] for x [rows, 2 * size], gate before up."""

    @abstractmethod
    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """As `silu_and_mul`, with GELU in its tanh form (arXiv:1606.08415)."""

    def experts(
        self,
        gate_up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        shape: tuple[int, int],
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the function (x, chosen, weights) -> the weighted sum of experts, as x.

        Expert e computes down[e] `silu_and_mul`(gate_up[e] x), rounded as `linear` and that are,
        but for its own result: those of a row are summed in float32, times their weights, from the
        lowest expert to the highest, and rounded once. Rows are computed together by expert, so
        that each matrix is read once. Called once per layer.

        The function's arguments are x [rows, hidden]; int64 [rows, k], the experts of each row, all
        different, where a number that is not in 0..experts - 1 stands for none; and their weights,
        float32 [rows, k]. A row without an expert gives 0.

        Args:
            gate_up: of each expert, what `pack` returned for [2 * width, hidden], gate before up.
            down: the same for [hidden, width].
            shape: (hidden, width).
        """
        import torch  # noqa: PLC0415 - the contract is imported without it

        hidden, width = shape
        enter = [self.linear(packed, (2 * width, hidden)) for packed in gate_up]
        leave = [self.linear(packed, shape, out_dtype=torch.float32) for packed in down]

        def run(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            for expert in torch.unique(chosen).tolist():
                if not 0 <= expert < len(enter):
                    continue
                rows, places = (chosen == expert).nonzero(as_tuple=True)
                result = leave[expert](self.silu_and_mul(enter[expert](x[rows])))
                total[rows] += result * weights[rows, places].unsqueeze(1)
            return total.to(x.dtype)

        return run

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        adapters: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Add what low-rank adapters change to y, in place (LoRA, arXiv:2106.09685).

        A row of adapter i gets scales[i] * (x a[i]^T) b[i]^T, of which x a[i]^T is not rounded to
        the context's dtype. Rows of a number that is not in 0..count - 1 have no adapter, and stay
        as they are.

        Args:
            y: [rows, out], x W^T for example.
            x: [rows, in].
            a: [count, rank, in]; an adapter of a lower rank is filled up with zeros.
            b: [count, out, rank].
            adapters: int64 [rows].
            scales: float32 [count].
        """
        import torch  # noqa: PLC0415 - the contract is imported without it

        # On a device, finding out which there are would make the host wait.
        for number in torch.unique(adapters).tolist() if y.device.type == "cpu" else range(len(a)):
            if 0 <= number < len(a):
                inner = x.float() @ a[number].float().T
                total = y + scales[number] * (inner @ b[number].float().T)
                y.copy_(total.where((adapters == number).unsqueeze(1), y))

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each row's most likely token, int64 [rows]; of equals, the lowest id.

        NaN is larger than any number, as in torch.

        Args:
            logits: float32 [rows, vocab], as for the methods below.
        """
        return logits.argmax(-1)

    def keep_tokens(self, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Set the logits of some rows to -inf, in place, but for the tokens of a bitmask.

        Args:
            logits: to change.
            rows: int64 [n], each once.
            bitmask: int32 [n, ceil(vocab / 32)]; token t stays where bit t % 32 of column t // 32
                is set.
        """
        import torch  # noqa: PLC0415 - the contract is imported without it

        vocab = logits.shape[1]
        if logits.device.type != "cpu":
            # Reading the rows' numbers would make the host wait for the device.
            places = torch.arange(8, dtype=torch.uint8, device=bitmask.device)
            bits = (bitmask.contiguous().view(torch.uint8).unsqueeze(-1) >> places) & 1
            masked = bits.flatten(1)[:, :vocab] == 0
            part = logits.index_select(0, rows).masked_fill_(masked, -math.inf)
            logits.index_copy_(0, rows, part)
            return
        places = torch.arange(32, dtype=torch.int32, device=bitmask.device)
        for row, columns in zip(rows.tolist(), bitmask, strict=True):  # one by one: 32 bytes a word
            bits = ((columns.unsqueeze(1) >> places) & 1).flatten()[:vocab]
            logits[row].masked_fill_(bits == 0, -math.inf)

    def edit(
        self,
        logits: torch.Tensor,
        op: Op,
        places: torch.Tensor,
        values: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Edit the logits of some tokens in place, as `Op` says.

        Args:
            logits: to change.
            op: what is done with each of the tokens.
            places: int64 [n], row * vocab + token; each once.
            values: float32 [n], to add or to set; of no use to KEEP_ONLY.
            rows: int64, the rows of the places, each once; of use to KEEP_ONLY alone.
        """
        if op is Op.KEEP_ONLY:
            assert rows is not None
            kept = logits.take(places)
            if len(rows) == len(logits):
                logits.fill_(-math.inf)
            else:
                logits.index_fill_(0, rows, -math.inf)
            logits.put_(places, kept)
        else:
            assert values is not None
            logits.put_(places, values, accumulate=op is Op.ADD)

    def divide(self, logits: torch.Tensor, divisors: torch.Tensor) -> None:
        """Divide each row by its number, in place; rounded as IEEE 754 says.

        Args:
            logits: to change.
            divisors: float32 [rows, 1].
        """
        logits.div_(divisors)

    def keep_top_k(self, logits: torch.Tensor, k: torch.Tensor, largest_k: int) -> None:
        """Set the logits below each row's k-th largest one to -inf, in place.

        A row whose largest logit is not finite stays as it is.

        Args:
            logits: to change.
            k: int64 [rows, 1]; a row with another number than 1 to vocab - 1 stays as it is.
            largest_k: the largest k of those from 1 to vocab - 1.
        """
        values = logits.topk(largest_k).values
        smallest = values.gather(1, (k - 1).clamp(0, largest_k - 1))
        _mask_below(logits, values, smallest, (k < 1) | (k >= logits.shape[1]))

    def keep_top_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set the logits below each row's nucleus to -inf, in place (arXiv:1904.09751).

        The nucleus is the smallest set of most likely tokens whose probability reaches p - 1e-6,
        and all that equal the last of them. Probabilities are summed as whole numbers, which
        depend on no order: round(exp(logit - largest) * 2^40). A row whose largest logit is not
        finite stays as it is.

        Args:
            logits: to change.
            p: float32 [rows, 1]; a row with 1 or more stays as it is.
        """
        values = logits.sort(descending=True).values
        weights = (values - values[:, :1]).double().exp_().mul_(2.0**40).round_().long()
        reached = weights.cumsum(-1)
        goal = ((p.double() - 1e-6) * reached[:, -1:].double()).long()
        index = (reached < goal).sum(-1, keepdim=True).clamp_(max=values.shape[1] - 1)
        _mask_below(logits, values, values.gather(1, index), p >= 1)

    def keep_min_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set logits below each row's largest one + log(p) to -inf, in place (arXiv:2407.01082).

        A row whose largest logit is not finite stays as it is.

        Args:
            logits: to change.
            p: float32 [rows, 1]; a row with 0 stays as it is.
        """
        best = logits.amax(-1, keepdim=True)
        _mask_below(logits, best, best + p.log(), p <= 0)

    def draw(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        greedy: torch.Tensor,
    ) -> torch.Tensor:
        """Return a token of each row, int64 [rows], drawn with the probabilities of its logits.

        Tokens run an exponential race: the one with the largest logit - log(E) wins, where E =
        -log(1 - u) is an exponential variate (the Gumbel-max trick, arXiv:1411.0030). u = (bits +
        0.5) / 2^31, where bits is a hash of seed, position and token id. Scores are float64, so
        that implementations draw the same tokens, except where two scores are as close as its
        rounding errors.

        Greedy rows, and those whose largest logit is not finite, get what `argmax` returns.

        Args:
            logits: left as they are.
            seeds: int64 [rows].
            positions: int64 [rows]; output position of the token to draw.
            greedy: bool [rows].
        """
        import torch  # noqa: PLC0415 - the contract is imported without it

        tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        if logits.device.type != "cpu":
            # Selecting rows or tokens would make the host wait for the device.
            return _race(logits, tokens, seeds, positions, greedy)
        random = (~greedy).nonzero().squeeze(1)
        if len(random) < len(logits):
            chosen = logits.argmax(-1)
            if len(random):
                some = (x[random] for x in (logits, seeds, positions, greedy))
                chosen[random] = Ops.draw(self, *some)
            return chosen
        unmasked = logits != -math.inf
        if int(torch.count_nonzero(unmasked)) <= _MAX_LISTED * len(logits):
            values, listed = _listed(logits, unmasked)
            winner = _race(values, listed, seeds, positions, greedy)
            return listed.gather(1, winner.unsqueeze(1)).squeeze(1).long()
        step = max(1, _CHUNK // logits.shape[1])
        parts = [slice(start, start + step) for start in range(0, len(logits), step)]
        return torch.cat(
            [_race(logits[p], tokens, seeds[p], positions[p], greedy[p]) for p in parts]
        )


def _mask_below(
    logits: torch.Tensor, best: torch.Tensor, threshold: torch.Tensor, is_off: torch.Tensor
) -> None:
    """Set logits below each row's threshold to -inf, in place; `best[:, :1]` are the largest."""
    threshold = threshold.masked_fill(is_off | ~best[:, :1].isfinite(), -math.inf)
    logits.masked_fill_(logits < threshold, -math.inf)


def _listed(logits: torch.Tensor, unmasked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unmasked logits of each row and their tokens, [rows, most of them in a row].

    Tokens are ascending; shorter rows end with -inf and token 0.
    """
    counts = unmasked.sum(-1)
    row, token = unmasked.nonzero(as_tuple=True)
    column = unmasked.new_ones(len(row)).cumsum(0) - 1 - (counts.cumsum(0) - counts)[row]
    shape = len(logits), max(int(counts.max()), 1)
    values = logits.new_full(shape, -math.inf)
    values[row, column] = logits[row, token]
    tokens = row.new_zeros(shape).int()
    tokens[row, column] = token.int()
    return values, tokens


def _race(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor,
) -> torch.Tensor:
    """Return the column of each row's winner, int64 [rows]; `tokens` are those of the columns."""
    key = _mix_64(_mix_64(seeds) + positions)
    bits = _noise(tokens, key.int(), (key >> 32).int())
    best = logits.amax(-1, keepdim=True)
    best.masked_fill_(~best.isfinite(), 0)
    # float32 finds the two best, and float64 decides between them.
    unit = bits.float()
    unit += 0.5
    unit *= -_TO_UNIT
    scores = unit.log1p_().neg_().log_().masked_fill_(greedy[:, None], 0).neg_()
    scores += logits - best
    first = scores.argmax(-1, keepdim=True)
    second = scores.scatter_(1, first, -math.inf).argmax(-1, keepdim=True)
    pair = first.minimum(second), first.maximum(second)
    low, high = (
        _score(logits.gather(1, index), best, bits.gather(1, index), greedy) for index in pair
    )
    is_high = (high > low) | (high.isnan() & ~low.isnan())
    return pair[1].where(is_high, pair[0]).squeeze(1)


def _score(
    logits: torch.Tensor, best: torch.Tensor, bits: torch.Tensor, greedy: torch.Tensor
) -> torch.Tensor:
    """Return the tokens' scores in the race, float64 [rows, 1]."""
    noise = (-(bits.double() + 0.5) * 2.0**-31).log1p_().neg_().log_()
    return (logits.double() - best) - noise.masked_fill_(greedy[:, None], 0)


def _noise(tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return hashes of 31 bits, int32 [rows, columns].

    Args:
        tokens: int32 [columns] or [rows, columns].
        low, high: the halves of the rows' keys, int32 [rows].
    """
    bits = _mix_32(tokens ^ 0x5BD1E995) ^ low[:, None]
    bits *= _MIX_32[0]
    bits ^= _shift(bits, 15)
    bits ^= high[:, None]
    bits *= _MIX_32[1]
    bits ^= _shift(bits, 16)
    bits &= 0x7FFFFFFF
    return bits


def _mix_64(value: torch.Tensor) -> torch.Tensor:
    """Return splitmix64 of int64 values; products wrap."""
    value = value + _GOLDEN
    value = (value ^ _shift(value, 30)) * _MIX_64[0]
    value = (value ^ _shift(value, 27)) * _MIX_64[1]
    return value ^ _shift(value, 31)


def _mix_32(value: torch.Tensor) -> torch.Tensor:
    """Return lowbias32 of int32 values; products wrap."""
    value = (value ^ _shift(value, 16)) * _MIX_32[0]
    value = (value ^ _shift(value, 15)) * _MIX_32[1]
    return value ^ _shift(value, 16)


def _shift(value: torch.Tensor, places: int) -> torch.Tensor:
    """Return a logical right shift; torch's own shift copies the sign."""
    width = 8 * value.element_size()
    return (value >> places) & ((1 << (width - places)) - 1)
