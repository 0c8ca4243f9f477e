"""Checkpoints of AutoAWQ (activation-aware weight quantization, arXiv:2306.00978)."""

from __future__ import annotations

import torch

from hardpoint.plugins.quantization import QuantizedMatrix, QuantizedWeight
from hardpoint.toolkit.hf_config import ConfigFields

from .packed import (
    SCALES,
    StoredScheme,
    affine,
    alignment,
    expect,
    group_size,
    one_of,
    stored_bytes,
)

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The rows of the matrix with codes in a word, from its lowest four bits on."""
_PER_WORD = 8
_BITS = 4


class AWQ(StoredScheme):
    """Four bits with a scale and a zero per group, in the layout of AutoAWQ's GEMM version.

    A matrix is stored transposed: `qweight` int32 [columns, rows / 8], `qzeros` int32 [groups,
    rows / 8] and `scales` [groups, rows].
    """

    contract = 1
    known = ("bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "backend")
    neutral = (
        "do_fuse",
        "exllama_config",
        "fuse_max_seq_len",
        "modules_to_fuse",
        "modules_to_not_convert",
    )

    def read_config(self, fields: ConfigFields) -> None:
        """Read the size of the groups.

        Raises:
            ModelError: there are not four bits, no zeros, or it is another version.
        """
        config = self.context.config
        one_of(fields, "bits", config.get("bits", config.get("w_bit")), [_BITS])
        one_of(fields, "zero_point", config.get("zero_point", True), [True])
        one_of(fields, "version", str(config.get("version", "gemm")).lower(), ["gemm"])
        one_of(fields, "backend", config.get("backend", "autoawq"), ["autoawq"])
        size = config.get("group_size", config.get("q_group_size"))
        self._group = group_size(fields, "group_size", size)

    def check_tensors(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong.
        """
        rows, columns = stored.shape
        if rows % _PER_WORD:
            raise ValueError(f"expected rows in multiples of {_PER_WORD}, got {rows}")
        groups = -(-columns // (self._group or columns))
        expect(
            stored,
            {
                "qweight": ((torch.int32,), (columns, rows // _PER_WORD)),
                "qzeros": ((torch.int32,), (groups, rows // _PER_WORD)),
                "scales": (SCALES, (groups, rows)),
            },
        )

    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return codes with scales and offsets.

        Raises:
            ValueError: a tensor is missing, or its dtype, shape or content is wrong.
        """
        self.check(stored)
        tensors = stored.tensors
        return affine(
            _codes(tensors["qweight"]),
            _BITS,
            self._group or stored.shape[1],
            tensors["scales"].t().contiguous(),
            _codes(tensors["qzeros"]),
        )

    def alignment(
        self,
        shape: tuple[int, int],
        stored: QuantizedWeight | None = None,  # noqa: ARG002
    ) -> int | None:
        """Return the size of the groups."""
        return alignment(shape[1], self._group) if self.context.config else None

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        """Return the bytes of codes, scales and offsets."""
        return stored_bytes(shape, _BITS, self._group, True) if self.context.config else None


def _codes(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of int32 [columns, rows / 8] as uint8 [rows, columns]."""
    packed = packed.t().contiguous()
    codes = torch.empty((len(packed), _PER_WORD, packed.shape[1]), dtype=torch.uint8)
    for place, row in enumerate(_ORDER):
        codes[:, row] = (packed >> (_BITS * place)).bitwise_and_(15)
    return codes.flatten(0, 1)
