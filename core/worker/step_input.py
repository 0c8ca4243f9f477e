"""The input of a step: its tokens, flattened, and the integers that one copy takes to a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardpoint.plugins import AttentionStep, EngineCoreRequest, LogitsRequest
from hardpoint.plugins.device import to_device

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
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
        token_types: as in ForwardBatch.
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

    def experts_by_request(self, routed: torch.Tensor) -> dict[str, Any]:
        """Return the experts of the tokens of each request that asks for them."""
        rows, starts = routed.cpu().numpy(), self.query_starts
        return {
            request.request_id: rows[starts[index] : starts[index + 1]].copy()
            for index, request in enumerate(self.requests)
            if request.params.routed_experts
        }


def even(count: int) -> int:
    """Return the next even number: kernels are compiled for pointers divisible by 16."""
    return count + (count & 1)


class PackedStep:
    """The integers of a step on a device, int64, as views of one tensor.

    Attributes:
        token_ids: [tokens].
        positions: [tokens].
        slots: slots of each group, [tokens].
        lens: [seqs].
        starts: [seqs + 1].
        tables: block tables of each group, [seqs, blocks].
    """

    def __init__(
        self,
        token_ids: IntArray,
        positions: IntArray,
        slots: IntArray,
        lens: IntArray,
        starts: IntArray,
        tables: IntArray,
        device: torch.device,
    ) -> None:
        """Copy the arrays to a device; the host does not wait for it.

        The shapes are those of the attributes, after [groups] for slots and tables.
        """
        self._num_tokens = count = len(token_ids)
        self._num_groups = groups = len(slots)
        self._stride = stride = even(count)
        seqs, table = len(lens), even(tables[0].size)
        lens_at = (2 + groups) * stride
        starts_at = lens_at + even(seqs)
        tables_at = starts_at + even(seqs + 1)
        packed = np.empty(tables_at + groups * table, dtype=np.int64)
        by_token = packed[:lens_at].reshape(2 + groups, stride)
        by_token[0, :count], by_token[1, :count], by_token[2:, :count] = token_ids, positions, slots
        packed[lens_at : lens_at + seqs] = lens
        packed[starts_at : starts_at + seqs + 1] = starts
        packed[tables_at:].reshape(groups, table)[:, : tables[0].size] = tables.reshape(groups, -1)
        flat = self._flat = to_device(packed, device)

        def view(at: int, size: int) -> torch.Tensor:
            return flat.as_strided((size,), (1,), at)

        self.token_ids, self.positions = view(0, count), view(stride, count)
        self.lens, self.starts = view(lens_at, seqs), view(starts_at, seqs + 1)
        shape, strides = tables.shape[1:], (tables.shape[2], 1)
        self.slots = [view((2 + group) * stride, count) for group in range(groups)]
        self.tables = [
            flat.as_strided(shape, strides, tables_at + group * table) for group in range(groups)
        ]

    @property
    def rows(self) -> torch.Tensor:
        """Token ids, positions, slots of each group, and lens: [3 + groups, tokens].

        For a step with one token per sequence.
        """
        shape = 3 + self._num_groups, self._num_tokens
        return self._flat.as_strided(shape, (self._stride, 1), 0)


class Spans:
    """Spans of prompts whose tokens see each other, such as those of an image."""

    def __init__(self) -> None:
        self._of: dict[str, Sequence[range]] = {}

    def add(self, request: EngineCoreRequest) -> None:
        """Add those of a request, if it has any."""
        if found := [range(f.offset, f.end) for f in request.features if f.sees_itself]:
            self._of[request.request_id] = found

    def remove(self, request_id: str) -> None:
        """Remove those of a request."""
        self._of.pop(request_id, None)

    def last_seen(
        self,
        requests: Sequence[LogitsRequest],
        starts: IntArray,
        query_starts: IntArray,
        positions: IntArray,
    ) -> IntArray | None:
        """Return the last position that each token of a step sees; None if each sees its own.

        Args:
            requests: requests of the step.
            starts: tokens of each that were computed before.
            query_starts: first token of each, and the number of all tokens.
            positions: position of each token.
        """
        sees: IntArray | None = None
        for index, request in enumerate(requests if self._of else ()):
            first, begin = int(starts[index]), int(query_starts[index])
            end = first + int(query_starts[index + 1]) - begin
            for span in self._of.get(request.request_id, ()):
                seen = range(max(span.start, first), min(span.stop, end))
                if seen:
                    sees = positions.copy() if sees is None else sees
                    sees[begin + seen.start - first : begin + seen.stop - first] = seen.stop - 1
        return sees
