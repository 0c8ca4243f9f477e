"""Operations of models besides attention, on one device."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from hardpoint.errors import ModelError
from hardpoint.plugins.component.base import Component, Context

from .logits_ops import LogitsOps
from .matrices import AffineCodes

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.process.device import HostCopy

__all__ = ["ClampedSwiGLU", "Ops", "OpsContext"]


@dataclass(frozen=True, kw_only=True)
class OpsContext(Context["Ops"]):
    """Context of operations.

    Attributes:
        device: device of the tensors.
        dtype: dtype of weights and hidden states.
        activations: `quantization.activations`, see `Ops.activations`.
    """

    device: torch.device
    dtype: torch.dtype
    activations: str = "none"


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The activation of gpt-oss's experts: gate * sigmoid(alpha * gate) * (up + 1), both clamped.

    The gate is at most `limit`, up from -limit to limit.

    Attributes:
        alpha: factor within the sigmoid.
        limit: limit of both.
    """

    alpha: float
    limit: float

    def apply(
        self, x: torch.Tensor, silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the activation [rows, size] of x [rows, 2 * size], gate before up.

        It is silu(alpha * gate) * ((up + 1) / alpha).

        Args:
            x: is changed.
            silu_and_mul: `Ops.silu_and_mul`.
        """
        gate, up = x.chunk(2, -1)
        gate.clamp_(max=self.limit).mul_(self.alpha)
        up.clamp_(-self.limit, self.limit).add_(1.0).div_(self.alpha)
        return silu_and_mul(x)


class Recorded(Protocol):
    """Operations that were recorded; called, it repeats them and returns their result.

    Attributes:
        num_bytes: bytes of the tensors that it keeps.
    """

    num_bytes: int

    def __call__(self) -> torch.Tensor:
        """Repeat the operations; return the tensor with the result, always the same one."""


class Ops(Component, LogitsOps):
    """The operations of models besides attention, and operations on logits. One per device.

    `attend_within`, `experts`, `add_lora`, `scale`, `add` and all of `LogitsOps` have an
    implementation in torch, which is the reference; write the ones that you can make faster.

    Tensors have the context's dtype and device unless stated otherwise. The last dimension is
    contiguous; rows may be parts of wider ones. A row's result must not depend on the other rows.
    Sums are of float32 at least, and results are rounded once. On a CPU they compute in as many
    threads as `torch.get_num_threads()` returns, which may change between steps.

    A constructor raises ModelError if the operations cannot run here, so that `backend = "auto"`
    tries the next ones.
    """

    devices: ClassVar[tuple[str, ...]]
    """Device types that they run on."""
    activations: ClassVar[tuple[str, ...]] = ("none",)
    """Supported values of `quantization.activations`; others raise ModelError.

    "none" multiplies the elements of x as they are. "int8" and "int16" round them in `linear`, for
    parts of `pack_codes` with consecutive values (`AffineCodes.values`), in blocks of 32
    columns:

    * limit = 2047 for parts of 8 bits. For others it is 127 with "int8"; with "int16" it is 32767
      for 4 bits, 16383 for 5 and 8191 for 6.
    * scale = (largest magnitude of the block, in float32) / limit. A block with a largest magnitude
      below 2^-100 has scale 0; one with a number that is not finite has scale NaN.
    * The integers are element * (limit / largest magnitude), with a float32 quotient and an exact
      product, rounded to the nearest, ties to even.
    * Each element counts as integer * scale, also in products with offsets. Sums of integers are
      exact.
    """

    context: OpsContext

    def __init__(self, context: OpsContext) -> None:
        """Store the context.

        Raises:
            ModelError: the class does not support the context's `activations`.
        """
        super().__init__(context)
        if context.activations not in self.activations:
            raise ModelError(
                f"quantization.activations: the operations {context.name!r} support "
                f"{', '.join(map(repr, self.activations))}, got {context.activations!r}; "
                f'ops.use = "native_cpu" supports it on a CPU'
            )

    def describe(self) -> str:
        """Return the text that the engine logs for it: "native_cpu (avx2)" for example.

        By default the name, and the reason why the engine does not use the preferred operations.
        """
        reason = self.context.reason
        return f"{self.name} ({reason})" if reason else self.name

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Begin a copy of int64 and float32 tensors to the host; return it without a wait.

        By default in pinned memory, with an event of the current CUDA stream.
        """
        from hardpoint.plugins.process.device import HostCopy  # noqa: PLC0415  # loads torch

        return HostCopy(tensors)

    @property
    def replayable(self) -> bool:
        """Whether `record` works; this holds for the declaring class, not for its subclasses."""
        return False

    def record(self, run: Callable[[], torch.Tensor]) -> Recorded | None:  # noqa: ARG002
        """Call `run` and return a recording of its operations; None if that is not possible.

        `run` calls operations of this object, of an attention backend and views. They
        are repeated on the same tensors, possibly with other elements.
        With `record_sizes`, `run` may be called more than once, as its step is of padding alone;
        an error is logged, and no more steps are recorded.
        """
        return None

    def record_sizes(self, max_num_seqs: int) -> Sequence[int]:  # noqa: ARG002
        """Return the batch sizes for which decode steps are recorded, ascending.

        Empty, the default: a recording serves every step with as many tokens, for any
        sequences. With sizes, it serves steps with one token per sequence alone, which are
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

        With a name, the result of `pack` may be written to a file, and `linear` may get it
        in another process, from memory that cannot be written to. Empty, the default: it is not
        kept.
        """
        return ""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W in the layout that `linear` takes; by default W itself.

        Called once per matrix while weights are loaded, and before for one row, which shows whether
        packed matrices take memory of their own. The caller may free `weight` afterwards.
        With a `layout`, the result is a contiguous tensor.
        """
        return weight

    def pack_codes(self, parts: Sequence[AffineCodes]) -> torch.Tensor:
        """Return W, some matrices stacked by rows, in the layout that `linear` takes.

        It stays as small as its codes where this object has a kernel for them (`code_bits`). By
        default it is dequantized, rounded to the context's dtype, and packed.

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
            packed: result of `pack_codes` for W.
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
            packed: result of `pack` or `pack_codes` for W.
            shape: rows and columns of W.
            bias: b, [rows of W].
            out_dtype: dtype of the results, which may have been rounded to the context's; None
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

    def attend_within(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: Sequence[int],
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the bidirectional attention within each of several sequences, shaped as q.

        It is softmax(scale q k^T) v within each sequence; the results do not depend on
        each other.

        Args:
            q: [tokens, heads, head_size]; it may be a part of wider rows, as k and v may.
            k: like q.
            v: like q.
            starts: first token of each sequence, and the number of all tokens.
            scale: factor of the scores.
            window: largest distance of tokens that see each other; None is any.
        """
        import torch  # noqa: PLC0415 - the contract is imported without it

        result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v, result)]  # [1, heads, tokens,..]
        for first, end in itertools.pairwise(starts):
            queries, keys, values, attended = (x[:, :, first:end] for x in heads)
            mask = None
            if window is not None and end - first > window + 1:
                places = torch.arange(end - first, device=q.device)
                mask = (places - places.unsqueeze(1)).abs() <= window
            attended.copy_(
                torch.nn.functional.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=mask, scale=scale
                )
            )
        return result

    def experts(
        self,
        gate_up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        shape: tuple[int, int],
        *,
        biases: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
        clamped: ClampedSwiGLU | None = None,
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the function (x, chosen, weights) -> the weighted sum of experts, as x.

        Expert e computes down[e] `silu_and_mul`(gate_up[e] x), rounded like `linear` and
        `silu_and_mul`; the results of a row are summed in float32, times their weights, from the
        lowest expert to the highest, and rounded once. Rows are computed together by expert, so
        that each matrix is read once. Called once per layer.

        `biases` and `clamped` are passed to models that have them alone; an `experts` of a class
        that does not take them is rejected together with these.

        The function's arguments are x [rows, hidden]; int64 [rows, k], the experts of each row, all
        different, where a number that is not in 0..experts - 1 stands for none; and their weights,
        float32 [rows, k]. A row without an expert gives 0.

        Args:
            gate_up: for each expert, result of `pack` for [2 * width, hidden], gate before up.
            down: the same for [hidden, width].
            shape: (hidden, width).
            biases: for each expert, terms added to gate_up[e] x, [2 * width], and to its result,
                [hidden]; None is without.
            clamped: takes the place of `silu_and_mul`.
        """
        import torch  # noqa: PLC0415 - the contract is imported without it

        hidden, width = shape
        none: Sequence[torch.Tensor | None] = [None] * len(gate_up)
        into, out_of = biases or (none, none)
        enter = [
            self.linear(packed, (2 * width, hidden), bias)
            for packed, bias in zip(gate_up, into, strict=True)
        ]
        leave = [
            self.linear(packed, shape, bias, out_dtype=torch.float32)
            for packed, bias in zip(down, out_of, strict=True)
        ]

        def activate(inner: torch.Tensor) -> torch.Tensor:
            silu_and_mul = self.silu_and_mul
            return silu_and_mul(inner) if clamped is None else clamped.apply(inner, silu_and_mul)

        def run(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            for expert in torch.unique(chosen).tolist():
                if not 0 <= expert < len(enter):
                    continue
                rows, places = (chosen == expert).nonzero(as_tuple=True)
                result = leave[expert](activate(enter[expert](x[rows])))
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
        """Add the products of low-rank adapters to y, in place (LoRA, arXiv:2106.09685).

        A row of adapter i gets scales[i] * (x a[i]^T) b[i]^T, with x a[i]^T not rounded to
        the context's dtype. Rows of a number that is not in 0..count - 1 have no adapter, and stay
        as they are. Ranks of zeros change no bits.

        Args:
            y: [rows, out], x W^T for example; may be float32.
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
