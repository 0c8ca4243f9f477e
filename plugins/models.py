"""Building blocks of models: layers with weights under Hugging Face names, in the fastest layout.

Importing this module loads torch, which importing `hardpoint.plugins` does not. A layer has the
shapes of its checkpoint tensors (`shapes`) and loads them one at a time in any order (`load`).
Tensors that are used together are fused as they arrive, so loading needs little more memory than
the loaded model.

A layer of a model that several ranks share (`ModelContext.parallel`) has the part of its tensors
that its rank needs (`cuts`), and exchanges results with the other ranks where it must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from .hf_config import ConfigFields
from .model import ModelContext
from .parallel import Cut
from .quantization import AffineCodes, QuantizedMatrix

__all__ = [
    "ConfigFields",
    "Embedding",
    "LMHead",
    "Layer",
    "Linear",
    "PackedLayer",
    "QuantizableLayer",
    "RMSNorm",
    "load_packed",
    "load_weights",
    "packed_weights",
    "quantizable",
    "weight_cuts",
    "weight_shapes",
]


class Layer(Protocol):
    """A part of a model that has checkpoint tensors."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the layer's tensors by Hugging Face name."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one tensor; called once for each name."""


class PackedLayer(Layer, Protocol):
    """A layer whose loaded tensors can be kept in the weight cache."""

    def packed(self) -> dict[str, torch.Tensor] | None:
        """Return what the layer has made of its tensors, under names that no other layer has.

        None if that is something else than tensors.
        """

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what `packed` returned, among the tensors of other layers.

        Raises:
            KeyError, ValueError: a tensor is missing, or not what it should be.
        """


@runtime_checkable
class QuantizableLayer(Protocol):
    """A layer with matrices that may have few bits."""

    def quantizable(self) -> Iterable[str]:
        """Return their names."""

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load one, in the place of its tensor."""


def weight_shapes(layers: Iterable[Layer]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of some layers, for `Model.weight_shapes`."""
    return {name: shape for layer in layers for name, shape in layer.shapes().items()}


def weight_cuts(layers: Iterable[Layer]) -> dict[str, Cut]:
    """Return the cuts of all tensors of some layers, for `Model.weight_cuts`.

    A layer without a method `cuts` needs its tensors whole.
    """
    return {
        name: cut
        for layer in layers
        if (cuts := getattr(layer, "cuts", None)) is not None
        for name, cut in cuts().items()
    }


def load_weights(layers: Iterable[Layer], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load each tensor into the layer that has it, for `Model.load_weights`.

    Raises:
        KeyError: no layer has a tensor of that name.
    """
    owners = {name: layer for layer in layers for name in layer.shapes()}
    for name, tensor in weights:
        owners[name].load(name, tensor)


def quantizable(layers: Iterable[Layer]) -> dict[str, QuantizableLayer]:
    """Return the layers of matrices that may have few bits, by name, for `Model.quantizable`.

    They are those of layers with a method `load_quantized`.
    """
    return {
        name: layer
        for layer in layers
        if isinstance(layer, QuantizableLayer)
        for name in layer.quantizable()
    }


def packed_weights(layers: Iterable[PackedLayer]) -> dict[str, torch.Tensor] | None:
    """Return what some layers have made of their tensors, for `Model.packed_weights`.

    None if a layer has something else than tensors.
    """
    packed: dict[str, torch.Tensor] = {}
    for layer in layers:
        if (tensors := layer.packed()) is None:
            return None
        packed |= tensors
    return packed


def load_packed(layers: Iterable[PackedLayer], tensors: Mapping[str, torch.Tensor]) -> None:
    """Load what `packed_weights` returned for the same layers, for `Model.load_packed`.

    Raises:
        KeyError, ValueError: a tensor is missing, not what it should be, or of no layer.
    """
    layers = list(layers)
    for layer in layers:
        layer.load_packed(tensors)
    if unknown := tensors.keys() - (packed_weights(layers) or {}).keys():
        raise ValueError(f"no layer has the tensors {', '.join(sorted(unknown)[:3])}")


def _packed_tensor(
    tensors: Mapping[str, torch.Tensor],
    name: str,
    shape: tuple[int, ...],
    context: ModelContext,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a tensor of `dtype`, None is the model's, on the model's device.

    Raises:
        KeyError, ValueError: it is missing, or has another shape or dtype.
    """
    tensor = tensors[name]
    dtype = dtype or context.dtype
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.to(context.device)


class RMSNorm:
    """Root mean square layer normalisation (Zhang and Sennrich, 2019), summed in float32."""

    def __init__(
        self, name: str, size: int, eps: float, context: ModelContext, *, offset: float = 0.0
    ) -> None:
        """Describe the norm.

        Args:
            name: the Hugging Face name without `.weight`.
            size: the last dimension.
            eps: is added to the mean square.
            context: of the model.
            offset: is added to the weight; the sum is kept in float32.
        """
        self._name = f"{name}.weight"
        self._shape = (size,)
        self._eps = eps
        self._offset = offset
        self._normalise, self._add = context.ops.rms_norm, context.ops.add_rms_norm
        self._context = context
        dtype = torch.float32 if offset else context.dtype
        self._weight = torch.empty(0, dtype=dtype, device=context.device)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the weight's shape."""
        return {self._name: self._shape}

    def load(self, name: str, tensor: torch.Tensor) -> None:  # noqa: ARG002 - it has only one
        """Load the weight."""
        self._weight = self._weight.new_empty(self._shape).copy_(tensor)
        if self._offset:
            self._weight += self._offset

    def packed(self) -> dict[str, torch.Tensor]:
        """Return the weight."""
        return {self._name: self._weight}

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the weight."""
        dtype = self._weight.dtype
        self._weight = _packed_tensor(tensors, self._name, self._shape, self._context, dtype)

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [..., size], normalised over its last dimension.

        Args:
            x: what is normalised.
            delta: is added to x first, in place: the residual connection; both [rows, size].
        """
        if delta is None:
            return self._normalise(x, self._weight, self._eps)
        return self._add(x, delta, self._weight, self._eps)


class Embedding:
    """An embedding table, whose rows the ranks of a stage divide, and whose results they add up.

    If the rows do not divide, the last ranks' tables have rows of zeros for those that are missing.
    """

    def __init__(self, name: str, rows: int, columns: int, context: ModelContext) -> None:
        """`name` is the Hugging Face name without `.weight`; `rows` and `columns` of all of it."""
        self._name = f"{name}.weight"
        self._packed_name = f"{name}.packed"
        self._whole = (rows, columns)
        self._context = context
        self._communicator = context.parallel.tensor
        self._share = context.parallel.padded_share(rows)
        self._shape = (-(-rows // self._communicator.size), columns)
        self._weight = torch.empty(0, dtype=context.dtype, device=context.device)
        self._codes: torch.Tensor | None = None
        self._rows: Callable[[torch.Tensor], torch.Tensor] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the table's shape."""
        return {self._name: self._whole}

    def cuts(self) -> dict[str, Cut]:
        """Return which rows this rank has."""
        if self._communicator.size == 1:
            return {}
        return {self._name: Cut(0, self._share.start, self._share.stop)}

    def quantizable(self) -> list[str]:
        """Return the table's name."""
        return [self._name]

    def load(self, name: str, tensor: torch.Tensor) -> None:  # noqa: ARG002 - it has only one
        """Load the table."""
        weight = self._weight.new_empty(self._shape)
        weight[: len(tensor)].copy_(tensor)
        weight[len(tensor) :] = 0
        self._use_table(weight)

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load the table; it stays small if the operations can read rows of it."""
        ops = self._context.ops
        if isinstance(matrix, AffineCodes) and matrix.bits in ops.code_bits:
            codes = ops.pack_codes([matrix.padded(self._shape[0])])
            if self._use_codes(codes):
                return
        self.load(name, matrix.dequantize())

    def packed(self) -> dict[str, torch.Tensor]:
        """Return the table."""
        if self._codes is not None:
            return {self._packed_name: self._codes}
        return {self._name: self._weight}

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the table."""
        codes = tensors.get(self._packed_name)
        if codes is None:
            self._use_table(_packed_tensor(tensors, self._name, self._shape, self._context))
        elif not self._use_codes(codes.to(self._context.device)):
            raise ValueError(f"{self._packed_name}: its rows cannot be read")

    def pack(self) -> torch.Tensor:
        """Return the table in the layout of `Ops.linear`.

        Raises:
            RuntimeError: it was not loaded.
        """
        if self._rows is None:
            raise RuntimeError(f"weights were not loaded: {self._name}")
        return self._context.ops.pack(self._weight) if self._codes is None else self._codes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [tokens, columns] for token_ids [tokens].

        Raises:
            RuntimeError: the table was not loaded.
        """
        if self._rows is None:
            raise RuntimeError(f"weights were not loaded: {self._name}")
        if self._communicator.size == 1:
            return self._rows(token_ids)
        places = token_ids - self._share.start
        is_elsewhere = (places < 0) | (places >= len(self._share))
        rows = self._rows(places.masked_fill(is_elsewhere, 0))
        return self._communicator.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def _use_table(self, weight: torch.Tensor) -> None:
        gather_rows = self._context.ops.gather_rows
        self._weight, self._codes = weight, None
        self._rows = lambda ids: gather_rows(weight, ids)

    def _use_codes(self, codes: torch.Tensor) -> bool:
        """Use a packed table; return whether its rows can be read."""
        self._rows = self._context.ops.embedding(codes, self._shape)
        self._codes = None if self._rows is None else codes
        return self._codes is not None


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

    def __init__(  # noqa: PLR0913 - it says all of what a matrix is
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
        stored_as: str | None = None,
    ) -> None:
        """Describe the matrix; `load` loads it.

        Args:
            parts: (Hugging Face name without `.weight`, rows), stacked in this order.
            columns: of W.
            context: of the model.
            bias: whether there is a b.
            out_dtype: of y; None is the context's.
            row_ranges: of each part, the rows that this rank has; its y has these alone, part
                after part. None is all.
            column_range: the columns of W that this rank has; its x has these alone. The bias is
                read whole, and added once. None is all.
            reduce: whether y is the sum over the ranks that have columns of W; otherwise the
                caller adds up their parts.
            quantize: whether the matrix may have few bits.
            stored_as: name without `.weight` of the one checkpoint matrix that has all parts,
                stacked; those of the parts are not used then.
        """
        self._context = context
        self._out_dtype = out_dtype
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
        start = 0
        for name, rows, mine in stored:
            self._add(f"{name}.weight", (rows, columns), start, mine)
            if column_range is not None and len(column_range) < columns:
                cut = Cut(1, column_range.start, column_range.stop)
                self._cuts[f"{name}.weight"] = cut
            if bias:
                self._add(f"{name}.bias", (rows,), start, mine)
            start += sum(map(len, mine))
        self._rows = start
        self._missing = set(self._slices)
        self._quantizable = [n for n in self._slices if quantize and n.endswith(".weight")]
        self._matrices: dict[str, QuantizedMatrix] = {}
        self._packed: dict[str, torch.Tensor] | None = {}
        self._bias_name = f"{stored[0][0]}.packed_bias"
        self._has_bias = bias

    def _add(self, name: str, whole: tuple[int, ...], start: int, mine: Sequence[range]) -> None:
        """Add a tensor, of which this rank has the rows `mine`, from row `start` of the matrix."""
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
        """Return what this rank has of them."""
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
            bias = _packed_tensor(tensors, self._bias_name, (self._rows,), self._context)
        self._prepare(packed, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows of x, rows of W] for x [rows, columns].

        Raises:
            RuntimeError: a part was not loaded.
        """
        if self._apply is None:
            raise RuntimeError(f"weights were not loaded: {', '.join(sorted(self._missing))}")
        y = self._apply(x)
        return self._context.parallel.tensor.all_reduce(y) if self._reduces else y

    def _loaded(self, name: str) -> None:
        """Prepare the product once all parts are there."""
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
        """Return the first row of each matrix, by the name of a packed one that starts with it."""
        return {
            f"{name.removesuffix('.weight')}.packed": start
            for name, (start, _) in self._slices.items()
            if name.endswith(".weight")
        }

    def _runs(self) -> dict[str, Run]:
        """Return the matrices in their order, those together that one product can multiply.

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
        own: dict[str, Product] = {}
        for name, run in runs.items():
            if isinstance(run, QuantizedMatrix):
                start = ranges[name].start
                rows = range(start, start + run.shape[0])
                product = run.linear(
                    self._bias_of(rows, self._bias), self._out_dtype or self._context.dtype
                )
                if product is not None:
                    own[name] = product
                    ranges[name] = rows
        packed = {
            name: self._pack(run, len(ranges[name]))
            for name, run in runs.items()
            if name not in own
        }
        if not own:
            self._prepare(packed, self._bias)
            return
        products = [
            own[name] if name in own else self._product(packed[name], rows, self._bias)
            for name, rows in ranges.items()
        ]
        self._apply = self._side_by_side(products, sum(map(len, ranges.values())))
        self._packed = None

    def _pack(self, run: Run, rows: int) -> torch.Tensor:
        """Return a packed run, of `rows`: those that it lacks are zeros."""
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
        """Prepare the product of packed matrices, by name; the bias is that of all."""
        ranges = self._ranges(packed)
        products = [self._product(packed[name], rows, bias) for name, rows in ranges.items()]
        self._apply = self._side_by_side(products, self._rows if products else 0)
        self._packed = packed if bias is None else {**packed, self._bias_name: bias}

    def _product(self, packed: torch.Tensor, rows: range, bias: torch.Tensor | None) -> Product:
        shape = (len(rows), self._columns)
        bias = self._bias_of(rows, bias)
        return self._context.ops.linear(packed, shape, bias, out_dtype=self._out_dtype)

    def _bias_of(self, rows: range, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the bias of some rows; None if there is none, or another rank adds it."""
        if bias is None or not self._adds_bias or len(rows) == len(bias):
            return bias if self._adds_bias else None
        return bias[rows.start : rows.stop].clone()

    def _side_by_side(self, products: list[Product], rows: int) -> Product:
        """Return the product whose results are those of some, and zeros after their `rows`."""
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
    """Return a matrix in which others are stacked: its name, its rows, and those of `ranges`.

    Args:
        name: of the matrix.
        rows: of the others.
        ranges: of rows of each of the others.
    """
    starts = [sum(rows[:index]) for index in range(len(rows))]
    shifted = zip(starts, ranges, strict=True)
    return name, sum(rows), [range(s + mine.start, s + mine.stop) for s, mine in shifted]


class LMHead(Linear):
    """The matrix that gives logits, float32, whose rows the ranks of a stage divide.

    Each rank computes the logits of its rows, and gets those of all.
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
