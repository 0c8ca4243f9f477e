"""Operations in this package's Triton kernels for GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from hardpoint import plugins
from hardpoint.builtin_plugins.gpu import load_kernels
from hardpoint.plugins import ClampedSwiGLU, Op, OpsContext
from hardpoint.plugins.quantization import AffineCodes

from .cuda_graphs import CudaGraphs, RepeatedRun, decode_sizes
from .torch import TorchOps

if TYPE_CHECKING:
    from hardpoint.plugins.model.ops import Recorded


class TritonOps(TorchOps):
    """Operations in Triton; products of numbers run in torch's libraries, unless options differ.

    Products multiply the same numbers for any number of rows, but may add them up in another order,
    by which a row's result differs in its last bits; nothing else depends on the other rows. In
    this package's kernels that order is the same for 2 to 16 rows.

    There is no `layout`: a GPU packs as fast as files are read, and numbers are packed as they are,
    so that the weight cache would hold a second copy of the files.
    """

    contract = 1
    devices = ("cpu", "cuda")
    replayable = True

    class Options(plugins.Options):
        """Options, in `[plugin."ops/triton"]`.

        Attributes:
            few_row_products: which products of 1 to 16 rows with unquantized weights run in this
                package's kernels: "measured", those that were faster than torch's library on a GPU
                of the same name; "always"; or "never".
        """

        few_row_products: Literal["measured", "always", "never"] = "measured"

    options: Options

    def __init__(self, context: OpsContext) -> None:
        """Load the kernels.

        Raises:
            ModelError: they cannot run here, or there are none for the dtype.
        """
        super().__init__(context)
        self._is_interpreted = load_kernels(context, "ops.use")
        from hardpoint.kernels.triton import (  # noqa: PLC0415 - needs triton
            code_experts,
            codes,
            experts,
            layers,
            logits,
            lora,
            measured_products,
            products,
        )

        self._codes, self._experts, self._layers, self._lora = codes, experts, layers, lora
        self._code_experts = code_experts
        self._logits = logits
        self._products, self._measured = products, measured_products
        self._graphs = CudaGraphs(context.device)
        is_cuda = context.device.type == "cuda"
        self._gpu = torch.cuda.get_device_name(context.device) if is_cuda else ""

    def describe(self) -> str:
        """Return the name, and whether kernels are interpreted."""
        if not self._is_interpreted:
            return self.name
        return f"{self.name} (interpreted; CUDA graphs are replaced by repeating Python)"

    def record(self, run: Callable[[], torch.Tensor]) -> Recorded:
        """Record a CUDA graph, or a replacement for interpreted kernels."""
        return RepeatedRun(run) if self._is_interpreted else self._graphs.record(run)

    def record_sizes(self, max_num_seqs: int) -> Sequence[int]:
        """Return 1, 2, 4, multiples of 8 up to 256, and `max_num_seqs` if it is less."""
        return decode_sizes(max_num_seqs)

    @property
    def code_bits(self) -> tuple[int, ...]:
        """All that `AffineCodes` may have."""
        return 4, 5, 6, 8

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W itself, contiguous."""
        return weight.contiguous()

    def pack_codes(self, parts: Sequence[AffineCodes]) -> torch.Tensor:
        """Return a copy of the codes, as few bits as they are.

        Raises:
            ValueError: there are no columns.
        """
        return self._codes.pack(parts, self.context.device)

    def embedding(
        self, packed: torch.Tensor, shape: tuple[int, int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return ids -> rows, of packed codes.

        Raises:
            ValueError: packed codes have another shape, or their header is damaged.
        """
        if packed.dtype != torch.uint8:
            return None
        return self._codes.gather_codes(packed, shape, self.context.dtype)

    def linear(
        self,
        packed: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return x -> x W^T + b.

        Raises:
            ValueError: packed codes have another shape, or their header is damaged.
        """
        out_dtype = out_dtype or self.context.dtype
        if packed.dtype == torch.uint8:
            return self._codes.linear_codes(packed, shape, bias, out_dtype)
        multiply = super().linear(packed, shape, bias, out_dtype=out_dtype)
        counts = self._few_row_counts(packed, shape)
        if not counts:
            return multiply
        multiply_few = self._products.FewRowProduct(packed, bias, out_dtype)
        return lambda x: multiply_few(x) if len(x) in counts else multiply(x)

    def _few_row_counts(self, packed: torch.Tensor, shape: tuple[int, int]) -> frozenset[int]:
        """Return the numbers of rows of x that this package's kernels multiply."""
        choice = self.options.few_row_products
        if choice == "never" or packed.stride(1) != 1 or not packed.numel():
            return frozenset()
        counts = range(1, self._products.MAX_ROWS + 1)
        if choice == "always":
            return frozenset(counts)
        is_faster, dtype = self._measured.is_faster, packed.dtype
        return frozenset(n for n in counts if is_faster(self._gpu, n, shape, dtype))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the normalized rows."""
        return self._layers.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add delta to x in place; return the normalized rows."""
        return self._layers.add_rms_norm(x, delta, weight, eps)

    def rotate(self, x: torch.Tensor, angles: torch.Tensor) -> None:
        """Rotate heads in place."""
        self._layers.rotate(x, angles)

    def scale(self, x: torch.Tensor, factor: float) -> None:
        """Multiply x by a number, in place."""
        self._layers.scale(x, factor)

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> None:
        """Add delta to x in place."""
        self._layers.add(x, delta)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up."""
        return self._layers.silu_and_mul(x)

    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) * up."""
        return self._layers.gelu_and_mul(x)

    def experts(
        self,
        gate_up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        shape: tuple[int, int],
        *,
        biases: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
        clamped: ClampedSwiGLU | None = None,
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return (x, chosen, weights) -> the weighted sum of experts.

        Raises:
            ValueError: packed codes have another shape, or their header is damaged.
        """
        are_codes = {matrix.dtype == torch.uint8 for matrix in (*gate_up, *down)}
        run = None
        if are_codes == {True}:
            activate = silu_and_mul = self._layers.silu_and_mul
            if clamped is not None:
                activate = functools.partial(clamped.apply, silu_and_mul=silu_and_mul)
            run = self._code_experts.code_experts(gate_up, down, shape, activate, biases)
        elif are_codes == {False}:
            limits = None if clamped is None else (clamped.alpha, clamped.limit)
            run = self._experts.ExpertSum(gate_up, down, shape, biases, limits)
        # One after the other, if they differ.
        return run or super().experts(gate_up, down, shape, biases=biases, clamped=clamped)

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        adapters: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Add the products of low-rank adapters to y, in place."""
        self._lora.add_lora(y, x, a, b, adapters, scales)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each row's most likely token."""
        return self._logits.argmax(_with_contiguous_rows(logits))

    def draw(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        greedy: torch.Tensor,
    ) -> torch.Tensor:
        """Return a token of each row, drawn with the probabilities of its logits."""
        return self._logits.draw(_with_contiguous_rows(logits), seeds, positions, greedy)

    def keep_tokens(self, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Set the logits of some rows to -inf, in place, but for the tokens of a bitmask."""
        masks = _with_contiguous_rows(bitmask)
        _change(logits, lambda lines: self._logits.keep_tokens(lines, rows, masks))

    def edit(
        self,
        logits: torch.Tensor,
        op: Op,
        places: torch.Tensor,
        values: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Edit the logits of some tokens in place."""
        if op is Op.KEEP_ONLY:
            _change(logits, lambda lines: self._logits.put_only(lines, places, rows))
        else:
            add = op is Op.ADD
            _change(logits, lambda lines: self._logits.put(lines, places, values, add=add))

    def divide(self, logits: torch.Tensor, divisors: torch.Tensor) -> None:
        """Divide each row by its number, in place."""
        _change(logits, lambda lines: self._logits.divide(lines, divisors))

    def keep_top_k(self, logits: torch.Tensor, k: torch.Tensor, largest_k: int) -> None:  # noqa: ARG002
        """Set the logits below each row's k-th largest one to -inf, in place."""
        _change(logits, lambda lines: self._logits.keep_top_k(lines, k))

    def keep_top_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set the logits below each row's nucleus to -inf, in place."""
        _change(logits, lambda lines: self._logits.keep_top_p(lines, p))

    def keep_min_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set logits below each row's largest one + log(p) to -inf, in place."""
        _change(logits, lambda lines: self._logits.keep_min_p(lines, p))


def _with_contiguous_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix, or a copy: a processor may return logits that lie in memory in any way."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _change(logits: torch.Tensor, change: Callable[[torch.Tensor], None]) -> None:
    lines = _with_contiguous_rows(logits)
    change(lines)
    if lines is not logits:
        logits.copy_(lines)
