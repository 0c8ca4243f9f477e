"""Matrix products of a model: several checkpoint tensors fused to one, and the LM head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from hardpoint.plugins.model import LinearMatrix, ModelContext
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import AffineCodes, QuantizedMatrix

from .embedding import Embedding
from .layer import packed_tensor

Run = torch.Tensor | QuantizedMatrix | list[AffineCodes]
"""Matrices that one product multiplies: numbers, a matrix that multiplies itself, or codes."""
Product = Callable[[torch.Tensor], torch.Tensor]
"""x -> x W^T + b."""


class Linear:
    """y = x W^T + b, where W is one or more checkpoint matrices stacked by rows.

    Where several ranks share it, each has some rows of every part, and computes these columns of y
    (`row_ranges`), or some columns, and adds up y with the others (`column_range`): the first kind
    exchanges nothing, and its y is the x of the second kind. Each rank's y is rounded to the
    context's dtype before it is added.
    """

    def __init__(  # noqa: PLR0913 - all that describes a matrix
        self,
        parts: Sequence[tuple[str, int]],
        columns: int,
        context: ModelContext,
        *,
        bias: bool = False,
        out_dtype: torch.dtype | None = None,
        row_ranges: Sequence[range] | None = None,
        column_range: range | None = None,
        reduce: bool = True,
        quantize: bool = True,
        is_hooked: bool = True,
        stored_as: str | None = None,
    ) -> None:
        """Describe the matrix; `load` loads it.

        Args:
            parts: (Hugging Face name without `.weight`, rows), stacked in this order.
            columns: number of columns of W.
            bias: whether there is a b.
            out_dtype: dtype of y; None is the context's.
            row_ranges: the rows of each part that this rank has; its y has these alone, part
                after part. None is all.
            column_range: the columns of W that this rank has; its x has these alone. The bias is
                read whole, and added once. None is all.
            reduce: whether y is the sum over the ranks that have columns of W; otherwise the
                caller adds up their parts.
            quantize: whether the matrix may be quantized.
            is_hooked: whether step parts may change its product, as adapters do.
            stored_as: name without `.weight` of the one checkpoint matrix that has all parts,
                stacked; the parts' own names are not used then.
        """
        self._context = context
        self._hooks = context.hooks
        self._bias: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None
        self._apply: Product | None = None
        self._slices: dict[str, tuple[int, int]] = {}
        self._whole: dict[str, tuple[int, ...]] = {}
        self._cuts: dict[str, Cut] = {}
        self._columns = columns if column_range is None else len(column_range)
        is_cut = column_range is not None and context.parallel.tensor.size > 1
        self._reduces = reduce and is_cut
        self._adds_bias = not is_cut or context.parallel.tensor.rank == 0  # once in the sum
        ranges = [range(rows) for _, rows in parts] if row_ranges is None else row_ranges
        stored = [(name, rows, [mine]) for (name, rows), mine in zip(parts, ranges, strict=True)]
        if stored_as is not None:
            stored = [_stacked(stored_as, [rows for _, rows in parts], ranges)]
        self._rows = self._add_all(stored, columns, column_range, bias=bias)
        hooked = zip(parts, ranges, strict=True) if is_hooked else ()
        self._parts = [(name, len(mine)) for (name, _), mine in hooked]
        self._add_to_hooks(stored, columns, column_range)
        self._missing = set(self._slices)
        self._quantizable = [n for n in self._slices if quantize and n.endswith(".weight")]
        self._matrices: dict[str, QuantizedMatrix] = {}
        self._packed: dict[str, torch.Tensor] | None = {}
        self._bias_name = f"{stored[0][0]}.packed_bias"
        self._out_dtype, self._has_bias = out_dtype, bias

    def _add_all(
        self,
        stored: Sequence[tuple[str, int, Sequence[range]]],
        columns: int,
        column_range: range | None,
        *,
        bias: bool,
    ) -> int:
        start = 0
        for name, rows, mine in stored:
            self._add(f"{name}.weight", (rows, columns), start, mine)
            if column_range is not None and len(column_range) < columns:
                cut = Cut(1, column_range.start, column_range.stop)
                self._cuts[f"{name}.weight"] = cut
            if bias:
                self._add(f"{name}.bias", (rows,), start, mine)
            start += sum(map(len, mine))
        return start

    def _add_to_hooks(
        self,
        stored: Sequence[tuple[str, int, Sequence[range]]],
        columns: int,
        column_range: range | None,
    ) -> None:
        places = [(name, rows, mine) for name, rows, several in stored for mine in several]
        for (name, _), (place, rows, mine) in zip(self._parts, places, strict=False):
            shape, local_columns = (rows, columns), column_range or range(columns)
            self._hooks.matrices[name] = LinearMatrix(place, shape, mine, local_columns)

    def _add(self, name: str, whole: tuple[int, ...], start: int, mine: Sequence[range]) -> None:
        count = sum(map(len, mine))
        self._slices[name] = (start, count)
        self._whole[name] = whole
        if count < whole[0]:
            (first, last), *more = ((rows.start, rows.stop) for rows in mine)
            self._cuts[name] = Cut(0, first, last, tuple(more))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parts."""
        return self._whole

    def cuts(self) -> dict[str, Cut]:
        """Return the cut of each part that this rank has."""
        return self._cuts

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one part; the last one makes the layer ready."""
        start, count = self._slices[name]
        if name.endswith(".weight"):
            if self._weight is None:
                self._weight = self._empty(self._rows, self._columns)
            self._weight[start : start + count].copy_(tensor)
        else:
            if self._bias is None:
                self._bias = self._empty(self._rows)
            self._bias[start : start + count].copy_(tensor)
        self._loaded(name)

    def quantizable(self) -> list[str]:
        """Return the names of the matrices."""
        return self._quantizable

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load one matrix; the last part makes the layer ready."""
        self._matrices[name] = matrix
        self._loaded(name)

    def packed(self) -> dict[str, torch.Tensor] | None:
        """Return the packed matrix, and the bias if there is one.

        Several, if one product cannot multiply all parts: each has the name of its first part. None
        if a part multiplies itself.
        """
        return self._packed

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the packed matrices and the bias."""
        packed = {
            name: tensors[name].to(self._context.device)
            for name in self._starts()
            if name in tensors
        }
        bias = None
        if self._has_bias:
            bias = packed_tensor(tensors, self._bias_name, (self._rows,), self._context)
        self._prepare(packed, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows of x, rows of W] for x [rows, columns].

        Raises:
            RuntimeError: a part was not loaded.
        """
        if self._apply is None:
            raise RuntimeError(f"weights were not loaded: {', '.join(sorted(self._missing))}")
        y = self._apply(x)
        if self._parts and (change := self._hooks.linear) is not None:
            y = change(self._parts, x, y)
        return self._context.parallel.tensor.all_reduce(y) if self._reduces else y

    def _loaded(self, name: str) -> None:
        self._missing.discard(name)
        if self._missing:
            return
        if not self._matrices:
            assert self._weight is not None
            (name, *_) = self._starts()
            self._prepare({name: self._context.ops.pack(self._weight)}, self._bias)
        else:
            self._prepare_runs(self._runs())
        self._weight = self._bias = None
        self._matrices = {}
        self._missing = set(self._slices)  # they may be loaded again

    def _starts(self) -> dict[str, int]:
        return {
            f"{name.removesuffix('.weight')}.packed": start
            for name, (start, _) in self._slices.items()
            if name.endswith(".weight")
        }

    def _runs(self) -> dict[str, Run]:
        """Return the matrices in order, grouped into runs that one product can multiply.

        They have the names that they are packed under.
        """
        runs: dict[str, Run] = {}
        last: Run | None = None
        for packed_name in self._starts():
            name = f"{packed_name.removesuffix('.packed')}.weight"
            start, count = self._slices[name]
            if not count:
                continue
            matrix = self._matrices.get(name)
            if matrix is None:
                assert self._weight is not None
                last = self._weight[start : start + count]
            elif not isinstance(matrix, AffineCodes):
                last = matrix
            elif isinstance(last, list):
                last.append(matrix)
                continue
            else:
                last = [matrix]
            runs[packed_name] = last
        return runs

    def _prepare_runs(self, runs: dict[str, Run]) -> None:
        """Prepare a product per run: of itself where it has one, else of a packed matrix."""
        ranges = self._ranges(runs)
        direct_products: dict[str, Product] = {}
        for name, run in runs.items():
            if isinstance(run, QuantizedMatrix):
                start = ranges[name].start
                rows = range(start, start + run.shape[0])
                product = run.linear(
                    self._bias_of(rows, self._bias), self._out_dtype or self._context.dtype
                )
                if product is not None:
                    direct_products[name] = product
                    ranges[name] = rows
        packed = {
            name: self._pack(run, len(ranges[name]))
            for name, run in runs.items()
            if name not in direct_products
        }
        if not direct_products:
            self._prepare(packed, self._bias)
            return
        products = [
            direct_products[name]
            if name in direct_products
            else self._product(packed[name], rows, self._bias)
            for name, rows in ranges.items()
        ]
        self._apply = self._side_by_side(products, sum(map(len, ranges.values())))
        self._packed = None

    def _pack(self, run: Run, rows: int) -> torch.Tensor:
        """Return a packed run of `rows` rows; missing rows are zeros."""
        ops = self._context.ops
        if isinstance(run, list):
            missing = rows - sum(part.shape[0] for part in run)
            return ops.pack_codes([*run[:-1], run[-1].padded(run[-1].shape[0] + missing)])
        if isinstance(run, QuantizedMatrix):
            run = run.dequantize()
        numbers = run.to(self._context.device, self._context.dtype)
        if len(numbers) == rows:
            return ops.pack(numbers)
        weight = self._empty(rows, self._columns)
        weight[: len(numbers)].copy_(numbers)
        return ops.pack(weight)

    def _ranges(self, names: Iterable[str]) -> dict[str, range]:
        """Return the rows of packed matrices that have all rows.

        Raises:
            KeyError, ValueError: some rows are in none.
        """
        starts, names = self._starts(), list(names)
        if not names:
            if any(count for _, count in self._slices.values()):
                raise KeyError(next(iter(starts)))
            return {}
        if starts[names[0]]:
            raise ValueError(f"{names[0]}: rows 0 to {starts[names[0]]} are in no matrix")
        ends = [*(starts[name] for name in names[1:]), self._rows]
        return {name: range(starts[name], end) for name, end in zip(names, ends, strict=True)}

    def _prepare(self, packed: dict[str, torch.Tensor], bias: torch.Tensor | None) -> None:
        """Prepare the product of packed matrices, by name, with the bias of all rows."""
        ranges = self._ranges(packed)
        products = [self._product(packed[name], rows, bias) for name, rows in ranges.items()]
        self._apply = self._side_by_side(products, self._rows if products else 0)
        self._packed = packed if bias is None else {**packed, self._bias_name: bias}

    def _product(self, packed: torch.Tensor, rows: range, bias: torch.Tensor | None) -> Product:
        shape = (len(rows), self._columns)
        bias = self._bias_of(rows, bias)
        return self._context.ops.linear(packed, shape, bias, out_dtype=self._out_dtype)

    def _bias_of(self, rows: range, bias: torch.Tensor | None) -> torch.Tensor | None:
        if bias is None or not self._adds_bias or len(rows) == len(bias):
            return bias if self._adds_bias else None
        return bias[rows.start : rows.stop].clone()

    def _side_by_side(self, products: list[Product], rows: int) -> Product:
        missing = self._rows - rows  # of the last ranks of a divided vocabulary
        if len(products) == 1 and not missing:
            return products[0]
        dtype = self._out_dtype or self._context.dtype

        def apply(x: torch.Tensor) -> torch.Tensor:
            parts = [product(x) for product in products]
            if missing or not parts:
                parts.append(x.new_zeros((len(x), missing), dtype=dtype))
            return torch.cat(parts, 1)

        return apply

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._context.dtype, device=self._context.device)


def _stacked(
    name: str, rows: Sequence[int], ranges: Sequence[range]
) -> tuple[str, int, list[range]]:
    """Return the name, the number of rows, and the ranges of `ranges` in a stacked matrix.

    Args:
        name: name of the matrix.
        ranges: ranges of rows of each of the others.
    """
    starts = [sum(rows[:index]) for index in range(len(rows))]
    shifted = zip(starts, ranges, strict=True)
    return name, sum(rows), [range(s + mine.start, s + mine.stop) for s, mine in shifted]


class LMHead(Linear):
    """The output projection to logits, float32; the ranks of a stage divide its rows.

    Each rank computes the logits of its rows, and gets the logits of all.
    """

    def __init__(self, name: str, vocab_size: int, columns: int, context: ModelContext) -> None:
        """`name` is the Hugging Face name without `.weight`."""
        self._vocab_size = vocab_size
        self._communicator = context.parallel.tensor
        share = context.parallel.padded_share(vocab_size)
        super().__init__(
            [(name, vocab_size)],
            columns,
            context,
            out_dtype=torch.float32,
            row_ranges=[share],
        )
        del context.hooks.matrices[name]  # `forward` does not multiply it
        self._rows = -(-vocab_size // self._communicator.size)  # the same in all ranks

    def tie(self, table: Embedding) -> None:
        """Use an embedding's table, which is loaded, as the matrix."""
        (name,) = self._starts()
        self._prepare({name: table.pack()}, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] for hidden states x [rows, columns]."""
        logits = super().__call__(x)
        if self._communicator.size == 1:
            return logits
        parts = self._communicator.all_gather(logits.contiguous())  # [ranks, rows, part of vocab]
        return parts.transpose(0, 1).flatten(1)[:, : self._vocab_size].contiguous()

    def _empty(self, *shape: int) -> torch.Tensor:
        return super()._empty(*shape).zero_()  # the rows that are missing in the last ranks
