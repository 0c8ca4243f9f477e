"""The integers of a step in one tensor, which reaches a device by one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hardpoint.plugins.device import to_device

__all__ = ["PackedStep", "even"]

IntArray = np.ndarray[Any, np.dtype[np.int64]]


def even(count: int) -> int:
    """Return the next even number: kernels are compiled for pointers divisible by 16."""
    return count + count % 2


class PackedStep:
    """The integers of a step on a device, int64, as views of one tensor.

    Attributes:
        token_ids: [tokens].
        positions: [tokens].
        slots: [groups, tokens].
        lens: [seqs].
        starts: [seqs + 1].
        tables: [groups, seqs, blocks].
    """

    def __init__(
        self,
        token_ids: IntArray,
        positions: IntArray,
        slots: IntArray,
        lens: IntArray,
        starts: IntArray,
        tables: IntArray,
        device: torch.device,
    ) -> None:
        """Copy the arrays, of the shapes above, to a device; the host does not wait for it."""
        parts = [token_ids, positions, *slots, lens, starts, tables]
        offsets = np.cumsum([0, *(even(part.size) for part in parts)])
        packed = np.zeros(offsets[-1], dtype=np.int64)
        for offset, part in zip(offsets, parts, strict=False):
            packed[offset : offset + part.size] = part.reshape(-1)
        flat = self._flat = to_device(packed, device)
        self._num_tokens = count = len(token_ids)
        self._num_groups = groups = len(slots)
        self._stride = stride = even(count)
        self.token_ids, self.positions = flat[:count], flat[stride : stride + count]
        self.slots = flat[2 * stride : (2 + groups) * stride].view(groups, stride)[:, :count]
        lens_at, starts_at, tables_at = map(int, offsets[-4:-1])
        self.lens = flat[lens_at : lens_at + len(lens)]
        self.starts = flat[starts_at : starts_at + len(starts)]
        self.tables = flat[tables_at : tables_at + tables.size].view(tables.shape)

    @property
    def rows(self) -> torch.Tensor:
        """Token ids, positions, slots of each group, and lens: [3 + groups, tokens].

        For a step with one token per sequence.
        """
        count = 3 + self._num_groups
        return self._flat[: count * self._stride].view(count, -1)[:, : self._num_tokens]
