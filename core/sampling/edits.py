"""Sparse edits: checked once, turned into tensors once, applied in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hardpoint.plugins import Edits, Op

__all__ = ["CompiledEdits", "compile_edits"]

CompiledEdits = Callable[[torch.Tensor], None]
"""Applies edits to logits [rows, vocab] in place."""


def compile_edits(edits: Edits, batch_rows: Sequence[int], logits: torch.Tensor) -> CompiledEdits:
    """Check edits and return a function that applies them.

    Args:
        edits: with rows counted within the processor's own rows.
        batch_rows: for each of the processor's rows, its row in `logits`.
        logits: [rows, vocab]; read for its size and device.

    Raises:
        ValueError: the edits do not fit together, or lie outside the rows or the vocabulary.
    """
    vocab = logits.shape[1]
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
    row = torch.tensor([batch_rows[r] for r in edits.row], device=logits.device)
    token = torch.tensor(list(edits.token), device=logits.device)
    if edits.op is Op.KEEP_ONLY:
        return _keep_only(row, token)
    value = torch.tensor(list(edits.value), dtype=torch.float32, device=logits.device)
    add = edits.op is Op.ADD

    def put(logits: torch.Tensor) -> None:
        logits.index_put_((row, token), value, accumulate=add)

    return put


def _keep_only(row: torch.Tensor, token: torch.Tensor) -> CompiledEdits:
    rows = torch.unique(row)

    def keep(logits: torch.Tensor) -> None:
        kept = logits[row, token]
        logits[rows] = -torch.inf
        logits[row, token] = kept

    return keep


def _nothing(logits: torch.Tensor) -> None:
    """Leave the logits as they are."""
