"""Paged attention in this package's Triton kernels for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hardpoint.builtin_plugins.gpu import load_kernels
from hardpoint.plugins import AttentionBackend, AttentionContext, AttentionStep, KVSpec, ModelError

if TYPE_CHECKING:
    from hardpoint.kernels.triton.attention import PagedStep


@dataclass(frozen=True, eq=False)
class TritonPlan:
    """Plan that the layers of a group share in a step.

    Attributes:
        paged: the sequences, for the kernels.
        slots: int64 [tokens]; where keys and values are written.
    """

    paged: PagedStep
    slots: torch.Tensor


class TritonAttention(AttentionBackend[torch.Tensor, TritonPlan]):
    """Attention in Triton; without angles or with them, which rotate where keys are written."""

    contract = 1
    kv_layout = "[blocks, keys and values, kv heads, block_size, head_size]"
    devices = ("cpu", "cuda")
    softcaps = True
    has_sinks = True
    rotates = True
    replayable = True
    pads = True

    def __init__(self, context: AttentionContext) -> None:
        """Load the kernels.

        Raises:
            ModelError: they cannot run here, or there are none for the dtype.
        """
        super().__init__(context)
        self._is_interpreted = load_kernels(context, "attention.use")
        from hardpoint.kernels.triton import attention, kv_cache  # noqa: PLC0415 - few have triton

        self._kernels, self._store = attention, kv_cache.store

    def describe(self) -> str:
        """Return the name, and whether kernels are interpreted."""
        return f"{self.name} (interpreted)" if self._is_interpreted else self.name

    def bytes_per_block(self, spec: KVSpec) -> int:
        """Return the size in bytes of one block of one layer, keys and values.

        Raises:
            ModelError: its heads are too large.
        """
        if spec.head_size > self._kernels.MAX_HEAD_SIZE:
            raise ModelError(
                f"attention.use: {self.name!r} has kernels for heads of at most "
                f"{self._kernels.MAX_HEAD_SIZE} elements, the model's have {spec.head_size}; "
                "use 'torch'"
            )
        elements = 2 * self.context.block_size * spec.num_kv_heads * spec.head_size
        return elements * self.context.dtype.itemsize

    def allocate(self, spec: KVSpec, num_blocks: int) -> torch.Tensor:
        """Return a zeroed cache of `num_blocks` blocks.

        Raises:
            ModelError: its heads are too large.
        """
        self.bytes_per_block(spec)
        shape = (num_blocks, 2, spec.num_kv_heads, self.context.block_size, spec.head_size)
        return torch.zeros(shape, dtype=self.context.dtype, device=self.context.device)

    def block_views(self, cache: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of the blocks."""
        return [cache.view(len(cache), -1).view(torch.uint8)]

    def plan(self, step: AttentionStep) -> TritonPlan:
        """Return the plan that the step's layers share."""
        longest = int(step.seq_lens[: step.num_single].max()) if step.num_single else 0
        paged = self._kernels.PagedStep(
            step.starts, step.lens, step.block_table, step.num_single, longest
        )
        return TritonPlan(paged, step.slots)

    def attend(
        self,
        spec: KVSpec,
        cache: torch.Tensor,
        plan: TritonPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Write k and v to the cache, then attend causally; shapes as in `AttentionBackend`."""
        return self._attend(spec, cache, plan, q, k, v, None)

    def rotate_and_attend(
        self,
        spec: KVSpec,
        cache: torch.Tensor,
        plan: TritonPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate q in place, write the rotated k and v, then attend."""
        return self._attend(spec, cache, plan, q, k, v, angles)

    def _attend(
        self,
        spec: KVSpec,
        cache: torch.Tensor,
        plan: TritonPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor | None,
    ) -> torch.Tensor:
        self._store(q, k, v, cache, plan.slots, angles)
        return self._kernels.attend(
            q, cache, plan.paged, spec.scale, spec.window, spec.softcap, spec.sinks
        )
