"""Copies of the rows of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint.plugins.device import to_device


def select_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return a copy of some rows of a tensor, in the order of `rows`."""
    return tensor.index_select(0, to_device(rows, tensor.device, torch.int64))
