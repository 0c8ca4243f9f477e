"""Paged attention in this package's C++ kernels for CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from hardpoint.builtin_plugins.native import Results, check_tensors, load_kernels
from hardpoint.kernels import cpu
from hardpoint.plugins import AttentionBackend, AttentionContext, AttentionStep, KVSpec

_LONG_WORK = 4_000  # of a plan that is worth releasing Python's lock, about a millisecond
_WORK = 13  # index of the work in a plan
_HUGE_PAGE = 1 << 21
_SHIFT = 5 << 16  # bytes; its multiples are spread over a huge page

# Contents of a cache, as the kernels number them, by `kv_cache.dtype`.
_STORED = {"auto": 0, "int8": 1, "fp8": 2}

_Key = tuple[int | None, int, int]


def _key(spec: KVSpec) -> _Key:
    return spec.window, spec.num_heads, spec.num_kv_heads


class NativePlan:
    """The plans of a step, by window and heads."""

    def __init__(self, step: AttentionStep, make: Callable[..., int]) -> None:
        """Keep the step's arrays, which the kernels read; `make` is the kernel that plans."""
        self.group = step.group
        self._step = step
        self._make_plan = make
        self._plans: dict[_Key, tuple[np.ndarray, int, bool]] = {}

    def for_layer(self, spec: KVSpec) -> tuple[int, bool]:
        """Return the address of a layer's plan, and whether its work takes long."""
        key = _key(spec)
        entry = self._plans.get(key)
        if entry is None:
            plan = self._make(spec)
            is_long = int(plan[_WORK]) * spec.head_size > 64 * _LONG_WORK
            entry = self._plans[key] = (plan, plan.ctypes.data, is_long)
        return entry[1:]

    def _make(self, spec: KVSpec) -> np.ndarray:
        step = self._step
        capacity = 64 + 4 * len(step.slots) + 16 * len(step.seq_lens)
        sees = None if step.sees is None else step.sees.ctypes.data
        while True:
            plan = np.empty(capacity, np.int64)
            size = self._make_plan(
                step.query_starts.ctypes.data, step.seq_lens.ctypes.data, len(step.seq_lens),
                step.block_table.data_ptr(), step.block_table.stride(0), step.slots.data_ptr(),
                sees, step.block_size, spec.window or 0, spec.num_heads, spec.num_kv_heads,
                plan.ctypes.data, plan.nbytes,
            )  # fmt: skip
            if size <= plan.nbytes:
                return plan
            capacity = -(-size // 8)


class NativeAttention(AttentionBackend[torch.Tensor, NativePlan]):
    """Attention in C++; a query's result is the same, bit for bit, in any step."""

    contract = 1
    kv_layout = (
        "[blocks, keys and values], each [kv heads, groups of 16 tokens], keys [head size, 16], "
        "values [head size / 16, 16 tokens, 16]; pairs of bfloat16 side by side"
    )
    devices = ("cpu",)
    softcaps = True
    has_sinks = True
    sees_ahead = True
    rotates = True
    replayable = True
    cache_dtypes = tuple(_STORED)

    def __init__(self, context: AttentionContext) -> None:
        """Load the kernels.

        Raises:
            ModelError: they cannot run here, or there are none for the dtype.
        """
        super().__init__(context)
        library = self._library = load_kernels(context, "attention.use")
        dtype = context.dtype
        self._stored = _STORED[context.cache_dtype]
        self._start = 0  # of the last cache in its memory, in bytes
        self._cache_dtype = torch.uint8 if self._stored else dtype  # codes are mixed with scales
        self._results = Results(library)
        self._make_plan = library.function("attention_plan", None)
        self._rotate = library.function("rotate", dtype)
        self._short = library.function("attend", dtype)
        self._long = library.function("attend", dtype, releases=True)
        # Where the kernels find the plan of a layer: recorded calls keep its place.
        self._places: dict[tuple[int, _Key], tuple[KVSpec, ctypes.c_void_p, int]] = {}

    def bytes_per_block(self, spec: KVSpec) -> int:
        """Return the bytes of one block of one layer, padding included."""
        return self._elements(spec) * self._cache_dtype.itemsize

    def _elements(self, spec: KVSpec) -> int:
        elements = self._library.function("attention_block", self.context.dtype)
        block_size = self.context.block_size
        return int(elements(self._stored, spec.head_size, spec.num_kv_heads, block_size))

    def allocate(self, spec: KVSpec, num_blocks: int) -> torch.Tensor:
        """Return [blocks, elements], zero; the system allocates pages when they are used."""
        elements, dtype = self._elements(spec), self._cache_dtype
        # Else all layers would enter a new huge page in one step, which takes 0.2 s for 30 layers.
        self._start = (self._start + _SHIFT) % _HUGE_PAGE
        memory = cpu.allocate_pages(self._start + num_blocks * elements * dtype.itemsize)
        blocks = torch.frombuffer(memory, dtype=dtype, offset=self._start)
        return blocks.view(num_blocks, elements)

    def block_views(self, cache: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of the blocks, padding included."""
        return [cache.view(torch.uint8)]

    def plan(self, step: AttentionStep) -> NativePlan:
        """Return the plan that the layers of a group share."""
        plan = NativePlan(step, self._make_plan)
        for (group, _), (spec, place, _) in self._places.items():
            if group == step.group:
                place.value = plan.for_layer(spec)[0]
        return plan

    def attend(
        self,
        spec: KVSpec,
        cache: torch.Tensor,
        plan: NativePlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Write k and v to the cache, then attend causally; shapes as in `AttentionBackend`."""
        check_tensors(self.context.dtype, q, k, v)
        check_tensors(self._cache_dtype, cache)
        out = self._results.empty(q.shape, q.dtype)
        place, place_at = self._place(spec, plan.group)
        place.value, is_long = plan.for_layer(spec)
        sinks = None if spec.sinks is None else spec.sinks.data_ptr()
        self._library.run(
            self._long if is_long else self._short, q.data_ptr(), q.stride(0), k.data_ptr(),
            k.stride(0), v.data_ptr(), v.stride(0), out.data_ptr(), self._stored, cache.data_ptr(),
            place_at, spec.head_size, float(spec.scale), float(spec.softcap or 0.0), sinks,
        )  # fmt: skip
        return out

    def rotate_and_attend(
        self,
        spec: KVSpec,
        cache: torch.Tensor,
        plan: NativePlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate q and k in place, in one call where they are parts of one tensor; then attend."""
        heads = q.shape[1]
        size = heads * q.stride(1) * q.element_size()
        if k.data_ptr() == q.data_ptr() + size and k.stride() == q.stride():
            self._turn(q, heads + k.shape[1], angles)
        else:
            self._turn(q, heads, angles)
            self._turn(k, k.shape[1], angles)
        return self.attend(spec, cache, plan, q, k, v)

    def _turn(self, x: torch.Tensor, heads: int, angles: torch.Tensor) -> None:
        check_tensors(self.context.dtype, x)
        self._library.run(
            self._rotate, x.data_ptr(), x.stride(0), x.stride(1), angles.data_ptr(), len(x), heads,
            angles.shape[1],
        )  # fmt: skip

    def _place(self, spec: KVSpec, group: int) -> tuple[ctypes.c_void_p, int]:
        key = group, _key(spec)
        if key not in self._places:
            place = ctypes.c_void_p()
            self._places[key] = spec, place, ctypes.addressof(place)
        return self._places[key][1:]
