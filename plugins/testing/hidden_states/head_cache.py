"""KV cache for the conformance tests of drafting heads: notes the slots that they write."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint.plugins import AttentionStep
from hardpoint.plugins.model import Attend
from hardpoint.plugins.worker_half import AllocatedCache

BLOCK_SIZE = 16
BLOCKS_PER_REQUEST = 1 << 12


class HeadCache:
    """Keys and values by layer and slot, with plain attention over them.

    Attributes:
        written: slots that were written.
    """

    def __init__(self) -> None:
        """Begin without content."""
        self._rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.written: set[int] = set()

    def allocated(self, max_model_len: int) -> AllocatedCache:
        """Return the cache as heads see it."""
        return AllocatedCache(
            self.attend, max_model_len, BLOCK_SIZE, 1, 1 << 30, group_of=(0,), windows=(None,)
        )

    def forget(self, request_id: str) -> None:
        """Drop the keys and values of a request."""
        blocks = blocks_of(request_id)
        self._rows = {
            (layer, slot): row
            for (layer, slot), row in self._rows.items()
            if slot // BLOCK_SIZE not in blocks
        }

    def attend(self, steps: Sequence[AttentionStep]) -> Attend:
        """Return the attention of a step; keys are not rotated."""
        (step,) = steps

        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            angles: torch.Tensor | None = None,  # noqa: ARG001
        ) -> torch.Tensor:
            slots = step.slots.tolist()
            self.written.update(slots)
            for slot, key, value in zip(slots, k, v, strict=True):
                self._rows[layer, slot] = key.clone(), value.clone()
            bounds = step.query_starts.tolist()
            rows = [
                self._attended(layer, step, sequence, q[slice(*bounds[sequence : sequence + 2])])
                for sequence in range(len(step.seq_lens))
            ]
            return torch.cat(rows)

        return attend

    def _attended(
        self, layer: int, step: AttentionStep, sequence: int, q: torch.Tensor
    ) -> torch.Tensor:
        """Return the results of the queries of a sequence, [queries, heads, size]."""
        table, size = step.block_table[sequence].tolist(), step.block_size
        length = int(step.seq_lens[sequence])
        rows = [self._rows[layer, table[n // size] * size + n % size] for n in range(length)]
        keys, values = (torch.stack(part).float() for part in zip(*rows, strict=True))
        shared = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(shared, 1) for x in (keys, values))
        scores = torch.einsum("qhd,phd->hqp", q.float(), keys) / q.shape[2] ** 0.5
        later = torch.ones(len(q), length, dtype=torch.bool).triu(length - len(q) + 1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("hqp,phd->qhd", weights, values).to(q.dtype)


def blocks_of(request_id: str) -> range:
    """Return the blocks of a request of a test, by the number in its id."""
    first = int(request_id.removeprefix("r")) * BLOCKS_PER_REQUEST
    return range(first, first + BLOCKS_PER_REQUEST)
