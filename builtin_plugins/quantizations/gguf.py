"""The blocks of GGUF files (llama.cpp's ggml-common.h), as they are on disk."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from hardpoint.plugins import Quantization
from hardpoint.plugins.quantization import AffineCodes, QuantizedWeight

_IQ4_VALUES = (
    *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
    *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)


class Blocks(Quantization):
    """Common to all: rows of blocks, each of some columns."""

    contract = 1
    columns: ClassVar[int] = 32
    """Columns of a block."""
    size: ClassVar[int]
    """Bytes of a block."""

    def check(self, stored: QuantizedWeight) -> None:
        """Check the tensor "blocks", uint8 [rows, bytes].

        Raises:
            ValueError: it is missing, or has another dtype or shape.
        """
        self._blocks(stored)

    def read(self, stored: QuantizedWeight) -> AffineCodes:
        """Return the codes and scales of the tensor "blocks", uint8 [rows, bytes].

        Raises:
            ValueError: it is missing, or has another dtype or shape.
        """
        blocks, rows = self._blocks(stored), stored.shape[0]
        return self.split(blocks.reshape(rows, blocks.shape[1] // self.size, self.size))

    @abstractmethod
    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return the codes and scales of blocks [rows, blocks of a row, bytes of a block]."""

    def alignment(self, shape: tuple[int, int], stored: QuantizedWeight | None = None) -> int:  # noqa: ARG002
        """Return the columns of a block; a row with one scale can be cut anywhere."""
        return 1 if shape[1] == self.columns == 32 else self.columns

    def stored_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of the blocks, which take as many in memory."""
        return shape[0] * -(-shape[1] // self.columns) * self.size

    def _blocks(self, stored: QuantizedWeight) -> torch.Tensor:
        rows, columns = stored.shape
        if columns % self.columns:
            raise ValueError(f"expected blocks of {self.columns} columns, got {columns} columns")
        expected = rows, columns // self.columns * self.size
        return stored.tensor("blocks", torch.uint8, expected)


class Q4_0(Blocks):  # noqa: N801 - the name of the format
    """A scale and 32 codes of four bits, less 8."""

    contract = 1
    size = 18

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes and scales."""
        codes = nibbles(blocks[..., 2:], 16).flatten(1)
        return AffineCodes(codes, 4, 32, halves(blocks, 0), values=torch.arange(-8.0, 8.0))


class Q4_1(Blocks):  # noqa: N801
    """A scale, a minimum and 32 codes of four bits."""

    contract = 1
    size = 20

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, scales and minima."""
        codes = nibbles(blocks[..., 4:], 16).flatten(1)
        return AffineCodes(codes, 4, 32, halves(blocks, 0), halves(blocks, 2))


class Q5_0(Blocks):  # noqa: N801
    """A scale, the fifth bits and the lower four bits of 32 codes, less 16."""

    contract = 1
    size = 22

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes and scales."""
        codes = _five_bits(blocks[..., 6:], blocks[..., 2:6])
        return AffineCodes(codes, 5, 32, halves(blocks, 0), values=torch.arange(-16.0, 16.0))


class Q5_1(Blocks):  # noqa: N801
    """A scale, a minimum, the fifth bits and the lower four bits of 32 codes."""

    contract = 1
    size = 24

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, scales and minima."""
        codes = _five_bits(blocks[..., 8:], blocks[..., 4:8])
        return AffineCodes(codes, 5, 32, halves(blocks, 0), halves(blocks, 2))


class IQ4_NL(Blocks):  # noqa: N801
    """A scale and 32 codes of four bits, which stand for numbers that are not equally far apart."""

    contract = 1
    size = 18

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes and scales."""
        codes = nibbles(blocks[..., 2:], 16).flatten(1)
        return AffineCodes(codes, 4, 32, halves(blocks, 0), values=torch.tensor(_IQ4_VALUES))


class IQ4_XS(Blocks):  # noqa: N801
    """An outer scale, 8 scales of six bits less 32, and 256 codes as in IQ4_NL."""

    contract = 1
    columns = 256
    size = 136

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, scales and outer scales."""
        rows, count, _ = blocks.shape
        codes = nibbles(blocks[..., 8:].reshape(rows, count * 8, 16), 16).flatten(1)
        scales = nibbles(blocks[..., 4:8], 1).view(rows, count, 8)
        for index in range(8):  # the upper two bits are in two bytes
            high = blocks[..., 2 + index // 4] >> 2 * (index % 4) & 3
            scales[..., index] |= high << 4
        return AffineCodes(
            codes,
            4,
            32,
            scales.flatten(1).view(torch.int8) - 32,
            outer_scales=halves(blocks, 0),
            values=torch.tensor(_IQ4_VALUES),
        )


class Q8_0(Blocks):  # noqa: N801
    """A scale and 32 codes of eight bits."""

    contract = 1
    size = 34

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes and scales."""
        codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
        return AffineCodes(codes, 8, 32, halves(blocks, 0))


class Q4_K(Blocks):  # noqa: N801
    """Two outer scales, for scales and minima of six bits, and 256 codes of four bits."""

    contract = 1
    columns = 256
    size = 144

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, factors and offsets."""
        return _with_minima(blocks, nibbles(blocks[..., 16:], 32).flatten(1), 4)


class Q5_K(Blocks):  # noqa: N801
    """The same with codes of five bits, highest bits first."""

    contract = 1
    columns = 256
    size = 176

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, factors and offsets."""
        codes = nibbles(blocks[..., 48:], 32).flatten(2, 3)  # [rows, blocks, 8, 32]
        high = blocks[..., 16:48]
        for index in range(8):
            codes[:, :, index] |= (high >> index & 1) << 4
        return _with_minima(blocks, codes.flatten(1), 5)


class Q6_K(Blocks):  # noqa: N801
    """The lower four and the upper two bits of 256 codes, less 32, scales and an outer scale."""

    contract = 1
    columns = 256
    size = 210

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, scales of 16 columns and outer scales."""
        # Of each 128 columns, the lower halves of 64 bytes belong to the first 64.
        rows, count, _ = blocks.shape
        codes = nibbles(blocks[..., :128], 64).view(rows, count, 2, 4, 32)
        high = blocks[..., 128:192].reshape(rows, count, 2, 32)
        for index in range(4):
            codes[:, :, :, index] |= (high >> 2 * index & 3) << 4
        return AffineCodes(
            codes.flatten(1),
            6,
            16,
            blocks[..., 192:208].contiguous().view(torch.int8).flatten(1),
            outer_scales=halves(blocks, 208),
            values=torch.arange(-32.0, 32.0),
        )


def _with_minima(blocks: torch.Tensor, codes: torch.Tensor, bits: int) -> AffineCodes:
    # 12 bytes: the lower six bits of 4 scales, then of 4 minima, with the upper two bits of
    # 4 further scales and minima; the lower four bits of these.
    low, middle, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([low & 63, (last & 15) | (low >> 6 << 4)], -1)
    minima = torch.cat([middle & 63, (last >> 4) | (middle >> 6 << 4)], -1)
    return AffineCodes(
        codes,
        bits,
        32,
        scales.flatten(1),
        minima.flatten(1),
        outer_scales=halves(blocks, 0),
        outer_offsets=-halves(blocks, 2),
    )


def halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at a place in each block, [rows, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Return numbers of four bits, uint8 [rows, blocks, runs, 2, run].

    Args:
        packed: uint8 [rows, blocks, bytes].
        run: bytes with lower halves first, then upper ones.
    """
    rows, blocks, size = packed.shape
    packed = packed.view(rows, blocks, size // run, run)
    codes = torch.empty((rows, blocks, size // run, 2, run), dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=codes[..., 0, :])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1, :])
    return codes


def _five_bits(packed: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return codes uint8 [rows, columns], with fifth bits from `high` [rows, blocks, 4]."""
    codes = nibbles(packed, 16).view(*packed.shape[:2], 4, 8)
    for index in range(8):
        codes[..., index] |= (high >> index & 1) << 4
    return codes.flatten(1)
