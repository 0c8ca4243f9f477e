"""MXFP4 (Open Compute Project, Microscaling Formats 1.0), as checkpoints of gpt-oss have it."""

from __future__ import annotations

import torch

from hardpoint.plugins.quantization import AffineCodes, QuantizedMatrix, QuantizedWeight
from hardpoint.toolkit.hf_config import ConfigFields

from .packed import StoredScheme, expect, fits, stored_bytes

GROUP = 32
_BYTES = GROUP // 2
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the codes 0 to 7 (E2M1); the codes 8 to 15 are the same, negative."""
_BIAS, _NAN = 127, 255


class MXFP4(StoredScheme):
    """Four bits, and a power of two for 32 columns: `blocks` and `scales`, both uint8.

    `blocks` are [rows, columns / 32, 16], the first of two codes in the lower half of a byte,
    `scales` [rows, columns / 32], exponents of two with 127 added.
    """

    contract = 1
    known = ()
    neutral = ("modules_to_not_convert", "dequantize")

    def read_config(self, fields: ConfigFields) -> None:
        """Read nothing: the format has no parameters."""

    def check_tensors(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong.
        """
        rows, columns = stored.shape
        if columns % GROUP:
            raise ValueError(f"expected columns in multiples of {GROUP}, got {columns}")
        groups = columns // GROUP
        expect(
            stored,
            {
                "blocks": ((torch.uint8,), (rows, groups, _BYTES)),
                "scales": ((torch.uint8,), (rows, groups)),
            },
        )

    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return codes with scales in float16 if that holds their powers, else in float32.

        Raises:
            ValueError: a tensor is missing, or its dtype, shape or content is wrong.
        """
        self.check(stored)
        blocks, scales = stored.tensors["blocks"], stored.tensors["scales"]
        if bool((scales == _NAN).any()):
            raise ValueError("the scales have numbers that are not finite")
        codes = torch.stack([blocks & 15, blocks >> 4], 3).flatten(1)
        powers = torch.ldexp(torch.ones(scales.shape), scales.int() - _BIAS)
        values = torch.tensor([*VALUES, *(-value for value in VALUES)])
        scales = powers.half() if fits(powers) else powers
        return AffineCodes(codes, 4, GROUP, scales, values=values)

    def alignment(
        self,
        shape: tuple[int, int],  # noqa: ARG002
        stored: QuantizedWeight | None = None,  # noqa: ARG002
    ) -> int | None:
        """Return the columns that share a scale."""
        return GROUP if self.context.config else None

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        """Return the bytes of codes and scales."""
        return stored_bytes(shape, 4, GROUP, False) if self.context.config else None
