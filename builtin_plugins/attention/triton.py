"""Paged attention in this package's Triton kernels for GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hardpoint.builtin_plugins.gpu import load_kernels
from hardpoint.plugins import AttentionBackend, AttentionContext, AttentionStep, KVSpec, ModelError
from hardpoint.plugins.device import to_device
from hardpoint.toolkit.kv_codes import CODE_DTYPES

if TYPE_CHECKING:
    from hardpoint.kernels.triton.attention import PagedStep


Cache = tuple[torch.Tensor, ...]
"""Keys and values, [blocks, 2, num_kv_heads, block_size, head_size].

Where they are codes, their scales follow, float32 [blocks, 2, num_kv_heads, block_size].
"""


@dataclass(frozen=True, eq=False)
class TritonPlan:
    """Plan that the layers of a group share in a step.

    Attributes:
        paged: the sequences, for the kernels.
        slots: int64 [tokens]; where keys and values are written.
    """

    paged: PagedStep
    slots: torch.Tensor


class TritonAttention(AttentionBackend[Cache, TritonPlan]):
    """Attention in Triton; without angles or with them, which rotate where keys are written."""

    contract = 1
    kv_layout = "[blocks, keys and values, kv heads, block_size, head_size]"
    devices = ("cpu", "cuda")
    softcaps = True
    has_sinks = True
    sees_ahead = True
    rotates = True
    replayable = True
    pads = True
    cache_dtypes = ("auto", *CODE_DTYPES)

    def __init__(self, context: AttentionContext) -> None:
        """Load the kernels.

        Raises:
            ModelError: they cannot run here, or there are none for the dtype.
        """
        super().__init__(context)
        self._is_interpreted = load_kernels(context, "attention.use")
        from hardpoint.kernels.triton import (  # noqa: PLC0415 - few have triton
            attention,
            kv_cache,
            kv_codes,
        )

        self._kernels = attention
        self._store, self._store_codes = kv_cache.store, kv_codes.store_codes
        self._code_dtype = kv_codes.CODE_DTYPES.get(context.cache_dtype)

    def describe(self) -> str:
        """Return the name, and whether kernels are interpreted."""
        return f"{self.name} (interpreted)" if self._is_interpreted else self.name

    def bytes_per_block(self, spec: KVSpec) -> int:
        """Return the size in bytes of one block of one layer, keys and values.

        Raises:
            ModelError: its heads are too large.
        """
        dtype = self.context.dtype
        limit = self._kernels.MAX_HEAD_SIZES[dtype.itemsize]
        if spec.head_size > limit:
            raise ModelError(
                f"attention.use: {self.name!r} has kernels for heads of at most {limit} elements "
                f"in {str(dtype).removeprefix('torch.')}, the model's have {spec.head_size}; "
                "use 'torch'"
            )
        return sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in self._parts(spec, num_blocks=1)
        )

    def _parts(self, spec: KVSpec, num_blocks: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        heads = (num_blocks, 2, spec.num_kv_heads, self.context.block_size)
        sides = (*heads, spec.head_size), self._code_dtype or self.context.dtype
        return [sides] if self._code_dtype is None else [sides, (heads, torch.float32)]

    def allocate(self, spec: KVSpec, num_blocks: int) -> Cache:
        """Return a zeroed cache of `num_blocks` blocks.

        Raises:
            ModelError: its heads are too large.
        """
        self.bytes_per_block(spec)
        return tuple(
            torch.zeros(shape, dtype=dtype, device=self.context.device)
            for shape, dtype in self._parts(spec, num_blocks)
        )

    def block_views(self, cache: Cache) -> list[torch.Tensor]:
        """Return the bytes of the blocks, and of their scales."""
        return [part.view(len(part), -1).view(torch.uint8) for part in cache]

    def plan(self, step: AttentionStep) -> TritonPlan:
        """Return the plan that the step's layers share."""
        longest = int(step.seq_lens[: step.num_single].max()) if step.num_single else 0
        sees = None if step.sees is None else to_device(step.sees, step.block_table.device)
        paged = self._kernels.PagedStep(
            step.starts, step.lens, step.block_table, step.num_single, longest, sees
        )
        return TritonPlan(paged, step.slots)

    def attend(
        self,
        spec: KVSpec,
        cache: Cache,
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
        cache: Cache,
        plan: TritonPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate q, in place unless keys are codes, write the rotated k and v, then attend."""
        return self._attend(spec, cache, plan, q, k, v, angles)

    def _attend(
        self,
        spec: KVSpec,
        cache: Cache,
        plan: TritonPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor | None,
    ) -> torch.Tensor:
        numbers, *scales = cache
        if scales:
            q = self._store_codes(q, k, v, cache, plan.slots, angles)
        else:
            self._store(q, k, v, numbers, plan.slots, angles)
        return self._kernels.attend(
            q, numbers, plan.paged, spec.scale, spec.window, spec.softcap, spec.sinks, *scales
        )
