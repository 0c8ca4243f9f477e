"""The conformance suite for operations; the built-in ones pass it too."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from hardpoint.plugins import Op, Ops, OpsContext
from hardpoint.plugins.component import Component
from hardpoint.plugins.quantization import AffineCodes
from hardpoint.testing.component_suite import ComponentSuite, first_device
from hardpoint.testing.suite import Rule

from .code_matrices import FORMS

_TOLERANCES = {torch.bfloat16: 0.01, torch.float16: 0.002}
_EPS = 1e-5
_CODE_COLUMNS = (50, 300)  # of which more than share an outer scale

RESULT = Rule(
    "result: an operation returns a tensor of the stated shape, dtype and device",
    "return one row per row of x, in the context's dtype on its device",
)
VALUES = Rule(
    "values: an operation computes what its docstring says",
    "sum in float32 at least, and round the result once",
)
ROWS = Rule(
    "rows: a row's result does not depend on the other rows",
    "compute each row with the same sums in the same order, however many there are",
)
IN_PLACE = Rule(
    "in place: add_rms_norm, rotate, scale, add and add_lora change their first argument, and "
    "nothing else",
    "add delta to x itself, rotate the heads of x itself, and write results to new memory",
)
KEPT = Rule(
    "kept: with a layout, packed matrices of one process serve another",
    "return a contiguous tensor that `linear` needs nothing else for, from the weight alone, or "
    "state no layout",
)
TOKENS = Rule(
    "tokens: an operation on logits keeps or returns the tokens that its docstring says",
    "do as the method of Ops that is overridden, which is plain torch",
)
_KINDS = ("plain", "ties", "flat", "few", "one", "nothing but -inf", "NaN", "+inf", "subnormal")

REPEATED = Rule(
    "repeated: what record returns repeats every operation, on the same tensors",
    "record all that the operations compute, or return None",
)

SIZES = Rule(
    "sizes: record_sizes gives numbers of sequences in 1..max_num_seqs, ascending",
    "return ints, each once, none larger than max_num_seqs, or an empty sequence",
)


class OpsSuite(ComponentSuite):
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

    def test_linear(self) -> None:
        """Products, with and without a bias, in other dtypes, of a matrix packed elsewhere."""
        self._check_all("linear", self._check_linear)

    def test_codes(self) -> None:
        """Products with matrices of few bits of every form, alone and stacked, and experts."""
        self._check_all("linear of codes", self._check_codes, _CODE_COLUMNS)

    def test_embedding(self) -> None:
        """Rows of matrices of few bits, if they can be read."""
        self._check_all("embedding", self._check_embedding, _CODE_COLUMNS)

    def test_gather_rows(self) -> None:
        """Rows of tables of any dtype."""
        self._check_all("gather_rows", self._check_gather_rows)

    def test_record(self) -> None:
        """Operations that are repeated give what they give for the new inputs; sizes are some."""
        self._check_all("record", self._check_record)
        dtype, size, rows = self.dtypes[0], self.sizes[0], self.rows[0]
        self._run_checks(
            SIZES.text, functools.partial(self._on_new, self._check_sizes, dtype, size, rows)
        )

    def test_rms_norm(self) -> None:
        """Norms of rows, and of heads."""
        self._check_all("rms_norm", self._check_norm)

    def test_add_rms_norm(self) -> None:
        """A sum in place, and its norm."""
        self._check_all("add_rms_norm", self._check_add_norm)

    def test_rotate(self) -> None:
        """Heads of a wider tensor, and parts of heads, are rotated in place."""
        self._check_all("rotate", self._check_rotate)

    def test_scale(self) -> None:
        """A product with a number, in place."""
        self._check_all("scale", self._check_scale)

    def test_add(self) -> None:
        """A sum, in place."""
        self._check_all("add", self._check_add)

    def test_gates(self) -> None:
        """Gated activations."""
        self._check_all("silu_and_mul", functools.partial(self._check_gate, "silu_and_mul", _silu))
        self._check_all("gelu_and_mul", functools.partial(self._check_gate, "gelu_and_mul", _gelu))

    def test_experts(self) -> None:
        """Mixtures of experts, of which rows choose some, none, or some that are elsewhere."""
        self._check_all("experts", self._check_experts)

    def test_lora(self) -> None:
        """The changes by adapters, for rows with one, none, or one that is not there."""
        self._check_all("add_lora", self._check_lora)

    def test_argmax(self) -> None:
        """The most likely tokens, of equals the first, and NaN before all."""
        self._check_logits(lambda ops, logits: self._check_choice(ops, logits, "argmax"))

    def test_draw(self) -> None:
        """Random tokens, and those of greedy rows among them."""

        def check(ops: Ops, logits: torch.Tensor) -> None:
            generator = torch.Generator().manual_seed(len(logits))
            low, high = -(2**63), 2**63 - 1
            seeds = torch.randint(low, high, (len(logits),), generator=generator)
            positions = torch.randint(0, 5000, (len(logits),), generator=generator)
            greedy = torch.arange(len(logits)) % 3 == 1
            columns = (column.to(logits.device) for column in (seeds, positions, greedy))
            self._check_choice(ops, logits, "draw", *columns)

        self._check_logits(check)

    def test_top_k(self) -> None:
        """The k largest logits, with all that equal the smallest of them."""

        def check(ops: Ops, logits: torch.Tensor) -> None:
            size = logits.shape[1]
            wanted = [(1, 2, 50, size - 1, 0, size)[row % 6] for row in range(len(logits))]
            if largest := max((k for k in wanted if 0 < k < size), default=0):
                k = torch.tensor(wanted, device=logits.device).unsqueeze(1)
                self._check_mask(ops, logits, "keep_top_k", k, largest)

        self._check_logits(check)

    def test_top_p(self) -> None:
        """The nuclei."""
        self._check_logits(
            functools.partial(self._check_share, "keep_top_p", (0.9, 0.5, 1e-9, 0.9999, 1.0))
        )

    def test_min_p(self) -> None:
        """The tokens that are likely enough next to the most likely one."""
        self._check_logits(
            functools.partial(self._check_share, "keep_min_p", (0.1, 0.5, 1e-30, 0.0, 1.0))
        )

    def test_keep_tokens(self) -> None:
        """The tokens of a bitmask, in some of the rows."""

        def check(ops: Ops, logits: torch.Tensor) -> None:
            generator = torch.Generator().manual_seed(len(logits))
            columns = -(-logits.shape[1] // 32)
            masks = torch.randint(-(2**31), 2**31, (len(logits), columns), generator=generator)
            masks[::4, ::2], masks[1::4, 1::2] = 0, -1  # all of 32 tokens at once
            rows = torch.randperm(len(logits), generator=generator)[: len(logits) // 2 + 1]
            bitmask = masks.to(torch.int32)[: len(rows)]
            what = f"in rows {rows.tolist()}"
            self._check_in_place(ops, logits, "keep_tokens", what, rows, bitmask)

        self._check_logits(check)

    def test_edit(self) -> None:
        """Edits of some tokens, in some of the rows and in all."""

        def check(op: Op, every: int, ops: Ops, logits: torch.Tensor) -> None:
            vocab = logits.shape[1]
            generator = torch.Generator().manual_seed(vocab)
            places = torch.randperm(logits.numel(), generator=generator)[: 3 * len(logits)]
            places = places[places // vocab % every == 0]
            values = torch.randn(len(places), generator=generator) * 9
            values[::5] = -math.inf
            rows = torch.unique(places // vocab)
            given = (places, None, rows) if op is Op.KEEP_ONLY else (places, values)
            what = f"with {op} of rows {rows.tolist()}"
            self._check_in_place(ops, logits, "edit", what, op, *given)

        for op, every in itertools.product(Op, (1, 2)):
            self._check_logits(functools.partial(check, op, every))

    def test_divide(self) -> None:
        """Each row is divided by its own number."""

        def check(ops: Ops, logits: torch.Tensor) -> None:
            numbers = [(0.7, 1.0, 1e30, 1e-5, 3.0)[row % 5] for row in range(len(logits))]
            what = f"by {numbers}"
            self._check_in_place(ops, logits, "divide", what, torch.tensor(numbers).unsqueeze(1))

        self._check_logits(check)

    def _check_all(
        self,
        what: str,
        check: Callable[[Ops, torch.dtype, int, int], None],
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Run a check for each dtype, width and number of rows."""
        checks = [
            functools.partial(self._on_new, check, dtype, size, rows)
            for dtype in self.dtypes
            for size in sizes or self.sizes
            for rows in self.rows
        ]
        self._run_checks(f"{what}: {VALUES.text}", *checks)

    def _on_new(
        self,
        check: Callable[[Ops, torch.dtype, int, int], None],
        dtype: torch.dtype,
        size: int,
        rows: int,
    ) -> None:
        torch.manual_seed(size * 100 + rows)
        ops = self._make(dtype)
        try:
            check(ops, dtype, size, rows)
        finally:
            ops.close()

    def _make(self, dtype: torch.dtype) -> Ops:
        ops: Ops = self._build(OpsContext, device=first_device(self.ops, self.device), dtype=dtype)
        return ops

    def _draw(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape).to(first_device(self.ops, self.device), dtype)

    def _check_linear(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        for columns in (1, size + 1):
            weight, bias = self._draw(columns, size, dtype=dtype), self._draw(columns, dtype=dtype)
            x = self._draw(rows, size + 3, dtype=dtype)[:, :size]  # rows of a wider tensor
            expected = x.double() @ weight.double().T
            packed = self._pack(ops, weight)
            for given, out_dtype in ((None, None), (bias, None), (None, torch.float32)):
                multiply = ops.linear(packed, (columns, size), given, out_dtype=out_dtype)
                wanted = expected if given is None else expected + given.double()
                self._compare(multiply, x, wanted, out_dtype or dtype, "linear")

    def _check_codes(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
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
            kept = torch.cat([part.dequantize() for part in parts]).to(x.device)
            self._check_kept(kept, weight, "pack_codes", "its parts")
            for given, out_dtype in ((None, None), (bias, torch.float32))[: len(parts)]:
                multiply = ops.linear(packed, shape, given, out_dtype=out_dtype)
                wanted = expected if given is None else expected + given.double()
                what = f"linear of codes ({name})"
                self._compare(multiply, x, wanted, out_dtype or dtype, what, scale=scale)
            self._check_recorded(ops, multiply, x)

    def _check_recorded(
        self, ops: Ops, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> None:
        x = x.clone()
        recorded = ops.record(functools.partial(function, x))
        x += 1
        if recorded is not None and not torch.equal(recorded(), function(x)):
            raise REPEATED.violation("of codes, record's result gave another one than running")

    def _check_embedding(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
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

    def _check_gather_rows(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        ids = torch.randint(7, (rows,)).to(first_device(self.ops, self.device))
        for table_dtype in (dtype, torch.float32):
            table = self._draw(7, size, dtype=table_dtype)
            gather = functools.partial(ops.gather_rows, table)
            self._compare(gather, ids, table.double()[ids], table_dtype, "gather_rows")

    def _check_record(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
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
            delta = ops.silu_and_mul(multiply(ops.rms_norm(x, weight, _EPS)))
            return ops.gelu_and_mul(multiply(ops.add_rms_norm(x, delta, weight, _EPS)))

        def run_experts(ids: torch.Tensor) -> torch.Tensor:
            return mix(run(ids), chosen, share)

        def run_sums(ids: torch.Tensor) -> torch.Tensor:
            x = ops.gather_rows(table, ids)
            ops.scale(x, 0.3)
            ops.add(x, ops.rms_norm(x, weight, _EPS))
            return x

        for function in (run, run_experts, run_sums):
            recorded = ops.record(functools.partial(function, ids))
            if recorded is None:
                continue
            for _ in range(2):
                ids.copy_((ids + 3) % 7)
                if not torch.equal(recorded(), function(ids.clone())):
                    raise REPEATED.violation(
                        "what record returned gave another result than running"
                    )

    def _check_sizes(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:  # noqa: ARG002
        for limit in (1, 2, 7, 256, 1000):
            sizes = ops.record_sizes(limit)
            if not (
                isinstance(sizes, Sequence)
                and all(type(size) is int and 1 <= size <= limit for size in sizes)
                and all(size < following for size, following in itertools.pairwise(sizes))
            ):
                raise SIZES.violation(f"record_sizes({limit}) gave {sizes!r}")

    def _pack(self, ops: Ops, weight: torch.Tensor) -> torch.Tensor:
        return self._packed(ops, "pack", lambda ops: ops.pack(weight.clone()))

    def _packed(self, ops: Ops, name: str, pack: Callable[[Ops], torch.Tensor]) -> torch.Tensor:
        """Return a packed matrix; one that may be kept was packed by another component."""
        packed = pack(ops)
        if not ops.layout:
            return packed
        other = self._make(ops.context.dtype)
        try:
            again, layout = pack(other), other.layout
        finally:
            other.close()
        if layout != ops.layout:
            raise KEPT.violation(f"two components name their layouts {ops.layout!r}, {layout!r}")
        if packed.layout != torch.strided or not packed.is_contiguous():
            raise KEPT.violation(
                f"{name} returned a tensor that is not contiguous ({packed.layout})"
            )
        if not torch.equal(_bytes(packed), _bytes(again)):
            raise KEPT.violation("two components packed one matrix into other bytes")
        return again.cpu().clone().to(packed.device)

    def _check_norm(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        wide = self._draw(rows, size + 3, dtype=dtype)
        heads = self._draw(rows, 4, size, dtype=dtype)
        for x in (wide[:, :size], heads, heads[:, 1:3]):
            for weight in (self._draw(size, dtype=dtype), self._draw(size, dtype=torch.float32)):
                norm = functools.partial(ops.rms_norm, weight=weight, eps=_EPS)
                self._compare(norm, x, _norm(x, weight), dtype, "rms_norm")

    def _check_add_norm(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        delta = self._draw(rows, size, dtype=dtype)
        for weight in (self._draw(size, dtype=dtype), self._draw(size, dtype=torch.float32)):
            x = self._draw(rows, size, dtype=dtype)
            kept, total = delta.clone(), (x + delta).double()
            result = ops.add_rms_norm(x, delta, weight, _EPS)
            self._check_close(x, total, "x after add_rms_norm")
            self._check_close(result, _norm(x, weight), "add_rms_norm")
            self._check_kept(delta, kept, "add_rms_norm", "delta")

    def _check_rotate(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
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

    def _check_scale(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        wide = self._draw(rows, size + 3, dtype=dtype)
        before = wide.clone()
        ops.scale(wide[:, :size], 0.3)
        self._check_close(wide[:, :size], before[:, :size].double() * 0.3, "scale")
        self._check_kept(wide[:, size:], before[:, size:], "scale", "what is next to x")

    def _check_add(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        wide, delta = (self._draw(rows, size + 3, dtype=dtype) for _ in range(2))
        before, kept = wide.clone(), delta.clone()
        ops.add(wide[:, :size], delta[:, 1 : 1 + size])
        expected = before[:, :size].double() + kept[:, 1 : 1 + size].double()
        self._check_close(wide[:, :size], expected, "add")
        self._check_kept(wide[:, size:], before[:, size:], "add", "what is next to x")
        self._check_kept(delta, kept, "add", "delta")

    def _check_gate(
        self,
        name: str,
        activation: Callable[[torch.Tensor], torch.Tensor],
        ops: Ops,
        dtype: torch.dtype,
        size: int,
        rows: int,
    ) -> None:
        x = self._draw(rows, 2 * size, dtype=dtype) * 4
        gate, up = x.double().chunk(2, -1)
        self._compare(getattr(ops, name), x, activation(gate) * up, dtype, name)

    def _check_experts(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        width, count = size + 1, 4
        matrices = [
            [self._draw(*shape, dtype=dtype).abs() / size for _ in range(count)]
            for shape in ((2 * width, size), (size, width))
        ]
        packed = [[self._pack(ops, matrix) for matrix in side] for side in matrices]
        apply = ops.experts(packed[0], packed[1], (size, width))
        x = self._draw(rows, size, dtype=dtype).abs()  # nothing cancels: each step is rounded
        enter, leave = (torch.stack(side).double() for side in matrices)
        gate, up = torch.einsum("rh,ewh->erw", x.double(), enter).chunk(2, -1)
        results = torch.einsum("erw,ehw->erh", _silu(gate) * up, leave)
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

    def _check_lora(self, ops: Ops, dtype: torch.dtype, size: int, rows: int) -> None:
        count, rank, columns = 3, 5, size + 1
        a, b = (self._draw(count, *shape, dtype=dtype) for shape in ((rank, size), (columns, rank)))
        x, wide = (self._draw(rows, width + 3, dtype=dtype) for width in (size, columns))
        scales = (torch.rand(count) + 0.5).to(x.device)
        adapters = (torch.randint(count + 2, (rows,)) - 1).to(x.device)
        is_here = (adapters >= 0) & (adapters < count)
        mine = adapters.clamp(0, count - 1)
        inner = torch.einsum("rd,rkd->rk", x[:, :size].double(), a.double()[mine])
        delta = torch.einsum("rk,rck->rc", inner, b.double()[mine]) * scales.double()[mine, None]
        expected = wide[:, :columns].double() + delta * is_here.unsqueeze(1)
        arguments = {"x": x, "a": a, "b": b, "adapters": adapters, "scales": scales}
        kept = {name: argument.clone() for name, argument in arguments.items()}
        for some in (slice(None), *(slice(row, row + 1) for row in range(rows))):
            result = wide[some].clone()
            ops.add_lora(result[:, :columns], x[some, :size], a, b, adapters[some], scales)
            for name, argument in arguments.items():
                self._check_kept(argument, kept[name], "add_lora", name)
            self._check_close(result[:, :columns], expected[some], "add_lora")
            none = ~is_here[some]
            self._check_kept(result[none], wide[some][none], "add_lora", "rows without an adapter")
            self._check_kept(
                result[:, columns:], wide[some, columns:], "add_lora", "what is next to y"
            )

    def _check_logits(self, check: Callable[[Ops, torch.Tensor], None]) -> None:
        """Run a check on logits of each size."""

        def run(vocab_size: int, rows: int) -> None:
            ops = self._make(self.dtypes[0])
            try:
                for shift in range(1 if rows >= len(_KINDS) else len(_KINDS)):
                    check(ops, self._logits(rows, vocab_size, shift))
            finally:
                ops.close()

        sizes = itertools.product(self.vocab_sizes, self.rows)
        self._run_checks(TOKENS.text, *(functools.partial(run, *size) for size in sizes))

    def _logits(self, rows: int, vocab_size: int, shift: int) -> torch.Tensor:
        """Return logits of several kinds, from a number on; part of a wider tensor."""
        generator = torch.Generator().manual_seed(shift)
        logits = torch.randn(rows, vocab_size + 3, generator=generator) * 3
        for row, logit in enumerate(logits):
            order = torch.randperm(vocab_size, generator=generator)
            kind = _KINDS[(row + shift) % len(_KINDS)]
            if kind == "ties":
                logit.round_()
            elif kind == "flat":
                logit.zero_()
            elif kind in ("few", "one"):
                logit[order[1 if kind == "one" else 5 :]] = -math.inf
            elif kind == "nothing but -inf":
                logit.fill_(-math.inf)
            elif kind == "subnormal":
                logit *= 1e-40
            elif kind != "plain":
                logit[order[:2]] = math.nan if kind == "NaN" else math.inf
        return logits.to(first_device(self.ops, self.device))[:, :vocab_size]

    def _check_share(
        self, name: str, shares: Sequence[float], ops: Ops, logits: torch.Tensor
    ) -> None:
        p = [shares[row % len(shares)] for row in range(len(logits))]
        self._check_mask(ops, logits, name, torch.tensor(p, device=logits.device).unsqueeze(1))

    def _check_choice(
        self, ops: Ops, logits: torch.Tensor, name: str, *columns: torch.Tensor
    ) -> None:
        """Check the tokens that a method returns, for all rows and for each alone."""
        kept = logits.clone()
        expected: torch.Tensor = getattr(Ops, name)(ops, logits, *columns)
        for rows in (slice(None), *(slice(row, row + 1) for row in range(len(logits)))):
            result = getattr(ops, name)(logits[rows], *(column[rows] for column in columns))
            wanted = expected[rows]
            if not (
                isinstance(result, torch.Tensor)
                and result.dtype == torch.int64
                and result.shape == wanted.shape
                and result.device == logits.device
            ):
                raise RESULT.violation(
                    f"{name} returned {_described(result)} for logits {list(kept[rows].shape)}, "
                    f"expected torch.int64 {list(wanted.shape)} on {logits.device}"
                )
            if not torch.equal(result, wanted):
                row = int((result != wanted).nonzero()[0])
                raise TOKENS.violation(
                    f"{name} returned token {int(result[row])} for {_row_of(kept[rows], row)}, "
                    f"expected {int(wanted[row])}"
                )
        if not torch.equal(logits.view(torch.int32), kept.view(torch.int32)):
            raise IN_PLACE.violation(f"{name} changed logits")

    def _check_mask(
        self, ops: Ops, logits: torch.Tensor, name: str, column: torch.Tensor, *more: int
    ) -> None:
        """Check the logits that a method leaves, for all rows and for each alone."""
        expected = logits.clone()
        getattr(Ops, name)(ops, expected, column, *more)
        for rows in (slice(None), *(slice(row, row + 1) for row in range(len(logits)))):
            given, k = logits[rows], column[rows]
            if name == "keep_top_k" and not 0 < int(k.amax()) < logits.shape[1] and len(k) == 1:
                continue
            wide = torch.nn.functional.pad(given, (0, 2))
            result, wanted = wide[:, :-2], expected[rows]
            getattr(ops, name)(result, k, *([int(k)] if more and len(k) == 1 else more))
            wrong = (result.view(torch.int32) != wanted.view(torch.int32)).nonzero()
            if len(wrong):
                row, token = wrong[0].tolist()
                raise TOKENS.violation(
                    f"{name} of {k[row].item():.6g} left {result[row, token]:.6g} of token {token} "
                    f"in {_row_of(given, row)}, expected {wanted[row, token]:.6g}"
                )
            if bool(wide[:, -2:].any()):
                raise IN_PLACE.violation(f"{name} changed what is next to the logits")

    def _check_in_place(
        self, ops: Ops, logits: torch.Tensor, name: str, what: str, *arguments: Any
    ) -> None:
        """Check the logits that a method leaves, and that it leaves its other arguments alone.

        Args:
            ops: under test.
            logits: to change.
            name: name of the method.
            what: it does, after its name in messages.
            arguments: the other ones; tensors are moved to the device.
        """
        device = logits.device
        given = [x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for x in arguments]
        expected = logits.clone()
        getattr(Ops, name)(ops, expected, *given)
        wide = torch.nn.functional.pad(logits, (0, 2))
        result = wide[:, :-2]
        getattr(ops, name)(result, *given)
        differs = result.view(torch.int32) != expected.view(torch.int32)
        wrong = (differs & ~(result.isnan() & expected.isnan())).nonzero()
        if len(wrong):
            row, token = wrong[0].tolist()
            raise TOKENS.violation(
                f"{name} {what} left {result[row, token]:.6g} of token {token} in "
                f"{_row_of(logits, row)}, expected {expected[row, token]:.6g}"
            )
        if bool(wide[:, -2:].any()):
            raise IN_PLACE.violation(f"{name} changed what is next to the logits")
        for now, before in zip(given, arguments, strict=True):
            if isinstance(before, torch.Tensor) and not torch.equal(now, before.to(device)):
                raise IN_PLACE.violation(f"{name} changed another argument than the logits")

    def _compare(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        expected: torch.Tensor,
        dtype: torch.dtype,
        what: str,
        rounded: torch.dtype | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Check a function's result, that x is left alone, and each row alone.

        Args:
            function: a function of x.
            x: its argument.
            expected: its result.
            dtype: dtype of the result.
            what: it is, for messages.
            rounded: a coarser dtype that results may have been rounded to; None is that of x.
            scale: numbers that errors are relative to, if they are larger than the results.
        """
        kept = x.clone()
        result = function(x)
        if (
            not isinstance(result, torch.Tensor)
            or result.shape != expected.shape
            or result.dtype != dtype
            or result.device != x.device
        ):
            raise RESULT.violation(
                f"{what} returned {_described(result)} for x {list(x.shape)}, expected {dtype} "
                f"{list(expected.shape)} on {x.device}"
            )
        rounded = rounded or x.dtype
        self._check_close(result, expected, what, rounded, scale)
        self._check_kept(x, kept, what, "x")
        for row in range(len(x)):
            alone = function(x[row : row + 1])[0]
            if self.batch_invariant and not torch.equal(alone, result[row]):
                raise ROWS.violation(
                    f"{what}: row {row} of {len(x)} differs by "
                    f"{(alone.double() - result[row].double()).abs().max():.3g} from the same row "
                    f"alone"
                )
            part = None if scale is None else scale[row]
            self._check_close(alone, expected[row], f"{what} of row {row} alone", rounded, part)

    def _check_close(
        self,
        got: torch.Tensor,
        expected: torch.Tensor,
        what: str,
        rounded: torch.dtype | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Check values; see `_compare`."""
        limit = self.tolerance or _TOLERANCES.get(rounded or got.dtype, 1e-5)
        largest = [float(t.abs().max()) for t in (expected, scale) if t is not None]
        difference = (got.double() - expected.double()).abs()
        if not float(difference.max()) <= limit * max(*largest, 1e-3):
            place = divmod(int(difference.nan_to_num(math.inf).argmax()), got.shape[-1])
            raise VALUES.violation(
                f"{what} differs by {float(difference.max()):.3g} at row {place[0]}, column "
                f"{place[1]}: it gave {float(got.reshape(-1, got.shape[-1])[place]):.6g}, the "
                f"formula {float(expected.reshape(-1, got.shape[-1])[place]):.6g}"
            )

    def _check_kept(
        self, got: torch.Tensor, expected: torch.Tensor, what: str, argument: str
    ) -> None:
        if not torch.equal(got, expected):
            raise IN_PLACE.violation(f"{what} changed {argument}")


def _pack_codes(parts: Sequence[AffineCodes], ops: Ops) -> torch.Tensor:
    return ops.pack_codes(parts)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + _EPS).sqrt() * weight.double()


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * x.sigmoid()


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def _row_of(logits: torch.Tensor, row: int) -> str:
    """Return text for a row in a message."""
    left = int((logits[row] > -math.inf).sum())
    return f"row {row} of {len(logits)}, in which {left} of {logits.shape[1]} tokens are left"


def _described(result: object) -> str:
    if isinstance(result, torch.Tensor):
        return f"{result.dtype} {list(result.shape)} on {result.device}"
    return type(result).__name__
