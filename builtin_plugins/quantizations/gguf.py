"""The blocks of GGUF files (llama.cpp's ggml-common.h), as they are on disk."""

from __future__ import annotations

from typing import ClassVar

import torch

from hardpoint.plugins import Quantization
from hardpoint.plugins.quantization import AffineCodes, QuantizedWeight


class _Blocks(Quantization):
    """Common to all: rows of blocks, each of some columns."""

    contract = 1
    columns: ClassVar[int] = 32
    """Columns of a block."""
    size: ClassVar[int]
    """Bytes of a block."""

    def read(self, stored: QuantizedWeight) -> AffineCodes:
        """Return the codes and scales of the tensor "blocks", uint8 [rows, bytes].

        Raises:
            ValueError: it has another shape.
        """
        rows, columns = stored.shape
        if columns % self.columns:
            raise ValueError(f"expected blocks of {self.columns} columns, got {columns} columns")
        expected = rows, columns // self.columns * self.size
        blocks = stored.tensor("blocks", torch.uint8, expected)
        return self.split(blocks.reshape(rows, -1, self.size))

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return the codes and scales of blocks [rows, blocks of a row, bytes of a block]."""
        raise NotImplementedError

    def stored_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of the blocks, which take as many in memory."""
        return shape[0] * -(-shape[1] // self.columns) * self.size


class Q4_0(_Blocks):  # noqa: N801 - the name of the format
    """A scale and 32 codes of four bits, less 8."""

    contract = 1
    size = 18

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes and scales."""
        values = torch.arange(-8.0, 8.0)
        return AffineCodes(_nibbles(blocks[..., 2:]), 4, 32, _halves(blocks, 0), values=values)


class Q4_1(_Blocks):  # noqa: N801
    """A scale, a minimum and 32 codes of four bits."""

    contract = 1
    size = 20

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, scales and minima."""
        scales, minima = _halves(blocks, 0), _halves(blocks, 2)
        return AffineCodes(_nibbles(blocks[..., 4:]), 4, 32, scales, minima)


class Q8_0(_Blocks):  # noqa: N801
    """A scale and 32 codes of eight bits."""

    contract = 1
    size = 34

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes and scales."""
        codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
        return AffineCodes(codes, 8, 32, _halves(blocks, 0))


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at a place in each block, [rows, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return numbers of four bits, [rows, codes]: in each block, low halves of bytes first."""
    return torch.stack([packed & 15, packed >> 4], 2).flatten(1)
