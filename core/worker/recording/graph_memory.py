"""The memory that recorded decode steps may take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint.core.worker.checked_model import CheckedModel

from .decode_inputs import DecodeShape

__all__ = ["graph_reserve"]

_GRAPH_BYTES = 8 << 20  # of one graph: what the driver keeps of its kernels
_LIBRARY_BYTES = 64 << 20  # workspaces of CUDA's libraries on the stream that records
_POOL_SHARE = 2  # of what a step needs at once: a pool of memory has gaps


def graph_reserve(
    model: CheckedModel, sizes: Sequence[int], shape: DecodeShape, device: torch.device
) -> int:
    """Return the bytes to keep free for the decode steps that are to be recorded.

    On a GPU, a trial step of the largest size is measured. Steps of all sizes share that memory.

    Args:
        model: whose weights are loaded.
        sizes: of the steps.
        shape: of their inputs.
        device: of the model.
    """
    reserve = shape.num_bytes + len(sizes) * _GRAPH_BYTES
    if device.type != "cuda":
        return reserve
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        model.run_trial(sizes[-1], 1)
    peak = torch.cuda.max_memory_allocated(device) - before
    return reserve + _LIBRARY_BYTES + _POOL_SHARE * peak
