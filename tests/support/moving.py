"""Memory that moves, like weights in a sleep of level 1."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hardpoint.host.system.memory import MovedWeights

_MOST = 4096
"""Tensors after which no other will get the memory that was freed."""


def move_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors out of memory and back, to other addresses with separate storages."""
    for tensor in tensors:
        before = tensor.data_ptr()
        moved = MovedWeights([tensor])
        taken = [torch.full_like(tensor, 1)]
        while taken[-1].data_ptr() != before and len(taken) < _MOST:
            taken.append(torch.full_like(tensor, 1))  # the last one is where it was
        moved.move_back()
        assert tensor.data_ptr() != before, len(taken)
