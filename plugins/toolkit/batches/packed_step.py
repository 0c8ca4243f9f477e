"""The integers of a step in one tensor, for a single copy to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hardpoint.plugins.device import to_device

__all__ = ["IntArray", "PackedStep"]

IntArray = np.ndarray[Any, np.dtype[np.int64]]


def even(count: int) -> int:
    """Return the next even number: kernels are compiled for pointers divisible by 16."""
    return count + (count & 1)


class PackedStep:
    """The integers of a step on a device, int64, as views of one tensor.

    Attributes:
        token_ids: [tokens].
        positions: [tokens].
        slots: slots of each group, [tokens].
        lens: [seqs].
        starts: [seqs + 1].
        tables: block tables of each group, [seqs, blocks].
    """

    def __init__(
        self,
        token_ids: IntArray,
        positions: IntArray,
        slots: IntArray,
        tables: IntArray,
        lens: IntArray,
        starts: IntArray,
        device: torch.device,
    ) -> None:
        """Copy the arrays to a device; the host does not wait for it.

        The shapes are the same as of the attributes, after [groups] for slots and tables.
        """
        self._num_tokens = count = len(token_ids)
        self._num_groups = groups = len(slots)
        self._stride = stride = even(count)
        seqs, table = len(lens), even(tables[0].size)
        lens_at = (2 + groups) * stride
        starts_at = lens_at + even(seqs)
        tables_at = starts_at + even(seqs + 1)
        packed = np.empty(tables_at + groups * table, dtype=np.int64)
        by_token = packed[:lens_at].reshape(2 + groups, stride)
        by_token[0, :count], by_token[1, :count], by_token[2:, :count] = token_ids, positions, slots
        packed[lens_at : lens_at + seqs] = lens
        packed[starts_at : starts_at + seqs + 1] = starts
        packed[tables_at:].reshape(groups, table)[:, : tables[0].size] = tables.reshape(groups, -1)
        flat = self._flat = to_device(packed, device)

        def view(at: int, size: int) -> torch.Tensor:
            return flat.as_strided((size,), (1,), at)

        self.token_ids, self.positions = view(0, count), view(stride, count)
        self.lens, self.starts = view(lens_at, seqs), view(starts_at, seqs + 1)
        shape, strides = tables.shape[1:], (tables.shape[2], 1)
        self.slots = [view((2 + group) * stride, count) for group in range(groups)]
        self.tables = [
            flat.as_strided(shape, strides, tables_at + group * table) for group in range(groups)
        ]

    @property
    def rows(self) -> torch.Tensor:
        """Token ids, positions, slots of each group, and lens: [3 + groups, tokens].

        For a step with one token per sequence.
        """
        shape = 3 + self._num_groups, self._num_tokens
        return self._flat.as_strided(shape, (self._stride, 1), 0)
