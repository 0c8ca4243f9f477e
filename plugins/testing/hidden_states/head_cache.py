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
            rows = [
                self._attended(layer, step, sequence, query, q[query])
                for sequence in range(len(step.seq_lens))
                for query in range(*step.query_starts[sequence : sequence + 2].tolist())
            ]
            return torch.stack(rows)

        return attend

    def _attended(
        self, layer: int, step: AttentionStep, sequence: int, query: int, q: torch.Tensor
    ) -> torch.Tensor:
        """Return the result of a query, [heads, size]."""
        after = int(step.query_starts[sequence + 1]) - query - 1
        table = step.block_table[sequence].tolist()
        rows = [
            self._rows[layer, table[place // step.block_size] * step.block_size + offset]
            for place in range(int(step.seq_lens[sequence]) - after)
            for offset in [place % step.block_size]
        ]
        keys, values = (torch.stack(part).float() for part in zip(*rows, strict=True))
        shared = q.shape[0] // keys.shape[1]
        keys, values = (x.repeat_interleave(shared, 1) for x in (keys, values))
        scores = torch.einsum("hd,phd->hp", q.float(), keys) / q.shape[1] ** 0.5
        return torch.einsum("hp,phd->hd", scores.softmax(-1), values).to(q.dtype)


def blocks_of(request_id: str) -> range:
    """Return the blocks of a request of a test, by the number in its id."""
    first = int(request_id.removeprefix("r")) * BLOCKS_PER_REQUEST
    return range(first, first + BLOCKS_PER_REQUEST)
