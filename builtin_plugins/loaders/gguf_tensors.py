"""Tensors of GGUF files: parts of them as the blocks that a scheme reads, or as numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch

from hardpoint.plugins import WeightFormat
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedWeight

from .files import refusing_damage

_ROW_BYTES = 1 << 13
_KINDS = gguf.GGMLQuantizationType
_SCHEMES = {
    _KINDS.Q4_0: "q4_0",
    _KINDS.Q4_1: "q4_1",
    _KINDS.Q5_0: "q5_0",
    _KINDS.Q5_1: "q5_1",
    _KINDS.Q8_0: "q8_0",
    _KINDS.Q4_K: "q4_k",
    _KINDS.Q5_K: "q5_k",
    _KINDS.Q6_K: "q6_k",
    _KINDS.IQ4_NL: "iq4_nl",
    _KINDS.IQ4_XS: "iq4_xs",
    _KINDS.Q2_K: "q2_k",
    _KINDS.Q3_K: "q3_k",
    _KINDS.IQ2_XXS: "iq2_xxs",
    _KINDS.IQ2_XS: "iq2_xs",
    _KINDS.IQ2_S: "iq2_s",
    _KINDS.IQ3_XXS: "iq3_xxs",
    _KINDS.IQ3_S: "iq3_s",
    _KINDS.TQ1_0: "tq1_0",
    _KINDS.TQ2_0: "tq2_0",
    _KINDS.MXFP4: "mxfp4_gguf",
}
"""The schemes that read blocks; blocks of other types are dequantized here."""
DTYPES = {_KINDS.F32: "float32", _KINDS.F16: "float16", _KINDS.BF16: "bfloat16"}
"""Types of plain numbers."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, before anything is read.

    Attributes:
        label: names file and tensor in messages.
        kind: type of its numbers.
        data: those, or the bytes of blocks of them, in memory that is mapped; its last dimension
            is a row.
    """

    label: str
    kind: gguf.GGMLQuantizationType
    data: np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        return (*self.data.shape[:-1], self.data.shape[-1] // self._width * self._block)

    @property
    def format(self) -> WeightFormat:
        """How it is stored."""
        scheme, size = self._scheme, self.data.nbytes
        if scheme is None:
            return WeightFormat(DTYPES.get(self.kind) or self.kind.name.lower(), size)
        rows, columns = self.shape
        outline = torch.empty(self.data.shape, dtype=torch.uint8, device="meta")
        stored = QuantizedWeight(scheme, (rows, columns), {"blocks": outline})
        return WeightFormat(scheme, size, is_quantized=True, stored=stored)

    def split(self) -> list[StoredTensor]:
        """Return the matrices of a tensor of several, in its first dimension."""
        return [StoredTensor(self.label, self.kind, matrix) for matrix in self.data]

    def as_matrix(self) -> StoredTensor:
        """Return a vector as a matrix of one row."""
        return StoredTensor(self.label, self.kind, self.data[None])

    def read(self, cut: Cut | None, head_size: int | None) -> torch.Tensor | QuantizedWeight:
        """Return it or a part of it: blocks that a scheme reads, else float32.

        No more is read than the blocks that the part touches, and of permuted matrices the heads.
        Whole rows are returned of blocks that the part divides, or that it has in several parts.

        Args:
            cut: the part; None is all.
            head_size: head size of q or k, with rows permuted by llama.cpp within each head; else
                None.
        """
        scheme = self._scheme
        if scheme is not None and cut is not None and cut.dim and cut.more:
            cut = None
        rows = self._rows(cut, head_size, self.numbers if scheme is None else self._blocks)
        if scheme is None:
            return rows
        columns = rows.shape[1] // self._width * self._block
        return QuantizedWeight(scheme, (len(rows), columns), {"blocks": rows})

    def numbers(self, cut: Cut | None = None) -> torch.Tensor:
        """Return it, or a part of it, in float32."""
        if cut is None:
            return self._dequantize(self.data)
        if cut.start == cut.stop:
            return torch.empty(cut.shape(self.shape))
        if cut.dim < self.data.ndim - 1:
            return self._dequantize(cut.of(self.data))
        first, last = cut.start // self._block, -(-cut.stop // self._block)
        part = self.data[..., first * self._width : last * self._width]
        start = cut.start - first * self._block
        numbers = self._dequantize(np.ascontiguousarray(part))
        return numbers[..., start : start + cut.stop - cut.start]

    @property
    def _scheme(self) -> str | None:
        return _SCHEMES.get(self.kind) if self.data.ndim == 2 else None

    @property
    def _block(self) -> int:
        """Columns of a block; plain numbers are blocks of one."""
        return int(gguf.GGML_QUANT_SIZES[self.kind][0])

    @property
    def _width(self) -> int:
        return int(gguf.GGML_QUANT_SIZES[self.kind][1]) // self.data.itemsize

    def _rows(
        self,
        cut: Cut | None,
        head_size: int | None,
        read: Callable[[Cut | None], torch.Tensor],
    ) -> torch.Tensor:
        """Return the result of `read` for a part, in Hugging Face's order of rows."""
        if cut is not None and cut.more:
            parts = [self._rows(part, head_size, read) for part in cut.parts]
            return torch.cat(parts, cut.dim)
        if head_size is None:
            return read(cut)
        if cut is None or cut.dim:
            return _unpermute(read(cut), head_size)
        start = cut.start // head_size * head_size  # whole heads
        stop = -(-cut.stop // head_size) * head_size
        heads = _unpermute(read(Cut(0, start, stop)), head_size)
        return heads[cut.start - start : cut.stop - start]

    def _blocks(self, cut: Cut | None) -> torch.Tensor:
        """Return the blocks of a matrix as bytes, uint8 [rows, bytes].

        Of a cut of columns that divides blocks, the whole rows.
        """
        data = self.data
        if cut is not None and not cut.dim:
            data = cut.of(data)
        elif cut is not None and not (cut.start % self._block or cut.stop % self._block):
            start, stop = (end // self._block * self._width for end in (cut.start, cut.stop))
            data = data[:, start:stop]
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of read-only memory
            return torch.from_numpy(data)

    def _dequantize(self, data: np.ndarray[Any, Any]) -> torch.Tensor:
        with refusing_damage(self.label):
            array = gguf.quants.dequantize(_with_long_rows(data), self.kind)
            is_owned = array.flags.writeable and array.base is None
            flat = torch.from_numpy(array if is_owned else array.copy())
        return flat.reshape(*data.shape[:-1], -1)


def stored_tensor(tensor: gguf.ReaderTensor, source: str) -> StoredTensor:
    """Return a tensor of the file called `source`."""
    data = np.asarray(tensor.data)  # slicing the memory map itself is slow
    return StoredTensor(f"{source}: tensor {tensor.name}", tensor.tensor_type, data)


def _with_long_rows(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Reshape quantized blocks into fewer, longer rows."""
    # The library dequantizes 16 rows at a time.
    if data.ndim == 1 or data.dtype != np.uint8:
        return data
    count, width = math.prod(data.shape[:-1]), data.shape[-1]
    merged = 1
    while count % (2 * merged) == 0 and 2 * merged * width <= _ROW_BYTES:
        merged *= 2
    return data.reshape(count // merged, merged * width)


def _unpermute(weight: torch.Tensor, head_size: int) -> torch.Tensor:
    """Undo llama.cpp's permutation of the rows of heads of q and k, in weights and biases."""
    # The inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py, which interleaves
    # the two halves of each head for its kind of RoPE.
    pairs = weight.reshape(len(weight) // head_size, head_size // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
