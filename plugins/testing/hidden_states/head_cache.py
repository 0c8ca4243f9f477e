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
    """Keys and values by layer and block, with plain attention over them.

    Slots that were not written are zero.

    Attributes:
        written: slots that were written.
    """

    def __init__(self) -> None:
        """Begin without content."""
        self._blocks: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.written: set[int] = set()

    def allocated(self, max_model_len: int) -> AllocatedCache:
        """Return the cache as heads see it."""
        return AllocatedCache(
            self.attend, max_model_len, BLOCK_SIZE, 1, 1 << 30, group_of=(0,), windows=(None,)
        )

    def forget(self, request_id: str) -> None:
        """Drop the keys and values of a request."""
        blocks = blocks_of(request_id)
        self.written = {slot for slot in self.written if slot // BLOCK_SIZE not in blocks}
        self._blocks = {
            (layer, block): rows
            for (layer, block), rows in self._blocks.items()
            if block not in blocks
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
            new = [part.new_zeros(BLOCK_SIZE, *part.shape[1:]) for part in (k, v)]
            for slot, key, value in zip(slots, k, v, strict=True):
                block = layer, slot // BLOCK_SIZE
                if block not in self._blocks:
                    self._blocks[block] = new[0].clone(), new[1].clone()
                keys, values = self._blocks[block]
                keys[slot % BLOCK_SIZE], values[slot % BLOCK_SIZE] = key, value
            bounds = step.query_starts.tolist()
            parts = []
            for sequence, block_ids in enumerate(step.block_table.tolist()):
                length = int(step.seq_lens[sequence])
                used = block_ids[: -(-length // BLOCK_SIZE)]
                rows = [self._blocks.get((layer, block), new) for block in used]
                keys, values = (torch.cat(part)[:length] for part in zip(*rows, strict=True))
                parts.append(_attended(q[slice(*bounds[sequence : sequence + 2])], keys, values))
            return torch.cat(parts)

        return attend


def _attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the results of the last queries of a sequence, [queries, heads, size]."""
    length, shared = len(keys), q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(shared, 1) for x in (keys, values))
    scores = torch.einsum("qhd,phd->hqp", q.float(), keys) / q.shape[2] ** 0.5
    later = torch.ones(len(q), length, dtype=torch.bool, device=q.device)
    weights = scores.masked_fill(later.triu(length - len(q) + 1), float("-inf")).softmax(-1)
    return torch.einsum("hqp,phd->qhd", weights, values).to(q.dtype)


def blocks_of(request_id: str) -> range:
    """Return the blocks of a request of a test, by the number in its id."""
    first = int(request_id.removeprefix("r")) * BLOCKS_PER_REQUEST
    return range(first, first + BLOCKS_PER_REQUEST)
