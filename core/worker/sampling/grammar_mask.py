"""The tokens that grammars allow, applied before the logits processors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from hardpoint.plugins import GrammarBitmask, LogitsRequest, Ops
from hardpoint.plugins.device import to_device


class GrammarMask:
    """The rows of one step that a grammar constrains."""

    def __init__(
        self, bitmask: GrammarBitmask, requests: Sequence[LogitsRequest], ops: Ops
    ) -> None:
        """Match the rows of a bitmask with the rows of a step.

        Args:
            bitmask: bitmask of the step, also of requests without a token to choose.
            requests: one per row; views of a request after its drafts follow it.
        """
        self._ops = ops
        self._masks = np.ascontiguousarray(bitmask.bitmask, dtype=np.int32)
        first: dict[str, int] = {}
        for index, name in enumerate(bitmask.request_ids):
            first.setdefault(name, index)
        self._mask_rows: dict[int, int] = {}  # by row of the step
        seen: Counter[str] = Counter()
        for row, request in enumerate(requests):
            name = request.request_id
            if name in first:
                self._mask_rows[row] = first[name] + seen[name]
                seen[name] += 1

    def __contains__(self, row: object) -> bool:
        return row in self._mask_rows

    def rows(self, chosen: Sequence[int]) -> GrammarMask:
        """Return the mask of some rows of the step."""
        part = GrammarMask.__new__(GrammarMask)
        part._ops, part._masks = self._ops, self._masks
        part._mask_rows = {
            index: self._mask_rows[row]
            for index, row in enumerate(chosen)
            if row in self._mask_rows
        }
        return part

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the logits of forbidden tokens to -inf, in place; return them.

        Args:
            logits: float32 [rows, vocab].
        """
        if self._mask_rows:
            rows = to_device(list(self._mask_rows), logits.device)
            masks = to_device(self._masks[list(self._mask_rows.values())], logits.device)
            self._ops.keep_tokens(logits, rows, masks)
        return logits

    def forbidden(self, tokens: Sequence[int]) -> list[int]:
        """Return the rows with a token that their grammar forbids."""
        return [
            row
            for row, mask_row in self._mask_rows.items()
            if not (int(self._masks[mask_row, tokens[row] // 32]) >> tokens[row] % 32) & 1
        ]
