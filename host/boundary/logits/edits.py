"""Sparse edits of logits: checked and turned into tensors once, then applied by `Ops.edit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hardpoint.plugins import Edits, LogitsOps, Op
from hardpoint.plugins.device import to_device

CompiledEdits = Callable[[torch.Tensor], None]
"""Applies edits to logits [rows, vocab] in place."""


def compile_edits(
    edits: Edits, batch_rows: Sequence[int], logits: torch.Tensor, ops: LogitsOps
) -> CompiledEdits:
    """Check edits and return a function that applies them.

    Args:
        edits: with rows counted within the processor's own rows.
        batch_rows: for each of the processor's rows, its row in `logits`.
        logits: [rows, vocab]; read for its size and device.
        ops: apply them.

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
    places = [batch_rows[r] * vocab + t for r, t in zip(edits.row, edits.token, strict=True)]
    device = logits.device
    if edits.op is Op.KEEP_ONLY:
        rows = to_device(sorted({batch_rows[r] for r in edits.row}), device)
        index = to_device(list(dict.fromkeys(places)), device)
        return lambda logits: ops.edit(logits, Op.KEEP_ONLY, index, rows=rows)
    values = _values(places, edits)
    index = to_device(list(values), device)
    value = to_device(list(values.values()), device, torch.float32)
    return lambda logits: ops.edit(logits, edits.op, index, value)


def _values(places: Sequence[int], edits: Edits) -> dict[int, float]:
    values = dict(zip(places, edits.value, strict=True))
    if edits.op is Op.ADD and len(values) < len(places):
        values = dict.fromkeys(places, 0.0)
        for place, value in zip(places, edits.value, strict=True):
            values[place] += value
    return values


def _nothing(logits: torch.Tensor) -> None:
    """Leave the logits as they are."""
