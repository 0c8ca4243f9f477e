"""The conformance suite for operations; the built-in ones pass it too."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import torch

from hardpoint.plugins import ClampedSwiGLU, Op, Ops, OpsContext
from hardpoint.plugins.component import Component
from hardpoint.plugins.quantization import AffineCodes
from hardpoint.testing.component_suite import GeneralComponentSuite, first_device
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.suite import checks

from . import ops_rules as rules
from .code_matrices import FORMS
from .formulas import EPS, attention, clamped_swiglu, gelu, norm, silu
from .logits_ops import KINDS, check_choice, check_in_place, check_mask, described, draw_logits

_TOLERANCES = {torch.bfloat16: 0.01, torch.float16: 0.002}
_CODE_COLUMNS = (50, 300)  # of which more than share an outer scale


Case = tuple[Ops, torch.dtype, int, int]
"""Operations under test, a dtype, a width, and a number of rows."""


def _tensors(suite: OpsSuite, sizes: Sequence[int] | None = None) -> Iterator[Case]:
    for dtype, size, rows in itertools.product(suite.dtypes, sizes or suite.sizes, suite.rows):
        torch.manual_seed(size * 100 + rows)
        with closing(suite._make(dtype)) as ops:
            yield ops, dtype, size, rows


def _codes(suite: OpsSuite) -> Iterator[Case]:
    return _tensors(suite, _CODE_COLUMNS)


def _logits(suite: OpsSuite) -> Iterator[tuple[Ops, torch.Tensor]]:
    device = first_device(suite.ops, suite.device)
    for vocab_size, rows in itertools.product(suite.vocab_sizes, suite.rows):
        with closing(suite._make(suite.dtypes[0])) as ops:
            for shift in range(1 if rows >= len(KINDS) else len(KINDS)):
                yield ops, draw_logits(rows, vocab_size, shift, device)


class OpsSuite(GeneralComponentSuite):
    """Base class of a test class, which sets `ops`, and `options` if it has some.

    Results are compared with the formulas in float64.

    Attributes:
        ops: the class under test.
        device: where it runs; None is the first of its `devices` that this machine has.
        dtypes: dtypes of weights and hidden states.
        sizes: widths of rows; odd ones show what happens after the last whole vector.
        rows: numbers of rows.
        vocab_sizes: widths of logits.
        batch_invariant: whether rows are compared bit for bit alone and among others; otherwise
            within the tolerance.
        tolerance: maximum difference, relative to the largest value; None depends on the dtype.
    """

    kind = "ops"
    ops: ClassVar[type[Ops]]
    device: ClassVar[str | None] = None
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    sizes: ClassVar[Sequence[int]] = (2, 16, 50, 130)
    rows: ClassVar[Sequence[int]] = (1, 3, 18)
    vocab_sizes: ClassVar[Sequence[int]] = (1, 15, 16, 17, 4999)
    batch_invariant: ClassVar[bool] = False
    tolerance: ClassVar[float | None] = None

    def _component(self) -> type[Component]:
        return self.ops

    def _check_construction(self) -> None:
        self._make(self.dtypes[0]).close()

    @checks(rules.VALUES, cases=_tensors)
    def test_linear(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """Products with and without a bias, in another dtype of results, of rows of a wider tensor.
        With a `layout`, a matrix that another component has packed serves as well, and has the same
        bytes.
        """
        for columns in (1, size + 1):
            weight, bias = self._draw(columns, size, dtype=dtype), self._draw(columns, dtype=dtype)
            x = self._draw(rows, size + 3, dtype=dtype)[:, :size]  # rows of a wider tensor
            expected = x.double() @ weight.double().T
            packed = self._pack(ops, weight)
            for bias_arg, out_dtype in ((None, None), (bias, None), (None, torch.float32)):
                multiply = ops.linear(packed, (columns, size), bias_arg, out_dtype=out_dtype)
                wanted = expected if bias_arg is None else expected + bias_arg.double()
                self._compare(multiply, x, wanted, out_dtype or dtype, "linear")

    @checks(rules.VALUES, cases=_codes)
    def test_codes(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """Products with quantized matrices of every form, alone and stacked, equal the products of
        the dequantized matrices.
        """
        generator = torch.Generator().manual_seed(size)
        forms = [form.draw(count, size, generator) for count, form in enumerate(FORMS, 17)]
        stacks = {form.name: [part] for form, part in zip(FORMS, forms, strict=True)}
        stacks |= {"stacked forms": forms, "stacked forms of a kind": [forms[2], forms[2]]}
        x = self._draw(rows, size + 3, dtype=dtype)[:, :size]  # rows of a wider tensor
        for name, parts in stacks.items():
            weight = torch.cat([part.dequantize() for part in parts]).to(x.device)
            shape, expected = (len(weight), size), x.double() @ weight.double().T
            # Terms may cancel out, of which each may be rounded.
            scale = (x.double().square() @ weight.double().square().T).sqrt()
            bias = self._draw(len(weight), dtype=dtype)
            packed = self._packed(ops, "pack_codes", functools.partial(_pack_codes, parts))
            before = torch.cat([part.dequantize() for part in parts]).to(x.device)
            self._check_kept(before, weight, "pack_codes", "its parts")
            for bias_arg, out_dtype in ((None, None), (bias, torch.float32))[: len(parts)]:
                multiply = ops.linear(packed, shape, bias_arg, out_dtype=out_dtype)
                wanted = expected if bias_arg is None else expected + bias_arg.double()
                label = f"linear of codes ({name})"
                self._compare(multiply, x, wanted, out_dtype or dtype, label, scale=scale)
            self._check_recorded(ops, multiply, x)

    @checks(rules.VALUES, cases=_codes)
    def test_embedding(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """Rows of quantized matrices, if they can be read."""
        generator = torch.Generator().manual_seed(size)
        for form in FORMS:
            matrix = form.draw(23, size, generator)
            packed = self._packed(ops, "pack_codes", functools.partial(_pack_codes, [matrix]))
            read = ops.embedding(packed, (23, size))
            if read is None:
                continue
            ids = torch.randint(23, (rows,), generator=generator).to(packed.device)
            table = matrix.dequantize().double().to(packed.device)
            self._compare(read, ids, table[ids], dtype, f"embedding of codes ({form.name})", dtype)

    @checks(rules.VALUES, cases=_tensors)
    def test_gather_rows(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """Rows of tables of any dtype."""
        ids = torch.randint(7, (rows,)).to(first_device(self.ops, self.device))
        for table_dtype in (dtype, torch.float32):
            table = self._draw(7, size, dtype=table_dtype)
            gather = functools.partial(ops.gather_rows, table)
            self._compare(gather, ids, table.double()[ids], table_dtype, "gather_rows")

    @checks(rules.REPEATED, cases=_tensors)
    def test_record(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """The result of `record` repeats the operations for new inputs; `record_sizes` returns
        numbers of sequences in 1..`max_num_seqs`, ascending.
        """
        table, weight = self._draw(7, size, dtype=dtype), self._draw(size, dtype=dtype)
        matrix = self._draw(2 * size, size, dtype=dtype)
        multiply = ops.linear(ops.pack(matrix), (2 * size, size))
        down = self._draw(size, size, dtype=dtype)
        mix = ops.experts([ops.pack(matrix)], [ops.pack(down)], (size, size))
        angles = torch.rand(rows, size, device=table.device)
        chosen, share = torch.zeros(rows, 1).to(table.device).long(), angles[:, :1].clone()
        ids = torch.randint(7, (rows,), device=table.device)

        def run(ids: torch.Tensor) -> torch.Tensor:
            x = ops.gather_rows(table, ids)
            ops.rotate(x.view(rows, 1, size), angles)
            delta = ops.silu_and_mul(multiply(ops.rms_norm(x, weight, EPS)))
            return ops.gelu_and_mul(multiply(ops.add_rms_norm(x, delta, weight, EPS)))

        def run_experts(ids: torch.Tensor) -> torch.Tensor:
            return mix(run(ids), chosen, share)

        def run_sums(ids: torch.Tensor) -> torch.Tensor:
            x = ops.gather_rows(table, ids)
            ops.scale(x, 0.3)
            ops.add(x, ops.rms_norm(x, weight, EPS))
            return x

        for function in (run, run_experts, run_sums):
            recorded = ops.record(functools.partial(function, ids))
            if recorded is None:
                continue
            for _ in range(2):
                ids.copy_((ids + 3) % 7)
                if not torch.equal(recorded(), function(ids.clone())):
                    raise rules.REPEATED.violation(
                        "the result of record gave another result than running"
                    )
        for limit in (1, 2, 7, 256, 1000):
            sizes = ops.record_sizes(limit)
            if not (
                isinstance(sizes, Sequence)
                and all(type(size) is int and 1 <= size <= limit for size in sizes)
                and all(size < following for size, following in itertools.pairwise(sizes))
            ):
                raise rules.SIZES.violation(f"record_sizes({limit}) gave {sizes!r}")

    @checks(rules.VALUES, cases=_tensors)
    def test_rms_norm(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """Norms of rows, and of heads."""
        wide = self._draw(rows, size + 3, dtype=dtype)
        heads = self._draw(rows, 4, size, dtype=dtype)
        for x in (wide[:, :size], heads, heads[:, 1:3]):
            for weight in (self._draw(size, dtype=dtype), self._draw(size, dtype=torch.float32)):
                apply = functools.partial(ops.rms_norm, weight=weight, eps=EPS)
                self._compare(apply, x, norm(x, weight), dtype, "rms_norm")

    @checks(rules.VALUES, cases=_tensors)
    def test_add_rms_norm(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """A sum, made in the first argument, and its norm; the second is left alone."""
        delta = self._draw(rows, size, dtype=dtype)
        for weight in (self._draw(size, dtype=dtype), self._draw(size, dtype=torch.float32)):
            x = self._draw(rows, size, dtype=dtype)
            original, total = delta.clone(), (x + delta).double()
            result = ops.add_rms_norm(x, delta, weight, EPS)
            self._check_close(x, total, "x after add_rms_norm")
            self._check_close(result, norm(x, weight), "add_rms_norm")
            self._check_kept(delta, original, "add_rms_norm", "delta")

    @checks(rules.VALUES, cases=_tensors)
    def test_rotate(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """The heads given, or the first elements of each, are rotated in place, the other ones are
        not.
        """
        for more in (0, 6):  # elements of a head that are not rotated
            wide = self._draw(rows, 5, size + more, dtype=dtype)
            before = wide.clone()
            angle = torch.rand(rows, size // 2, device=wide.device) * 6
            angles = torch.cat((angle.cos(), angle.sin()), -1)
            ops.rotate(wide[:, 1:3, :size], angles)
            a, b = before[:, 1:3, :size].double().chunk(2, -1)
            cos, sin = (part.double().unsqueeze(1) for part in angles.chunk(2, -1))
            expected = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
            self._check_close(wide[:, 1:3, :size], expected, "rotate")
            others = [0, 3, 4]
            self._check_kept(wide[:, others], before[:, others], "rotate", "other heads")
            self._check_kept(wide[..., size:], before[..., size:], "rotate", "the rest of a head")

    @checks(rules.VALUES, cases=_tensors)
    def test_scale(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """A product with a number, in place; nothing else is changed."""
        wide = self._draw(rows, size + 3, dtype=dtype)
        before = wide.clone()
        ops.scale(wide[:, :size], 0.3)
        self._check_close(wide[:, :size], before[:, :size].double() * 0.3, "scale")
        self._check_kept(wide[:, size:], before[:, size:], "scale", "the memory next to x")

    @checks(rules.VALUES, cases=_tensors)
    def test_add(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """A sum, in place; nothing else is changed."""
        wide, delta = (self._draw(rows, size + 3, dtype=dtype) for _ in range(2))
        before, original = wide.clone(), delta.clone()
        ops.add(wide[:, :size], delta[:, 1 : 1 + size])
        expected = before[:, :size].double() + original[:, 1 : 1 + size].double()
        self._check_close(wide[:, :size], expected, "add")
        self._check_kept(wide[:, size:], before[:, size:], "add", "the memory next to x")
        self._check_kept(delta, original, "add", "delta")

    @checks(rules.VALUES, cases=_tensors)
    def test_gates(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """SiLU and the tanh form of GELU, gate before up."""
        x = self._draw(rows, 2 * size, dtype=dtype) * 4
        gate, up = x.double().chunk(2, -1)
        self._compare(ops.silu_and_mul, x, silu(gate) * up, dtype, "silu_and_mul")
        self._compare(ops.gelu_and_mul, x, gelu(gate) * up, dtype, "gelu_and_mul")

    @checks(rules.VALUES, cases=_tensors)
    def test_experts(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """Mixtures of experts; rows choose some, none, or some of another rank; without biases, and
        with biases and `ClampedSwiGLU` if `experts` takes them.
        """
        self._check_experts(ops, dtype, size, rows, clamped=None)
        if "biases" in inspect.signature(ops.experts).parameters:
            self._check_experts(ops, dtype, size, rows, clamped=ClampedSwiGLU(1.702, 0.4))

    def _check_experts(
        self, ops: Ops, dtype: torch.dtype, size: int, rows: int, *, clamped: ClampedSwiGLU | None
    ) -> None:
        width, count = size + 1, 4
        matrices = [
            [self._draw(*shape, dtype=dtype).abs() / size for _ in range(count)]
            for shape in ((2 * width, size), (size, width))
        ]
        packed = [[self._pack(ops, matrix) for matrix in side] for side in matrices]
        further: dict[str, Any] = {}
        biases = [torch.zeros(1, device=matrices[0][0].device)] * 2
        if clamped is not None:
            drawn = [self._draw(count, len(side[0]), dtype=dtype).abs() for side in matrices]
            biases = [side.double().unsqueeze(1) for side in drawn]
            further = {"biases": tuple(list(side) for side in drawn), "clamped": clamped}
        apply = ops.experts(packed[0], packed[1], (size, width), **further)
        x = self._draw(rows, size, dtype=dtype).abs()  # nothing cancels: each step is rounded
        enter, leave = (torch.stack(side).double() for side in matrices)
        inner = torch.einsum("rh,ewh->erw", x.double(), enter) + biases[0]
        gate, up = inner.chunk(2, -1)
        inner = silu(gate) * up if clamped is None else clamped_swiglu(gate, up, clamped)
        results = torch.einsum("erw,ehw->erh", inner, leave) + biases[1]
        for per_row in (1, 3):
            # Numbers but 0 to 3 stand for no expert.
            draws = [torch.randperm(count + 2)[:per_row] - 1 for _ in range(rows)]
            chosen = torch.stack(draws).to(x.device)
            weights = torch.rand(rows, per_row, device=x.device).to(dtype)
            is_here = (chosen >= 0) & (chosen < count)
            parts = results[chosen.clamp(0, count - 1), torch.arange(rows)[:, None]]
            expected = (parts * (weights * is_here).unsqueeze(2)).sum(1)
            joined = torch.cat((x, chosen.to(dtype), weights), 1)  # x is a part of wider rows

            def run(joined: torch.Tensor, per_row: int = per_row) -> torch.Tensor:
                ids, factors = joined[:, size : size + per_row], joined[:, size + per_row :]
                return apply(joined[:, :size], ids.long(), factors.float())

            self._compare(run, joined, expected, dtype, "experts")

    @checks(rules.VALUES, cases=_tensors)
    def test_lora(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """Low-rank adapters change, in place, the rows that have one; rows without an adapter, or
        with an unknown one, are unchanged. Rows to change may be float32.
        """
        count, columns = 3, size + 1
        arguments = self._draw_lora(rows, size, columns, count, dtype)
        x, a, b, adapters, scales = arguments.values()
        is_here = (adapters >= 0) & (adapters < count)
        mine = adapters.clamp(0, count - 1)
        inner = torch.einsum("rd,rkd->rk", x.double(), a.double()[mine])
        delta = torch.einsum("rk,rck->rc", inner, b.double()[mine]) * scales.double()[mine, None]
        original = {name: argument.clone() for name, argument in arguments.items()}
        for of_y in dict.fromkeys((dtype, torch.float32)):
            wide = self._draw(rows, columns + 3, dtype=of_y)
            expected = wide[:, :columns].double() + delta * is_here.unsqueeze(1)
            for some in (slice(None), *(slice(row, row + 1) for row in range(rows))):
                result = wide[some].clone()
                ops.add_lora(result[:, :columns], x[some], a, b, adapters[some], scales)
                for name, argument in arguments.items():
                    self._check_kept(argument, original[name], "add_lora", name)
                self._check_close(result[:, :columns], expected[some], "add_lora")
                none = ~is_here[some]
                label = "rows without an adapter"
                before = wide[some, :columns][none]
                self._check_kept(result[:, :columns][none], before, "add_lora", label)
                label = "the memory next to y"
                self._check_kept(result[:, columns:], wide[some, columns:], "add_lora", label)

    @checks(rules.ROWS, cases=_tensors)
    def test_lora_rows(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """The change of a row by adapters is the same alone, in any order, with any other adapters,
        with ranks of zeros, and with matrices that are parts of larger ones.
        """
        count, columns = 3, size + 1
        arguments = self._draw_lora(rows, size, columns, count, dtype)
        x, a, b, adapters, scales = arguments.values()
        y = self._draw(rows, columns, dtype=dtype)
        more_a, more_b = a.new_zeros(count, 9, size), b.new_zeros(count, columns, 9)
        more_a[:, : a.shape[1]], more_b[..., : b.shape[2]] = a, b
        noisy_a, noisy_b = more_a.clone(), more_b.clone()
        noisy_a[:, a.shape[1] :], noisy_b[..., b.shape[2] :] = math.nan, math.nan
        parts = noisy_a[:, : a.shape[1]], noisy_b[..., : b.shape[2]]
        every = torch.arange(rows, device=x.device)

        def run(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            result = y[rows]
            ops.add_lora(result, x[rows], a, b, adapters[rows], scales)
            return result

        together = run(every, a, b)
        self._check_same(run(every.flip(0), a, b).flip(0), together, "in another order")
        self._check_same(run(every, more_a, more_b), together, "with ranks of zeros")
        self._check_same(run(every, *parts), together, "with parts of matrices")
        for row in range(rows):
            lonely = [matrix.clone() for matrix in (a, b)]
            others = torch.arange(count, device=x.device) != adapters[row]
            for matrix in lonely:
                matrix[others] = math.nan
            some = every[row : row + 1]
            self._check_same(run(some, a, b), together[some], f"of row {row} alone")
            of_row = run(every, lonely[0], lonely[1])[some]
            self._check_same(of_row, together[some], f"of row {row} with other adapters of NaN")

    def _draw_lora(
        self, rows: int, size: int, columns: int, count: int, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of `add_lora` besides y; x is a part of wider rows."""
        x = self._draw(rows, size + 3, dtype=dtype)[:, :size]
        a, b = (self._draw(count, *shape, dtype=dtype) for shape in ((5, size), (columns, 5)))
        adapters = (torch.randint(count + 2, (rows,)) - 1).to(x.device)
        scales = (torch.rand(count) + 0.5).to(x.device)
        return {"x": x, "a": a, "b": b, "adapters": adapters, "scales": scales}

    def _check_same(self, got: torch.Tensor, expected: torch.Tensor, label: str) -> None:
        """Compare `add_lora` results with results of all rows; bitwise if `batch_invariant`."""
        if self.batch_invariant and torch.equal(got, expected):
            return
        limit = 0.0 if self.batch_invariant else self.tolerance or _TOLERANCES.get(got.dtype, 1e-5)
        difference = float((got.double() - expected.double()).abs().max())
        if not difference <= limit * max(float(expected.abs().max()), 1e-3):
            raise rules.ROWS.violation(f"add_lora {label} differs by {difference:.3g}")

    @checks(rules.VALUES, cases=_tensors)
    def test_attend_within(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        """Attention of sequences in both directions, with windows; each as it is alone."""
        starts = [0, *itertools.accumulate(1 + 4 * row % 7 for row in range(rows))]
        wide = self._draw(starts[-1], 3, 2, size + 3, dtype=dtype)
        original, scale = wide.clone(), size**-0.5
        for window in (None, 0, 2):
            q, k, v = wide[..., :size].unbind(1)
            result = ops.attend_within(q, k, v, starts, scale, window)
            if result.shape != q.shape or result.dtype != dtype or result.device != q.device:
                raise rules.RESULT.violation(
                    f"attend_within returned {described(result)} for q {list(q.shape)}, expected "
                    f"the same shape, {dtype} on {q.device}"
                )
            self._check_kept(wide, original, "attend_within", "q, k or v")
            for first, end in itertools.pairwise(starts):
                a, b, c = (x[first:end] for x in (q, k, v))
                expected = attention(a, b, c, scale, window)
                self._check_close(result[first:end], expected, "attend_within")
                alone = ops.attend_within(a, b, c, [0, end - first], scale, window)
                if self.batch_invariant and not torch.equal(alone, result[first:end]):
                    raise rules.ROWS.violation(
                        f"attend_within: a sequence of {end - first} tokens, of {rows} sequences, "
                        f"differs from the same one alone"
                    )

    @checks(rules.TOKENS, cases=_logits)
    def test_argmax(self, ops: Ops, logits: torch.Tensor) -> None:
        """The most likely tokens, of equals the first, and NaN before all, as `Ops` itself returns
        them, for each row alone and among others.
        """
        check_choice(ops, logits, "argmax")

    @checks(rules.TOKENS, cases=_logits)
    def test_draw(self, ops: Ops, logits: torch.Tensor) -> None:
        """Random tokens, with greedy rows among them."""
        generator = torch.Generator().manual_seed(len(logits))
        low, high = -(2**63), 2**63 - 1
        seeds = torch.randint(low, high, (len(logits),), generator=generator)
        positions = torch.randint(0, 5000, (len(logits),), generator=generator)
        greedy = torch.arange(len(logits)) % 3 == 1
        columns = (column.to(logits.device) for column in (seeds, positions, greedy))
        check_choice(ops, logits, "draw", *columns)

    @checks(rules.TOKENS, cases=_logits)
    def test_top_k(self, ops: Ops, logits: torch.Tensor) -> None:
        """The k largest logits, with all that equal the smallest of them."""
        size = logits.shape[1]
        wanted = [(1, 2, 50, size - 1, 0, size)[row % 6] for row in range(len(logits))]
        if largest := max((k for k in wanted if 0 < k < size), default=0):
            k = torch.tensor(wanted, device=logits.device).unsqueeze(1)
            check_mask(ops, logits, "keep_top_k", k, largest)

    @checks(rules.TOKENS, cases=_logits)
    def test_top_p(self, ops: Ops, logits: torch.Tensor) -> None:
        """The nuclei."""
        self._check_share("keep_top_p", (0.9, 0.5, 1e-9, 0.9999, 1.0), ops, logits)

    @checks(rules.TOKENS, cases=_logits)
    def test_min_p(self, ops: Ops, logits: torch.Tensor) -> None:
        """The tokens that are likely enough next to the most likely one."""
        self._check_share("keep_min_p", (0.1, 0.5, 1e-30, 0.0, 1.0), ops, logits)

    @checks(rules.TOKENS, cases=_logits)
    def test_keep_tokens(self, ops: Ops, logits: torch.Tensor) -> None:
        """The tokens of a bitmask, in some of the rows."""
        generator = torch.Generator().manual_seed(len(logits))
        columns = -(-logits.shape[1] // 32)
        masks = torch.randint(-(2**31), 2**31, (len(logits), columns), generator=generator)
        masks[::4, ::2], masks[1::4, 1::2] = 0, -1  # all of 32 tokens at once
        rows = torch.randperm(len(logits), generator=generator)[: len(logits) // 2 + 1]
        bitmask = masks.to(torch.int32)[: len(rows)]
        label = f"in rows {rows.tolist()}"
        check_in_place(ops, logits, "keep_tokens", label, rows, bitmask)

    @checks(rules.TOKENS, cases=_logits)
    def test_edit(self, ops: Ops, logits: torch.Tensor) -> None:
        """Edits of some tokens, in some of the rows and in all."""
        for op, every in itertools.product(Op, (1, 2)):
            vocab = logits.shape[1]
            generator = torch.Generator().manual_seed(vocab)
            places = torch.randperm(logits.numel(), generator=generator)[: 3 * len(logits)]
            places = places[places // vocab % every == 0]
            values = torch.randn(len(places), generator=generator) * 9
            values[::5] = -math.inf
            rows = torch.unique(places // vocab)
            inputs = (places, None, rows) if op is Op.KEEP_ONLY else (places, values)
            label = f"with {op} of rows {rows.tolist()}"
            check_in_place(ops, logits, "edit", label, op, *inputs)

    @checks(rules.TOKENS, cases=_logits)
    def test_divide(self, ops: Ops, logits: torch.Tensor) -> None:
        """Each row is divided by its own number."""
        numbers = [(0.7, 1.0, 1e30, 1e-5, 3.0)[row % 5] for row in range(len(logits))]
        label = f"by {numbers}"
        check_in_place(ops, logits, "divide", label, torch.tensor(numbers).unsqueeze(1))

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        dtype = self.dtypes[0]
        ops, shape = self._make(dtype), (8, 32)
        generator, device = torch.Generator().manual_seed(0), first_device(self.ops, self.device)
        weight = torch.randn(shape, generator=generator).to(device, dtype)
        x = torch.randn(3, shape[1], generator=generator).to(device, dtype)

        def use(number: int) -> None:
            ops.linear(self._pack(ops, weight), shape, None)(x[: 1 + number % 3])

        yield InUse(ops, use)

    def _make(self, dtype: torch.dtype) -> Ops:
        ops: Ops = self._build(OpsContext, device=first_device(self.ops, self.device), dtype=dtype)
        return ops

    def _draw(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape).to(first_device(self.ops, self.device), dtype)

    def _check_recorded(
        self, ops: Ops, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> None:
        x = x.clone()
        recorded = ops.record(functools.partial(function, x))
        x += 1
        if recorded is not None and not torch.equal(recorded(), function(x)):
            raise rules.REPEATED.violation(
                "of codes, record's result gave another one than running"
            )

    def _pack(self, ops: Ops, weight: torch.Tensor) -> torch.Tensor:
        return self._packed(ops, "pack", lambda ops: ops.pack(weight.clone()))

    def _packed(self, ops: Ops, name: str, pack: Callable[[Ops], torch.Tensor]) -> torch.Tensor:
        """Return a packed matrix; a reusable one was packed by another component."""
        packed = pack(ops)
        if not ops.layout:
            return packed
        other = self._make(ops.context.dtype)
        try:
            again, layout = pack(other), other.layout
        finally:
            other.close()
        if layout != ops.layout:
            raise rules.KEPT.violation(
                f"two components name their layouts {ops.layout!r}, {layout!r}"
            )
        if packed.layout != torch.strided or not packed.is_contiguous():
            raise rules.KEPT.violation(
                f"{name} returned a tensor that is not contiguous ({packed.layout})"
            )
        if not torch.equal(_bytes(packed), _bytes(again)):
            raise rules.KEPT.violation("two components packed one matrix into other bytes")
        return again.cpu().clone().to(packed.device)

    def _check_share(
        self, name: str, shares: Sequence[float], ops: Ops, logits: torch.Tensor
    ) -> None:
        p = [shares[row % len(shares)] for row in range(len(logits))]
        check_mask(ops, logits, name, torch.tensor(p, device=logits.device).unsqueeze(1))

    def _compare(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        expected: torch.Tensor,
        dtype: torch.dtype,
        label: str,
        rounded: torch.dtype | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Check a function's result, that x is left alone, and each row alone.

        Args:
            function: a function of x.
            x: its argument.
            expected: its result.
            dtype: dtype of the result.
            label: its name in messages.
            rounded: a coarser dtype that results may have been rounded to; None is the dtype of x.
            scale: numbers that errors are relative to, if they are larger than the results.
        """
        original = x.clone()
        result = function(x)
        if (
            not isinstance(result, torch.Tensor)
            or result.shape != expected.shape
            or result.dtype != dtype
            or result.device != x.device
        ):
            raise rules.RESULT.violation(
                f"{label} returned {described(result)} for x {list(x.shape)}, expected {dtype} "
                f"{list(expected.shape)} on {x.device}"
            )
        rounded = rounded or x.dtype
        self._check_close(result, expected, label, rounded, scale)
        self._check_kept(x, original, label, "x")
        for row in range(len(x)):
            alone = function(x[row : row + 1])[0]
            if self.batch_invariant and not torch.equal(alone, result[row]):
                raise rules.ROWS.violation(
                    f"{label}: row {row} of {len(x)} differs by "
                    f"{(alone.double() - result[row].double()).abs().max():.3g} from the same row "
                    f"alone"
                )
            part = None if scale is None else scale[row]
            self._check_close(alone, expected[row], f"{label} of row {row} alone", rounded, part)

    def _check_close(
        self,
        got: torch.Tensor,
        expected: torch.Tensor,
        label: str,
        rounded: torch.dtype | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Check values; see `_compare`."""
        limit = self.tolerance or _TOLERANCES.get(rounded or got.dtype, 1e-5)
        largest = [float(t.abs().max()) for t in (expected, scale) if t is not None]
        difference = (got.double() - expected.double()).abs()
        if not float(difference.max()) <= limit * max(*largest, 1e-3):
            place = divmod(int(difference.nan_to_num(math.inf).argmax()), got.shape[-1])
            raise rules.VALUES.violation(
                f"{label} differs by {float(difference.max()):.3g} at row {place[0]}, column "
                f"{place[1]}: it gave {float(got.reshape(-1, got.shape[-1])[place]):.6g}, the "
                f"formula {float(expected.reshape(-1, got.shape[-1])[place]):.6g}"
            )

    def _check_kept(
        self, got: torch.Tensor, expected: torch.Tensor, label: str, argument: str
    ) -> None:
        if not torch.equal(got, expected):
            raise rules.IN_PLACE.violation(f"{label} changed {argument}")


def _pack_codes(parts: Sequence[AffineCodes], ops: Ops) -> torch.Tensor:
    return ops.pack_codes(parts)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)
