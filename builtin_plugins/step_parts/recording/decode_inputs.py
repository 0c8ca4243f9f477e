"""The tensors that recorded decode steps read, which stay where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint.plugins import AttentionStep

if TYPE_CHECKING:
    from hardpoint.plugins.model.forward import PackedInputs


_OTHER_ROWS = 3  # token ids, positions and lengths, besides the slots of each group
_PADDED_SLOT = -1


@dataclass(frozen=True)
class DecodeShape:
    """The numbers on which the sizes of decode steps' inputs depend.

    Attributes:
        max_num_seqs: most sequences of a recorded step.
        max_model_len: tokens of a sequence.
        block_size: tokens per block.
        num_groups: KV cache groups.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_groups: int

    @property
    def num_columns(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_bytes(self) -> int:
        """Of the inputs."""
        rows = _OTHER_ROWS + self.num_groups * (1 + self.num_columns)
        return (rows + 1) * _even(self.max_num_seqs + 1) * torch.int64.itemsize


class DecodeInputs:
    """Inputs of steps with one token per sequence, of any size up to the largest.

    Steps of all sizes use the same memory. Sequences that a step does not have are padding.
    """

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        """Allocate them; all is padding."""
        size, groups = shape.max_num_seqs, shape.num_groups
        self._shape = shape
        # As in PackedInputs.rows.
        self._rows = torch.zeros(
            _OTHER_ROWS + groups, _even(size), dtype=torch.int64, device=device
        )
        self._rows[2 : 2 + groups].fill_(_PADDED_SLOT)
        self._padding = self._rows[:, :1].clone()
        shape_of_table = size, shape.num_columns
        self._tables = [
            torch.zeros(shape_of_table, dtype=torch.int64, device=device) for _ in range(groups)
        ]
        self._starts = torch.arange(size + 1, device=device)
        self._filled = 0  # sequences that are no padding, or were none before the last `fill`

    def tokens(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and positions of a step of a size."""
        return self._rows[0, :size], self._rows[1, :size]

    def attention(self, size: int) -> list[AttentionStep]:
        """Return the layouts of a step of a size, one per group."""
        shape, on_device = self._shape, (self._starts[: size + 1], self._rows[-1, :size])
        return [
            AttentionStep(
                query_starts=np.arange(size + 1),
                seq_lens=np.full(size, shape.max_model_len),
                num_single=size,
                block_table=self._tables[group][:size],
                slots=self._rows[2 + group, :size],
                block_size=shape.block_size,
                group=group,
                on_device=on_device,
            )
            for group in range(shape.num_groups)
        ]

    def fill(self, packed: PackedInputs) -> None:
        """Set them to the inputs of a step; the rest is padding."""
        rows = packed.rows
        count = rows.shape[1]
        self._rows[:, :count].copy_(rows)
        for persistent, table in zip(self._tables, packed.tables, strict=True):
            persistent[:count, : table.shape[1]].copy_(table)
        self._pad(count)

    def clear(self) -> None:
        """Make all of them padding."""
        self._pad(0)

    def _pad(self, count: int) -> None:
        """Make all but the first sequences padding."""
        if count < self._filled:
            self._rows[:, count : self._filled] = self._padding
        self._filled = count


def _even(count: int) -> int:
    """Return the next even number: kernels are compiled for pointers divisible by 16."""
    return count + (count & 1)
