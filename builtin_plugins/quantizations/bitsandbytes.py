"""Checkpoints of bitsandbytes: NormalFloat and float of four bits (arXiv:2305.14314), and int8."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from hardpoint.plugins.quantization import DenseMatrix, QuantizedMatrix, QuantizedWeight
from hardpoint.toolkit.hf_config import ConfigFields, short

from .packed import Shapes, StoredScheme, affine, expect, one_of

Tensors = Mapping[str, torch.Tensor]
_KINDS = ("nf4", "fp4")
_STATE = "bitsandbytes__"
"""With the kind behind it, the name of the tensor that has the state's other fields, as JSON."""
_BLOCKS = tuple(1 << shift for shift in range(5, 13))
_NESTED_BLOCK = 256
_LARGEST_STATE = 1 << 12
_ROW = 0
"""`weight_format` of rows one after the other."""


class BitsAndBytes(StoredScheme):
    """Four bits, `nf4` or `fp4`, with a scale per block of weights, or int8 with one per row.

    Of four bits, `weight` has two codes in a byte, uint8 [rows * columns / 2, 1], the first one in
    its upper half. They stand for the numbers of `quant_map`, times the `absmax` of their block,
    which may be in codes itself (`nested_absmax`, `nested_quant_map`). bfloat16 does not hold the
    numbers, so that matrices are dequantized. int8 matrices (`weight` and `SCB`) stay codes.
    """

    contract = 1
    known = (
        "_load_in_4bit",
        "_load_in_8bit",
        "bnb_4bit_quant_storage",
        "bnb_4bit_quant_type",
        "load_in_4bit",
        "load_in_8bit",
    )
    neutral = (
        "bnb_4bit_compute_dtype",
        "bnb_4bit_use_double_quant",
        "llm_int8_enable_fp32_cpu_offload",
        "llm_int8_has_fp16_weight",
        "llm_int8_skip_modules",
        "llm_int8_threshold",
        "modules_to_not_convert",
    )

    def read_config(self, fields: ConfigFields) -> None:
        """Read whether there are four or eight bits, and which numbers four bits stand for.

        Raises:
            ModelError: there are neither, or codes are stored in another dtype than uint8.
        """
        config = self.context.config
        modes = {
            bits: fields.flag(f"load_in_{bits}bit", fields.flag(f"_load_in_{bits}bit", False))
            for bits in (4, 8)
        }
        if modes[4] == modes[8]:
            raise fields.error(
                "load_in_4bit", f"expected this or load_in_8bit to be true, got both {modes[4]}"
            )
        self._bits = 4 if modes[4] else 8
        if self._bits == 4:
            kind = config.get("bnb_4bit_quant_type") or "fp4"
            one_of(fields, "bnb_4bit_quant_type", kind, _KINDS)
            storage = config.get("bnb_4bit_quant_storage") or "uint8"
            one_of(fields, "bnb_4bit_quant_storage", storage, ["uint8"])
            self._state = _STATE + kind

    def check_tensors(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong.
        """
        rows, columns = stored.shape
        if self._bits == 8:
            shapes: Shapes = {
                "weight": ((torch.int8,), (rows, columns)),
                "SCB": ((torch.float32,), (rows,)),
                "weight_format": ((torch.uint8,), ()),
            }
            expect(stored, shapes, optional=("weight_format",))
            return
        shapes = {
            "weight": ((torch.uint8,), (-(-rows * columns // 2), 1)),
            "absmax": ((torch.float32, torch.uint8), (self._num_blocks(stored),)),
            "quant_map": ((torch.float32,), (16,)),
        }
        absmax = stored.tensors.get("absmax")
        if absmax is not None and absmax.dtype == torch.uint8:
            nested = -(-absmax.shape[0] // _NESTED_BLOCK)
            shapes["nested_absmax"] = (torch.float32,), (nested,)
            shapes["nested_quant_map"] = (torch.float32,), (256,)
        state = stored.tensors.get(self._state)
        length = min(state.numel(), _LARGEST_STATE) if state is not None else 1
        shapes[self._state] = (torch.uint8,), (length,)
        expect(stored, shapes)

    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return codes of int8; of four bits the numbers.

        Raises:
            ValueError: a tensor is missing, or its dtype, shape or content is wrong.
        """
        self.check(stored)
        if self._bits == 8:
            return _int8(stored)
        return self._four_bits(stored)

    def alignment(
        self,
        shape: tuple[int, int],  # noqa: ARG002
        stored: QuantizedWeight | None = None,  # noqa: ARG002
    ) -> int:
        """Return 1: numbers, and codes with one scale per row, can be cut anywhere."""
        return 1

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        """Return the bytes of int8 codes and their scales; None if they are dequantized."""
        if not self.context.config or self._bits == 4:
            return None
        return shape[0] * (shape[1] + 4)

    def _num_blocks(self, stored: QuantizedWeight) -> int:
        """Return the number of blocks: of the tensor, if possible, or else the most common one."""
        rows, columns = stored.shape
        counts = [-(-rows * columns // size) for size in _BLOCKS]
        absmax = stored.tensors.get("absmax")
        count = absmax.shape[0] if absmax is not None and absmax.dim() == 1 else 0
        return count if count in counts else counts[1]

    def _four_bits(self, stored: QuantizedWeight) -> DenseMatrix:
        tensors, (rows, columns) = stored.tensors, stored.shape
        state = _read_state(self._state, tensors[self._state])
        block = state.get("blocksize")
        count = len(tensors["absmax"])
        if block not in _BLOCKS or -(-rows * columns // block) != count:
            expected = " or ".join(str(n) for n in _BLOCKS if -(-rows * columns // n) == count)
            raise ValueError(f"{self._state}: blocksize: expected {expected}, got {short(block)}")
        if state.get("shape") != [rows, columns]:
            raise ValueError(
                f"{self._state}: shape: expected {[rows, columns]}, got {short(state.get('shape'))}"
            )
        scales = self._scales(tensors, state)
        values = tensors["quant_map"]
        if not bool(values.isfinite().all()):
            raise ValueError("quant_map: it has numbers that are not finite")
        packed = tensors["weight"].flatten()
        codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[: rows * columns]
        weight = values[codes.int()]
        whole = len(weight) // block * block
        weight[:whole].view(-1, block).mul_(scales[: whole // block, None])
        weight[whole:].mul_(scales[-1:])
        return DenseMatrix(weight.view(rows, columns))

    def _scales(
        self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the scales of blocks, float32.

        Raises:
            ValueError: a number is not finite, or codes have other blocks or no offset.
        """
        scales = tensors["absmax"]
        if scales.dtype == torch.uint8:
            size = state.get("nested_blocksize")
            if size != _NESTED_BLOCK:
                raise ValueError(
                    f"{self._state}: nested_blocksize: expected {_NESTED_BLOCK}, got {short(size)}"
                )
            offset = state.get("nested_offset")
            if not isinstance(offset, float) or not math.isfinite(offset):
                raise ValueError(
                    f"{self._state}: nested_offset: expected a number, got {short(offset)}"
                )
            outer = tensors["nested_absmax"].repeat_interleave(_NESTED_BLOCK)[: len(scales)]
            scales = tensors["nested_quant_map"][scales.int()] * outer + offset
        if not bool(scales.isfinite().all()):
            raise ValueError("the scales have numbers that are not finite")
        return scales


def _int8(stored: QuantizedWeight) -> QuantizedMatrix:
    """Return the codes of int8.

    Raises:
        ValueError: they have another order, or a scale is not finite.
    """
    order = stored.tensors.get("weight_format")
    if order is not None and int(order) != _ROW:
        raise ValueError(
            f"weight_format: expected {_ROW}, rows one after the other, got {int(order)}"
        )
    scales = stored.tensors["SCB"].unsqueeze(1) / 127
    return affine(stored.tensors["weight"], 8, stored.shape[1], scales, None)


def _read_state(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return the fields of a state.

    Raises:
        ValueError: the tensor is no table as JSON.
    """
    try:
        state = json.loads(bytes(tensor.tolist()))
    except (ValueError, RecursionError) as cause:
        raise ValueError(f"{name}: expected a table as JSON: {str(cause)[:200]}") from cause
    if not isinstance(state, dict):
        raise ValueError(f"{name}: expected a table as JSON, got {short(state)}")
    return state
