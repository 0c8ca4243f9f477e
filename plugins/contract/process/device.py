"""Transfers between host and device without a wait of the host for the device.

Importing this module loads torch, as `models` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["to_device"]

_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
}


class HostCopy:
    """A copy of tensors to the host, begun by the constructor and read once it is complete."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin the copy, behind the work that is queued on the current stream.

        Args:
            tensors: int64 or float32, of any shapes and strides, on one device.
        """
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type == "cpu":
            return
        parts = [tensor.flatten().contiguous().view(torch.uint8) for tensor in tensors]
        packed = torch.cat(parts)
        if packed.device.type != "cuda":
            self._packed = packed.cpu()
            return
        self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._packed.copy_(packed, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_complete(self) -> bool:
        """Return whether `read` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[Any]:
        """Wait for the copy; return the tensors as lists of numbers."""
        if self._tensors[0].device.type == "cpu":
            return [tensor.tolist() for tensor in self._tensors]
        if self._event is not None:
            self._event.synchronize()
        packed, lists, start = self._packed.numpy(), [], 0
        for tensor in self._tensors:
            dtype = _DTYPES[tensor.dtype]
            end = start + tensor.numel() * dtype.itemsize
            lists.append(packed[start:end].view(dtype).reshape(tensor.shape).tolist())
            start = end
        return lists


def to_device(
    values: Sequence[Any] | np.ndarray[Any, Any] | torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return values of the host as a tensor on a device.

    `torch.tensor(values, device=device)` and `tensor.to(device)` make the host wait until a GPU has
    done all that was asked of it before. This copies from pinned memory instead, behind the work
    that is queued on the current stream.

    Args:
        values: a list or tuple of numbers, or of such lists; or a numpy array or a tensor on the
            CPU; the result shares its memory if it is on the CPU.
        device: device of the result.
        dtype: dtype of the result; None keeps the dtype of the values, and for numbers the default
            of torch.tensor.
    """
    # Lists first: looking up whether something is a tensor takes a good part of a short step.
    if isinstance(values, list):
        host = torch.tensor(values, dtype=dtype)
    elif isinstance(values, np.ndarray):
        host = torch.from_numpy(values)
        host = host if dtype is None else host.to(dtype)
    elif isinstance(values, torch.Tensor):
        host = values if dtype is None else values.to(dtype)
    else:
        host = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    if device.type != "cuda":
        return host.to(device)
    # New for each call, so that no caller changes it before it is copied: torch's allocator keeps
    # pinned memory that is released until the stream has read it.
    pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    return pinned.copy_(host).to(device, non_blocking=True)
