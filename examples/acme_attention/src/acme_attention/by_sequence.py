"""Paged attention by scaled_dot_product_attention, one sequence after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch.nn.functional import scaled_dot_product_attention

from hardpoint.plugins import Arguments, AttentionBackend, AttentionStep, KVSpec


@dataclass(frozen=True, eq=False)
class Span:
    """A sequence of a step.

    Attributes:
        queries: its tokens in the step.
        blocks: those that hold its keys and values, int64 [blocks].
        length: length of the sequence, the step's tokens included.
        window: tokens that each token of the request attends to; None is unlimited.
    """

    queries: slice
    blocks: torch.Tensor
    length: int
    window: int | None

    def mask(self, window: int | None) -> torch.Tensor:
        """Return which keys each query sees, bool [queries, length]; `window` is the layer's."""
        keys = torch.arange(self.length, device=self.blocks.device)
        ages = keys[self.queries.start - self.queries.stop :, None] - keys
        window = min(window or self.length, self.window or self.length)
        return (ages >= 0) & (ages < window)


@dataclass(frozen=True, eq=False)
class Plan:
    """Data that layers share in a step: where keys and values are written, and the sequences."""

    slots: torch.Tensor
    spans: Sequence[Span]


class BySequence(AttentionBackend[torch.Tensor, Plan]):
    """A cache is [2, blocks, block_size, num_kv_heads, head_size]: keys, then values.

    A request may limit its attention: `plugin_args={"attention_backends/by_sequence":
    {"window": 256}}`.
    """

    class Arguments(Arguments):
        """Arguments of a request.

        Attributes:
            window: tokens that a token attends to, itself included; None is unlimited.
        """

        window: Annotated[int, Meta(ge=1)] | None = None

    contract = 1
    kv_layout = "acme: keys, then values, [2, blocks, block_size, num_kv_heads, head_size]"
    devices = ("cpu", "cuda")

    def bytes_per_block(self, spec: KVSpec) -> int:
        """Return the bytes of one block, keys and values."""
        elements = 2 * self.context.block_size * spec.num_kv_heads * spec.head_size
        return elements * self.context.dtype.itemsize

    def allocate(self, spec: KVSpec, num_blocks: int) -> torch.Tensor:
        """Return a zeroed cache."""
        shape = (2, num_blocks, self.context.block_size, spec.num_kv_heads, spec.head_size)
        return torch.zeros(shape, dtype=self.context.dtype, device=self.context.device)

    def block_views(self, cache: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of keys and the bytes of values."""
        return [part.flatten(1).view(torch.uint8) for part in cache]

    def plan(self, step: AttentionStep) -> Plan:
        """Return the sequences of a step."""
        starts = step.query_starts.tolist()
        windows = [arguments.window for arguments in step.arguments] or [None] * len(step.seq_lens)
        spans: list[Span] = []
        for i, length in enumerate(step.seq_lens.tolist()):
            blocks = step.block_table[i, : -(-length // step.block_size)]
            spans.append(Span(slice(starts[i], starts[i + 1]), blocks, length, windows[i]))
        return Plan(step.slots, spans)

    def attend(
        self,
        spec: KVSpec,
        cache: torch.Tensor,
        plan: Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Write k and v to their slots, then attend to the blocks of each sequence."""
        cache.flatten(1, 2)[:, plan.slots] = torch.stack([k, v])
        out = torch.empty_like(q)
        for span in plan.spans:
            keys, values = cache[:, span.blocks].flatten(1, 2)[:, : span.length].transpose(1, 2)
            rows = scaled_dot_product_attention(
                q[span.queries].transpose(0, 1),
                keys,
                values,
                attn_mask=span.mask(spec.window),
                scale=spec.scale,
                enable_gqa=True,
            )
            out[span.queries] = rows.transpose(0, 1)
        return out
