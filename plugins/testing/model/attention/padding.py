"""The rule of padding in recorded steps of an attention backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hardpoint.plugins import AttentionBackend, AttentionStep, KVSpec
from hardpoint.testing.model.sequences import WholeHistory
from hardpoint.testing.suite import short_repr

from .cases import PADDING, RESULT, check_output

__all__ = ["check_padding"]


@torch.inference_mode()
def check_padding(
    backend: AttentionBackend[Any, Any],
    spec: KVSpec,
    inputs: Callable[[int], list[torch.Tensor]],
    history: WholeHistory,
    limit: float,
) -> None:
    """Run a prompt of a block, then a recorded step: two sequences, the rest is padding.

    Args:
        inputs: returns queries, keys and values of so many tokens.
        history: history of the layer, empty.
        limit: largest difference.

    Raises:
        Violation: the recorded step has another result.
    """
    block_size, device = backend.context.block_size, backend.context.device
    cache = backend.allocate(spec, 4)
    # The last slot, which is that of index -1, is in the first block of a.
    tables = torch.tensor([[3, 0], [1, 2]], device=device)
    places = tables[:, :1] * block_size + torch.arange(block_size, device=device)
    prompt = AttentionStep(
        query_starts=np.arange(3) * block_size,
        seq_lens=np.full(2, block_size),
        num_single=2 if block_size == 1 else 0,
        block_table=tables[:, :1].contiguous(),
        slots=places.flatten(),
        block_size=block_size,
    )
    q, k, v = inputs(2 * block_size)
    backend.attend(spec, cache, backend.plan(prompt), q.clone(), k.clone(), v.clone())
    history.append([("a", block_size), ("b", block_size)], k, v)
    size, counts = 5, [("a", 1), ("b", 1)]
    table = torch.zeros(size, 3, dtype=torch.int64, device=device)
    slots, lens = torch.full_like(table[:, 0], -1), torch.zeros_like(table[:, 0])
    recorded = AttentionStep(
        query_starts=np.arange(size + 1),
        seq_lens=np.full(size, 3 * block_size),
        num_single=size,
        block_table=table,
        slots=slots,
        block_size=block_size,
        on_device=(torch.arange(size + 1, device=device), lens),
    )
    plan = backend.plan(recorded)
    table[:2, :2], slots[:2], lens[:2] = tables, tables[:, 1] * block_size, block_size + 1
    q, k, v = inputs(size)
    out = backend.attend(spec, cache, plan, q.clone(), k.clone(), v.clone())
    history.append(counts, k[:2], v[:2])
    if not isinstance(out, torch.Tensor) or out.shape != q.shape:
        raise RESULT.violation(f"attend returned {short_repr(out)}, q is {list(q.shape)}")
    check_output(PADDING, out[:2], q[:2], history, counts, limit)
