"""The embedding table of a model, divided by rows among the ranks of a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hardpoint.plugins.model import ModelContext
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import AffineCodes, QuantizedMatrix

from .layer import packed_tensor


class Embedding:
    """An embedding table with its rows divided among the ranks of a stage (vocabulary parallel).

    If the rows do not divide, the last ranks' tables have rows of zeros for the missing ones.
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
            self._use_table(packed_tensor(tensors, self._name, self._shape, self._context))
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

    def changed(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens [tokens, hidden_size] as step parts change them.

        Called with the input of the first layer, so after a scale.
        """
        change = self._context.hooks.embedded
        return embedded if change is None else change(embedded)

    def _use_table(self, weight: torch.Tensor) -> None:
        gather_rows = self._context.ops.gather_rows
        self._weight, self._codes = weight, None
        self._rows = lambda ids: gather_rows(weight, ids)

    def _use_codes(self, codes: torch.Tensor) -> bool:
        self._rows = self._context.ops.embedding(codes, self._shape)
        self._codes = None if self._rows is None else codes
        return self._codes is not None
