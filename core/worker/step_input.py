"""The input of a step: its tokens, flattened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardpoint.plugins import AttentionStep, LogitsRequest
from hardpoint.toolkit.batches.packed_step import IntArray, PackedStep


@dataclass(eq=False)
class StepInput:
    """The tokens of one step, flattened; sequences with a single token come first.

    Attributes:
        requests: in the order of the step's sequences.
        token_ids: int64 [tokens].
        positions: int64 [tokens].
        attention: the layout of the sequences for the attention backend, one per KV cache group.
        query_starts: as in each of `attention`.
        starts: int [seqs]; tokens of each sequence that were computed before.
        samples: bool [seqs]; whether the step reaches the sequence's last known token or draft.
        packed: the tensors in one; None if the batch does not pack them.
        token_types, needed: as in ForwardBatch.
    """

    requests: Sequence[LogitsRequest]
    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: Sequence[AttentionStep]
    query_starts: IntArray
    starts: IntArray
    samples: np.ndarray[Any, np.dtype[np.bool_]]
    packed: PackedStep | None = None
    token_types: torch.Tensor | None = None
    needed: torch.Tensor | None = None

    def experts_by_request(self, routed: torch.Tensor) -> dict[str, Any]:
        """Return the experts of the tokens of each request that asks for them."""
        rows, starts = routed.cpu().numpy(), self.query_starts
        return {
            request.request_id: rows[starts[index] : starts[index + 1]].copy()
            for index, request in enumerate(self.requests)
            if request.params.routed_experts
        }
