"""Sparse edits of logits: checked and turned into tensors once, then applied in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hardpoint.plugins import Edits, Op
from hardpoint.plugins.device import to_device

CompiledEdits = Callable[[torch.Tensor], None]
"""Applies edits to logits [rows, vocab] in place."""


def compile_edits(edits: Edits, batch_rows: Sequence[int], logits: torch.Tensor) -> CompiledEdits:
    """Check edits and return a function that applies them.

    Args:
        edits: with rows counted within the processor's own rows.
        batch_rows: for each of the processor's rows, its row in `logits`.
        logits: [rows, vocab]; read for its size and device.

    Raises:
        TypeError: their `op` is no Op.
        ValueError: the edits do not fit together, or lie outside the rows or the vocabulary.
    """
    vocab = logits.shape[1]
    if not isinstance(edits.op, Op):
        choices = ", ".join(f"Op.{op.name}" for op in Op)
        raise TypeError(f"edits have op={edits.op!r}, expected one of {choices}")
    if len(edits.row) != len(edits.token):
        raise ValueError(f"edits have {len(edits.row)} rows but {len(edits.token)} tokens")
    if edits.op is not Op.KEEP_ONLY and len(edits.value) != len(edits.token):
        raise ValueError(f"edits have {len(edits.token)} tokens but {len(edits.value)} values")
    if len(edits.row) == 0:
        return _nothing
    if min(edits.row) < 0 or max(edits.row) >= len(batch_rows):
        raise ValueError(f"edits name rows outside 0..{len(batch_rows) - 1}")
    if min(edits.token) < 0 or max(edits.token) >= vocab:
        raise ValueError(f"edits name tokens outside 0..{vocab - 1}")
    # Flat indices: one index tensor is half as much work as a pair.
    indices = [batch_rows[r] * vocab + t for r, t in zip(edits.row, edits.token, strict=True)]
    if edits.op is Op.KEEP_ONLY:
        return _keep_only(indices, {batch_rows[r] for r in edits.row}, logits)
    if edits.op is Op.SET:
        return _set(dict(zip(indices, edits.value, strict=True)), logits)
    return _add(indices, edits.value, logits)


def _set(values: dict[int, float], logits: torch.Tensor) -> CompiledEdits:
    index = to_device(list(values), logits.device)
    value = to_device(list(values.values()), logits.device, torch.float32)

    def put(logits: torch.Tensor) -> None:
        logits.put_(index, value)

    return put


def _add(indices: list[int], values: Sequence[float], logits: torch.Tensor) -> CompiledEdits:
    index = to_device(indices, logits.device)
    value = to_device(values, logits.device, torch.float32)
    if len(set(indices)) < len(indices):  # put_ sums duplicates in no defined order
        row, token = index // logits.shape[1], index % logits.shape[1]

        def add_in_order(logits: torch.Tensor) -> None:
            logits.index_put_((row, token), value, accumulate=True)

        return add_in_order

    def add(logits: torch.Tensor) -> None:
        logits.put_(index, value, accumulate=True)

    return add


def _keep_only(indices: list[int], rows: set[int], logits: torch.Tensor) -> CompiledEdits:
    index = to_device(indices, logits.device)
    row_index = to_device(sorted(rows), logits.device)
    are_all_rows = len(rows) == len(logits)

    def keep(logits: torch.Tensor) -> None:
        kept = logits.take(index)
        if are_all_rows:
            logits.fill_(-torch.inf)
        else:
            logits.index_fill_(0, row_index, -torch.inf)
        logits.put_(index, kept)

    return keep


def _nothing(logits: torch.Tensor) -> None:
    """Leave the logits as they are."""
