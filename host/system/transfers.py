"""Transfers between host and device, of which a step has to wait for one: that of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hardpoint.plugins.device import to_device

_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
}


def fetch(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return tensors of one device as lists of numbers, after a single wait for the device.

    Args:
        tensors: int64 or float32, of any shapes and strides.
    """
    if tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    parts = [tensor.flatten().contiguous().view(torch.uint8) for tensor in tensors]
    packed = torch.cat(parts).cpu().numpy()
    lists = []
    start = 0
    for tensor in tensors:
        dtype = _DTYPES[tensor.dtype]
        end = start + tensor.numel() * dtype.itemsize
        lists.append(packed[start:end].view(dtype).reshape(tensor.shape).tolist())
        start = end
    return lists


def select_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return a copy of some rows of a tensor, in the order of `rows`."""
    return tensor.index_select(0, to_device(rows, tensor.device, torch.int64))
