"""Blocks of GGUF files with codes of two or three bits, of three values, or MXFP4.

In memory a code has four bits.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from hardpoint.plugins.quantization import AffineCodes

from .gguf import Blocks, halves, nibbles

_FP4_VALUES = (
    *(0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0),
    *(-0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0),
)
"""Twice the numbers of E2M1, which the scales make up for."""
_LARGEST_EXPONENT = 252
"""With which 12 is still a number of float32."""


class Low(Blocks):
    """Base class: 256 columns, with other bytes in memory than in the file."""

    contract = 1
    columns: ClassVar[int] = 256
    in_memory: ClassVar[int]
    """Bytes of a block in memory."""

    def stored_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of codes of four bits, and of the scales."""
        return shape[0] * -(-shape[1] // self.columns) * self.in_memory


class Q2_K(Low):  # noqa: N801 - the name of the format
    """16 scales and minima of four bits, 256 codes of two bits, and two outer scales."""

    contract = 1
    size = 84
    in_memory = 128 + 16 + 16 + 4

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, factors and offsets."""
        scales = blocks[..., :16]
        return AffineCodes(
            pairs(blocks[..., 16:80], 32).flatten(1),
            4,
            16,
            (scales & 15).flatten(1),
            (scales >> 4).flatten(1),
            outer_scales=halves(blocks, 80),
            outer_offsets=-halves(blocks, 82),
        )


class Q3_K(Low):  # noqa: N801
    """The third bits and the lower two of 256 codes less 4, 16 scales of six bits less 32."""

    contract = 1
    size = 110
    in_memory = 128 + 16 + 2

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, scales of 16 columns and outer scales."""
        codes = pairs(blocks[..., 32:96], 32)
        high = blocks[..., :32]
        for index in range(8):
            codes[:, :, index] |= (high >> index & 1) << 2
        # The lower four bits of scales 0 to 7 are lower halves of 8 bytes, the ones of 8 to 15 the
        # upper ones; four bytes have the upper two bits of scales 0 to 3, 4 to 7 and so on.
        low = nibbles(blocks[..., 96:104], 8).flatten(2)
        upper = torch.cat([blocks[..., 104:108] >> 2 * index & 3 for index in range(4)], -1)
        scales = (low | upper << 4).view(torch.int8) - 32
        return AffineCodes(
            codes.flatten(1),
            4,
            16,
            scales.flatten(1),
            outer_scales=halves(blocks, 108),
            values=torch.arange(-4.0, 12.0),
        )


class TQ1_0(Low):  # noqa: N801
    """256 codes less 1, five to a byte, or four at the end, in base 3; a scale."""

    contract = 1
    size = 54
    in_memory = 128 + 2

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes and scales."""
        runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
        parts = [
            blocks[..., start:stop] * 3**place  # of eight bits: the digits before are lost
            for start, stop, count in runs
            for place in range(count)
        ]
        codes = (torch.cat(parts, -1).short() * 3 >> 8).to(torch.uint8)
        return _ternary(codes.flatten(1), halves(blocks, 52))


class TQ2_0(Low):  # noqa: N801
    """256 codes of two bits, less 1, and a scale."""

    contract = 1
    size = 66
    in_memory = 128 + 2

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes and scales."""
        return _ternary(pairs(blocks[..., :64], 32).flatten(1), halves(blocks, 64))


class MXFP4Blocks(Low):
    """An exponent of two, and 32 codes of four bits that stand for floating numbers."""

    contract = 1
    columns = 32
    size = 17
    in_memory = 16 + 4

    def split(self, blocks: torch.Tensor) -> AffineCodes:
        """Return codes, and scales in float32, which holds all powers.

        Raises:
            ValueError: a scale is NaN, or makes numbers that float32 does not hold.
        """
        exponents = blocks[..., 0]
        if exponents.numel() and int(exponents.max()) > _LARGEST_EXPONENT:
            raise ValueError(
                f"blocks: expected exponents up to {_LARGEST_EXPONENT}, got {int(exponents.max())}"
            )
        scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 128)
        codes = nibbles(blocks[..., 1:], 16).flatten(1)
        return AffineCodes(codes, 4, 32, scales, values=torch.tensor(_FP4_VALUES))


def pairs(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Return numbers of two bits, uint8 [rows, blocks, 4 * runs, run].

    Args:
        packed: uint8 [rows, blocks, bytes].
        run: bytes with lowest bits first, then the next ones.
    """
    rows, blocks, size = packed.shape
    packed = packed.reshape(rows, blocks, size // run, 1, run)
    return (packed >> torch.tensor([0, 2, 4, 6]).view(4, 1).to(torch.uint8) & 3).flatten(2, 3)


def _ternary(codes: torch.Tensor, scales: torch.Tensor) -> AffineCodes:
    return AffineCodes(codes, 4, 256, scales, values=torch.arange(-1.0, 15.0))
