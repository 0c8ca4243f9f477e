"""Blocks of GGUF files (IQ2 and IQ3) with codes for entries of a codebook, 8 or 4 numbers.

An entry's numbers are few, and have signs apart: in memory a code of four bits stands for each.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import ClassVar

import gguf
import numpy as np
import torch

from hardpoint.plugins.quantization import AffineCodes

from .gguf import halves, nibbles
from .gguf_low import Low

_SIGN = 8
"""Number added to the code of a negative number."""


class _Codebook(Low):
    """Common to all: 256 columns with a float16 scale that comes first."""

    contract = 1
    group: ClassVar[int] = 32
    unit: ClassVar[float]
    """Divisor of the numbers of entries: scales are odd whole numbers."""

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, scales and outer scales."""
        entries, signs, scales = self.parts(blocks)
        grid, values = _codebook(type(self).__name__)
        codes = grid[entries.flatten().int()].view(*blocks.shape[:2], 256)
        codes = codes + _SIGN * _bits(signs).reshape(codes.shape)
        numbers = torch.tensor([*values, *(-value for value in values)]) / self.unit
        return AffineCodes(
            codes.flatten(1),
            4,
            self.group,
            (2 * scales + 1).flatten(1),
            outer_scales=halves(blocks, 0),
            values=numbers,
        )

    @abstractmethod
    def parts(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return entries, the bits of 256 signs [rows, blocks, 32], and scales of four bits, uint8.

        Entries are int16 [rows, blocks, entries of a block].
        """


class IQ2_XXS(_Codebook):  # noqa: N801 - the name of the format
    """8 times four entries of eight bits, four signs of seven and a scale of four."""

    contract = 1
    size = 66
    in_memory = 128 + 8 + 2
    unit = 8.0

    def parts(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return entries, signs and scales."""
        packed = blocks[..., 2:].reshape(*blocks.shape[:2], 8, 8)
        signs, scales = _signs_and_scales(packed[..., 4:])
        return packed[..., :4].flatten(2), signs, scales


class IQ2_XS(_Codebook):  # noqa: N801
    """32 entries of nine bits with signs of seven, and scales of four."""

    contract = 1
    size = 74
    group = 16
    in_memory = 128 + 16 + 2
    unit = 8.0

    def parts(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return entries, signs and scales."""
        low, high = blocks[..., 2:66:2].short(), blocks[..., 3:66:2].short()
        signs = _signs()[(high >> 1).int()]
        return low | (high & 1) << 8, signs, nibbles(blocks[..., 66:], 1).flatten(2)


class IQ2_S(_Codebook):  # noqa: N801
    """The lower eight bits of 32 entries, signs, the upper two bits of entries, and scales."""

    contract = 1
    size = 82
    group = 16
    in_memory = 128 + 16 + 2
    unit = 8.0

    def parts(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return entries, signs and scales."""
        high = _fields(blocks[..., 66:74], 2)
        scales = nibbles(blocks[..., 74:], 1).flatten(2)
        return blocks[..., 2:34].short() | high << 8, blocks[..., 34:66], scales


class IQ3_XXS(_Codebook):  # noqa: N801
    """64 entries of eight bits, then 8 times four signs of seven bits and a scale of four."""

    contract = 1
    size = 98
    in_memory = 128 + 8 + 2
    unit = 4.0

    def parts(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return entries, signs and scales."""
        packed = blocks[..., 66:].reshape(*blocks.shape[:2], 8, 4)
        return blocks[..., 2:66], *_signs_and_scales(packed)


class IQ3_S(_Codebook):  # noqa: N801
    """The lower eight bits of 64 entries, their ninth bits, signs and scales."""

    contract = 1
    size = 110
    in_memory = 128 + 8 + 2
    unit = 1.0

    def parts(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return entries, signs and scales."""
        high = _bits(blocks[..., 66:74]).short()
        scales = nibbles(blocks[..., 106:], 1).flatten(2)
        return blocks[..., 2:66].short() | high << 8, blocks[..., 74:106], scales


@functools.cache
def _codebook(name: str) -> tuple[torch.Tensor, list[float]]:
    """Return codes uint8 [entries, numbers of an entry], and the numbers of eight codes."""
    kind = getattr(gguf.quants, name)
    kind.init_grid()
    entries = kind.grid.reshape(kind.grid_shape)
    numbers = [float(number) for number in kind.grid_map]
    codes = torch.from_numpy(np.searchsorted(numbers, entries).astype(np.uint8))
    return codes, numbers + [0.0] * (_SIGN - len(numbers))


@functools.cache
def _signs() -> torch.Tensor:
    """Return the eight signs of each code of seven bits, an even number of them set."""
    return torch.tensor(list(gguf.quants.IQ2_XXS.ksigns), dtype=torch.uint8)


def _signs_and_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return signs [rows, blocks, 32] and scales [rows, blocks, 8] of numbers of 32 bits.

    Args:
        packed: uint8 [rows, blocks, 8, 4]: four signs of seven bits from the lowest one on, and a
            scale of four.
    """
    word = packed.clone(memory_format=torch.contiguous_format).view(torch.int32).squeeze(-1)
    signs = torch.stack([word >> 7 * index & 127 for index in range(4)], -1)
    return _signs()[signs].flatten(2), (word >> 28 & 15).to(torch.uint8)


def _fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of few bits of bytes, from the lowest bits on; int16, in order."""
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2).short()


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the bits of bytes, from the lowest one on; uint8, in order."""
    return _fields(packed, 1).to(torch.uint8)
