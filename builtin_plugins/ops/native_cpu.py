"""Operations in this package's C++ kernels for CPUs."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint.builtin_plugins.native import Results, check_rows, check_tensors, load_kernels
from hardpoint.kernels import cpu
from hardpoint.plugins import ClampedSwiGLU, Ops, OpsContext
from hardpoint.plugins.quantization import AffineCodes

_MEMORY = 1 << 23  # bytes of memory that are allocated at once
_ALIGNED = 64  # bytes of a line of memory
_LONG_WORK = 1 << 26  # multiplications of a product that is worth releasing Python's lock


class NativeOps(Ops):
    """Operations in C++; a row's result is the same, bit for bit, in any batch."""

    contract = 1
    devices = ("cpu",)
    activations = ("none", "int8", "int16")
    replayable = True

    def __init__(self, context: OpsContext) -> None:
        """Load the kernels.

        Raises:
            ModelError: they cannot run here, or there are none for the dtype.
        """
        super().__init__(context)
        library = self._library = load_kernels(context, "ops.use")
        dtype = self._dtype = context.dtype
        self._memory = _PackedMemory()
        self._results = Results(library)
        self._rms_norm = {
            torch.float32: library.function("rms_norm_float", dtype),
            dtype: library.function("rms_norm", dtype),
        }  # by the weight's dtype
        self._rotate = library.function("rotate", dtype)
        self._scale_add = library.function("scale_add", dtype)
        self._silu_and_mul = library.function("silu_and_mul", dtype)
        self._gelu_and_mul = library.function("gelu_and_mul", dtype)
        self._add_lora = {
            torch.float32: library.function("add_lora_float", dtype),
            dtype: library.function("add_lora", dtype),
        }  # by the dtype of y
        self._gather_rows = library.function("gather_rows", None)
        self._gather_codes = library.function("gather_codes", dtype)
        self._choose = library.function("choose", None)
        self._keep_top_k = library.function("keep_top_k", None)
        self._keep_top_p = library.function("keep_top_p", None)
        self._keep_near = library.function("keep_near", None)
        self._keep_tokens = library.function("keep_tokens", None)

    def describe(self) -> str:
        """Return the name and the instruction set."""
        return f"{self.name} ({self._library.path})"

    @property
    def code_bits(self) -> tuple[int, ...]:
        """All that `AffineCodes` may have."""
        return 4, 5, 6, 8

    @property
    def layout(self) -> str:
        """The kernels' build: any may have a layout of its own."""
        return self._library.build

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of W in blocks that fit the processor's registers."""
        library, dtype, (rows, columns) = self._library, self.context.dtype, weight.shape
        weight = weight.to(dtype).contiguous()
        packed = self._memory.allocate(library.function("packed_size", dtype)(rows, columns), dtype)
        pack = library.function("pack", dtype, releases=True)
        pack(weight.data_ptr(), packed.data_ptr(), rows, columns)
        return packed

    def pack_codes(self, parts: Sequence[AffineCodes]) -> torch.Tensor:
        """Return a copy of the codes, in blocks that fit the processor's registers.

        Raises:
            ValueError: there are no columns.
        """
        if not parts[0].shape[1]:
            raise ValueError(f"expected codes of at least 1 column, got {list(parts[0].shape)}")
        return cpu.pack_codes(
            self._library,
            [part.contiguous() for part in parts],
            lambda size: self._memory.allocate(size, torch.uint8),
        )

    def embedding(
        self, packed: torch.Tensor, shape: tuple[int, int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return ids -> rows, of packed codes.

        Raises:
            ValueError: packed codes have another shape, or their header is damaged.
        """
        if packed.dtype != torch.uint8:
            return None
        self._check_codes(packed, shape)

        def rows(ids: torch.Tensor) -> torch.Tensor:
            check_tensors(torch.int64, ids)
            out = self._results.empty((len(ids), shape[1]), self.context.dtype)
            self._library.run(
                self._gather_codes, packed.data_ptr(), ids.data_ptr(), len(ids), out.data_ptr()
            )
            return out

        return rows

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
            ValueError: a packed matrix of that shape has another size, dtype or header.
        """
        self._check_packed(packed, shape)
        dtype = self.context.dtype
        kernel = "linear" if out_dtype in (None, dtype) else "logits"
        if packed.dtype == torch.uint8:
            activations = self.context.activations
            kernel += "_codes" if activations == "none" else f"_{activations}"
        return _Product(
            self._library, self._results, packed, shape, bias, kernel, dtype, out_dtype or dtype
        )

    def _check_packed(self, packed: torch.Tensor, shape: tuple[int, int]) -> None:
        if packed.dtype == torch.uint8:
            return self._check_codes(packed, shape)
        size = self._library.function("packed_size", self.context.dtype)(*shape)
        if packed.dtype != self.context.dtype or packed.shape != (size,):
            raise ValueError(
                f"expected a packed matrix of {size} elements of {self.context.dtype}, "
                f"got {packed.dtype} {list(packed.shape)}"
            )

    def _check_codes(self, packed: torch.Tensor, shape: tuple[int, int]) -> None:
        """Check the header of packed codes, which kernels trust.

        Raises:
            ValueError: it has another shape, or contradicts itself or the size.
        """
        is_packed = packed.dim() == 1 and packed.is_contiguous()
        check = self._library.function("check_codes", None)
        if not is_packed or not check(packed.data_ptr(), packed.nbytes, *shape):
            raise ValueError(
                f"expected packed codes of a matrix {list(shape)}, got {packed.dtype} "
                f"{list(packed.shape)} with the header of something else"
            )

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
            ValueError: a packed matrix has another size, dtype or header.
        """
        are_codes = any(packed.dtype == torch.uint8 for packed in (*gate_up, *down))
        if are_codes or biases is not None or clamped is not None:
            # One after the other, which checks them.
            return super().experts(gate_up, down, shape, biases=biases, clamped=clamped)
        hidden, width = shape
        for enter, leave in zip(gate_up, down, strict=True):
            self._check_packed(enter, (2 * width, hidden))
            self._check_packed(leave, shape)
        return _Experts(self._library, self._results, gate_up, down, shape)

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        adapters: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Add the products of low-rank adapters to y, in place.

        Raises:
            ValueError: the shapes do not fit together, or rows are not contiguous.
        """
        (rows, columns), (count, rank, depth) = y.shape, a.shape
        check_tensors(self._dtype, x, a, b)
        check_tensors(torch.float32, scales)
        check_tensors(torch.int64, adapters)
        check_tensors(y.dtype, y)
        shapes = [list(tensor.shape) for tensor in (x, b, adapters, scales)]
        if shapes != [[rows, depth], [count, columns, rank], [rows], [count]]:
            raise ValueError(
                f"expected x, b, adapters and scales for y {[rows, columns]} and a "
                f"{[count, rank, depth]}, got {', '.join(map(str, shapes))}"
            )
        for tensor in (y, x, a, b, adapters, scales):
            check_rows(tensor)
        self._library.run(
            self._add_lora[y.dtype], y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0),
            a.data_ptr(), a.stride(0), a.stride(1), b.data_ptr(), b.stride(0), b.stride(1),
            adapters.data_ptr(), scales.data_ptr(), rows, count, rank, depth, columns,
        )  # fmt: skip

    def gather_rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        check_tensors(table.dtype, table)
        check_tensors(torch.int64, ids)
        out = self._results.empty((len(ids), table.shape[1]), table.dtype)
        self._library.run(
            self._gather_rows, table.data_ptr(), table.stride(0) * table.itemsize, ids.data_ptr(),
            len(ids), out.data_ptr(),
        )  # fmt: skip
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the normalized rows."""
        check_tensors(self._dtype, x)
        y = self._results.empty(x.shape, x.dtype)
        if x.dim() < 3:
            x = x.unsqueeze(0) if x.dim() == 1 else x
            (count, width), parts, part_stride = x.shape, 1, 0
        else:
            x = x.flatten(0, -3)
            rows, parts, width = x.shape
            count, part_stride = rows * parts, x.stride(1)
        self._library.run(
            self._rms_norm[weight.dtype], x.data_ptr(), x.stride(0), parts, part_stride, None, 0,
            weight.data_ptr(), y.data_ptr(), width, count, width, eps,
        )  # fmt: skip
        return y

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add delta to x in place; return the normalized rows."""
        check_tensors(self._dtype, x, delta)
        count, width = x.shape
        y = self._results.empty((count, width), x.dtype)
        self._library.run(
            self._rms_norm[weight.dtype], delta.data_ptr(), delta.stride(0), 1, 0, x.data_ptr(),
            x.stride(0), weight.data_ptr(), y.data_ptr(), width, count, width, eps,
        )  # fmt: skip
        return y

    def rotate(self, x: torch.Tensor, angles: torch.Tensor) -> None:
        """Rotate heads in place."""
        check_tensors(self._dtype, x)
        check_tensors(torch.float32, angles)
        rows, heads, size = x.shape
        self._library.run(
            self._rotate, x.data_ptr(), x.stride(0), x.stride(1), angles.data_ptr(), rows, heads,
            size,
        )  # fmt: skip

    def scale(self, x: torch.Tensor, factor: float) -> None:
        """Multiply x by a number, in place."""
        check_tensors(self._dtype, x)
        count, width = x.shape
        self._library.run(
            self._scale_add, x.data_ptr(), x.stride(0), float(factor), None, 0, count, width
        )

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> None:
        """Add delta to x in place."""
        check_tensors(self._dtype, x, delta)
        count, width = x.shape
        self._library.run(
            self._scale_add, x.data_ptr(), x.stride(0), 1.0, delta.data_ptr(), delta.stride(0),
            count, width,
        )  # fmt: skip

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up."""
        return self._gated(self._silu_and_mul, x)

    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) * up."""
        return self._gated(self._gelu_and_mul, x)

    def record(self, run: Callable[[], torch.Tensor]) -> RecordedCalls | None:
        """Run, and return a function that repeats the work, if kernels did all of it."""
        with self._library.record() as recording, _Tensors() as tensors:
            result = run()
        if tensors.foreign:
            return None
        return RecordedCalls(self._library, recording, result, tensors.kept)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each row's most likely token."""
        return self._chosen(logits, None, None, None)

    def keep_tokens(self, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Set the logits of some rows to -inf, in place, but for the tokens of a bitmask."""
        check_tensors(torch.float32, logits)
        check_tensors(torch.int64, rows)
        lines = logits if logits.stride(1) == 1 else logits.contiguous()
        masks = bitmask if bitmask.stride(1) == 1 else bitmask.contiguous()
        self._keep_tokens(
            lines.data_ptr(), lines.stride(0), rows.data_ptr(), masks.data_ptr(), masks.stride(0),
            len(rows), lines.shape[1],
        )  # fmt: skip
        if lines is not logits:
            logits.copy_(lines)

    def keep_top_k(self, logits: torch.Tensor, k: torch.Tensor, largest_k: int) -> None:  # noqa: ARG002
        """Set the logits below each row's k-th largest one to -inf, in place."""
        self._mask(self._keep_top_k, logits, k)

    def keep_top_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set the logits below each row's nucleus to -inf, in place."""
        self._mask(self._keep_top_p, logits, p.float())

    def keep_min_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set logits below each row's largest one + log(p) to -inf, in place."""
        self._mask(self._keep_near, logits, p.log())

    def draw(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        greedy: torch.Tensor,
    ) -> torch.Tensor:
        """Return a token of each row, drawn with the probabilities of its logits."""
        return self._chosen(logits, greedy.data_ptr(), seeds.data_ptr(), positions.data_ptr())

    def _chosen(self, logits: torch.Tensor, *settings: int | None) -> torch.Tensor:
        check_tensors(torch.float32, logits)
        if logits.stride(1) != 1:  # from a processor of any kind
            logits = logits.contiguous()
        rows, width = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64, device="cpu")
        self._choose(logits.data_ptr(), logits.stride(0), *settings, tokens.data_ptr(), rows, width)
        return tokens

    def _mask(
        self, function: Callable[..., None], logits: torch.Tensor, column: torch.Tensor
    ) -> None:
        check_tensors(torch.float32, logits)
        check_tensors(column.dtype, column)
        lines = logits if logits.stride(1) == 1 else logits.contiguous()
        rows, width = lines.shape
        function(lines.data_ptr(), lines.stride(0), column.data_ptr(), rows, width)
        if lines is not logits:
            logits.copy_(lines)

    def _gated(self, function: Callable[..., None], x: torch.Tensor) -> torch.Tensor:
        check_tensors(self._dtype, x)
        count, width = x.shape[0], x.shape[1] // 2
        y = self._results.empty((count, width), x.dtype)
        self._library.run(function, x.data_ptr(), x.stride(0), y.data_ptr(), width, count, width)
        return y


class _PackedMemory:
    """Memory of packed matrices, in huge pages; most matrices are smaller than one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: mmap.mmap | None = None
        self._used = 0

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [count], zero."""
        size = -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED
        with self._lock:
            if self._pages is None or self._used + size > len(self._pages):
                self._pages, self._used = cpu.allocate_pages(max(size, _MEMORY)), 0
            pages, start = self._pages, self._used
            self._used += size
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=start)


class _Product:
    """x -> x W^T + b."""

    def __init__(
        self,
        library: cpu.Library,
        results: Results,
        packed: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
        kernel: str,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
    ) -> None:
        columns, depth = shape
        self._dtype, self._out_dtype = dtype, out_dtype
        self._is_checked = False  # the layout of rows, which this place in a model does not change
        self._library, self._results = library, results
        self._columns, self._depth = columns, depth
        self._short = library.function(kernel, dtype)
        self._long = library.function(kernel, dtype, releases=True)
        self._many_rows = _LONG_WORK // (columns * depth)
        self._packed, self._bias = packed, bias
        self._at = self._packed.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        check_tensors(self._dtype, x)
        if not self._is_checked:
            check_rows(x)
            self._is_checked = True
        rows, columns = x.shape[0], self._columns
        y = self._results.empty((rows, columns), self._out_dtype)
        run = self._long if rows > self._many_rows else self._short
        self._library.run(
            run, x.data_ptr(), x.stride(0), self._at, self._bias_at, y.data_ptr(), columns,
            rows, columns, self._depth
        )  # fmt: skip
        return y


class _Experts:
    """(x, chosen, weights) -> the weighted sum of experts."""

    def __init__(
        self,
        library: cpu.Library,
        results: Results,
        gate_up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        shape: tuple[int, int],
    ) -> None:
        self._library, self._results, self._shape = library, results, shape
        self._dtype = gate_up[0].dtype
        self._run = library.function("experts", gate_up[0].dtype, releases=True)
        self._matrices = [*gate_up, *down]  # the kernel reads their addresses
        self._enter, self._leave = (
            torch.tensor([matrix.data_ptr() for matrix in side], device="cpu")
            for side in (gate_up, down)
        )

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows, (hidden, width) = len(x), self._shape
        check_tensors(self._dtype, x)
        chosen, weights = chosen.contiguous(), weights.contiguous()
        y = self._results.empty((rows, hidden), x.dtype)
        self._library.run(
            self._run, x.data_ptr(), x.stride(0), chosen.data_ptr(), weights.data_ptr(), rows,
            chosen.shape[1], self._enter.data_ptr(), self._leave.data_ptr(), len(self._enter),
            y.data_ptr(), hidden, width,
        )  # fmt: skip
        return y


class RecordedCalls:
    """A function that repeats recorded calls, and returns the tensor that they write."""

    def __init__(
        self,
        library: cpu.Library,
        recording: cpu.Recording,
        result: torch.Tensor,
        tensors: list[torch.Tensor],
    ) -> None:
        self._replay = library.function("replay", None, releases=True)
        self._calls = recording.words()
        self._result = result
        self._tensors = tensors
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)

    def __call__(self) -> torch.Tensor:
        """Repeat the calls."""
        self._replay(self._calls.ctypes.data, len(self._calls))
        return self._result


class _Watched:
    """Keeps the tensors that are created; notices operations that are no kernels.

    Attributes:
        kept: the tensors, in the order of creation.
        foreign: whether torch computed something.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.foreign = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.empty:
            self.kept.append(result)
        elif not func.is_view:
            self.foreign = True
        return result


class _Tensors(_Watched, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """As `_Watched`, for the operations of this thread."""

    # Its base has the method: torch wraps one of its own class, and imports its compiler to call
    # it, which takes seconds and a hundred megabytes.
