"""Transfers of tensors, and copies of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint.plugins.device import to_device
from hardpoint.plugins.process.device import HostCopy


def fetch(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return tensors of one device as lists of numbers, after a single wait for the device."""
    return HostCopy(tensors).read()


def select_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return a copy of some rows of a tensor, in the order of `rows`."""
    return tensor.index_select(0, to_device(rows, tensor.device, torch.int64))
