"""Checkpoints of FP8 (float8 e4m3) with scales of blocks, as DeepSeek and transformers write."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.plugins.quantization import DenseMatrix, QuantizedMatrix, QuantizedWeight
from hardpoint.toolkit.hf_config import ConfigFields, short

from .packed import SCALES, StoredScheme, expect, one_of

E4M3 = torch.float8_e4m3fn
_INVERSE, _PLAIN = "weight_scale_inv", "weight_scale"
"""Names of the scales; numbers are multiplied by either."""


class FP8(StoredScheme):
    """Numbers of float8 e4m3 (`weight`), with a scale per block, row or matrix.

    The scales are `weight_scale_inv` or `weight_scale`, [rows / rows of a block, columns / columns
    of a block], both rounded up; without `weight_block_size` they are [rows], [rows, 1] or one
    number. No operation multiplies such codes, so that matrices are dequantized.

    Activations that were to be quantized while the model runs (`dynamic`) are left as they are,
    which is nearer to the original numbers of the weights; activations with stored scales
    (`static`) are rejected.
    """

    contract = 1
    known = ("activation_scheme", "expert_dtype", "fmt", "scale_fmt", "weight_block_size")
    neutral = (
        "dequantize",
        "ignored_layers",
        "is_checkpoint_fp8_serialized",
        "modules_to_convert",
        "modules_to_not_convert",
    )

    def read_config(self, fields: ConfigFields) -> None:
        """Read the size of the blocks.

        Raises:
            ModelError: it is another floating format, or activations have stored scales.
        """
        config = self.context.config
        one_of(fields, "activation_scheme", config.get("activation_scheme", "dynamic"), ["dynamic"])
        one_of(fields, "fmt", config.get("fmt") or "e4m3", ["e4m3", "float8_e4m3fn"])
        one_of(fields, "scale_fmt", config.get("scale_fmt") or "float", ["float", "ue8m0"])
        one_of(fields, "expert_dtype", config.get("expert_dtype") or "fp8", ["fp8"])
        self._block = read_block(fields, "weight_block_size", config.get("weight_block_size"))

    def check_tensors(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong.
        """
        name = self._scale_name(stored)
        rows, columns = stored.shape
        if self._block is not None:
            shape: tuple[int, ...] = scales_of_blocks(stored.shape, self._block)
        else:
            scales = stored.tensors.get(name)
            actual = () if scales is None else tuple(scales.shape)
            shapes: list[tuple[int, ...]] = [(rows, 1), (rows,), (1, 1), (1,), ()]
            shape = actual if actual in shapes else shapes[0]
        dtypes = (*SCALES, torch.float8_e8m0fnu)
        expect(stored, {"weight": ((E4M3,), (rows, columns)), name: (dtypes, shape)})

    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return the numbers.

        Raises:
            ValueError: a tensor is missing, or its dtype, shape or content is wrong.
        """
        self.check(stored)
        scales = stored.tensors[self._scale_name(stored)]
        return scaled(stored.tensors["weight"], scales, self._block)

    def alignment(
        self,
        shape: tuple[int, int],  # noqa: ARG002
        stored: QuantizedWeight | None = None,  # noqa: ARG002
    ) -> int:
        """Return 1: numbers can be cut anywhere."""
        return 1

    def _scale_name(self, stored: QuantizedWeight) -> str:
        return _PLAIN if _PLAIN in stored.tensors else _INVERSE


def read_block(fields: ConfigFields, name: str, value: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a block; None if there are none.

    Raises:
        ModelError: it is no size.
    """
    if value is None:
        return None
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    if not is_pair or not all(type(size) is int and size >= 1 for size in value):
        raise fields.error(name, f"expected two whole numbers >= 1, got {short(value)}")
    rows, columns = value
    return rows, columns


def scales_of_blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix; the last blocks may be smaller."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def scaled(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None
) -> DenseMatrix:
    """Return numbers times scales.

    Args:
        weight: float8 [rows, columns].
        scales: one number, or one per row; with `block` one per block, in two dimensions.
        block: rows and columns of a block.

    Raises:
        ValueError: a number or a scale is not finite.
    """
    numbers, scales = weight.float(), scales.float()
    if not bool(scales.isfinite().all()):
        raise ValueError("the scales have numbers that are not finite")
    if not bool(numbers.isfinite().all()):
        raise ValueError("the weight has numbers that are not finite")
    if block is None:
        return DenseMatrix(numbers.mul_(scales.reshape(-1, 1)))
    rows, columns = block
    for index, of_rows in enumerate(scales):
        factors = of_rows.repeat_interleave(columns)[: numbers.shape[1]]
        numbers[index * rows : (index + 1) * rows].mul_(factors)
    return DenseMatrix(numbers)
