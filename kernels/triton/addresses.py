"""Addresses of tensors on the device, for kernels that find one of many by its number.

In torch, where all have one shape: `torch.stack(tensors)[number]`, without the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Addresses"]


class Addresses:
    """The addresses of tensors, also after their memory was moved."""

    def __init__(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        """Keep tensors of one device, in rows of one length."""
        self._tensors = tensors
        # Memory is moved by storages, of which there may be far fewer.
        storages = (tensor.untyped_storage() for row in tensors for tensor in row)
        self._storages = tuple({storage.data_ptr(): storage for storage in storages}.values())
        self._known: tuple[int, ...] = ()
        size, device = (len(tensors), len(tensors[0])), tensors[0][0].device
        self._table = torch.empty(size, dtype=torch.int64, device=device)

    def table(self) -> torch.Tensor:
        """Return the addresses, int64 [rows, tensors of a row]: always the same tensor."""
        known = tuple(storage.data_ptr() for storage in self._storages)
        if known != self._known:
            pointers = [[tensor.data_ptr() for tensor in row] for row in self._tensors]
            # From pinned memory the copy is queued behind the work that reads the old addresses.
            is_cuda = self._table.device.type == "cuda"
            host = torch.tensor(pointers, dtype=torch.int64, pin_memory=is_cuda)
            self._table.copy_(host, non_blocking=True)
            self._known = known
        return self._table
