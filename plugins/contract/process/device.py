"""Values of the host on a device, without making the host wait for the device.

Importing this module loads torch, as `models` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["to_device"]


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
            CPU, whose memory the result shares if it is on the CPU.
        device: device of the result.
        dtype: dtype of the result; None is that of the values, and for numbers the one that
            torch.tensor chooses.
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
