"""Checks of `AttentionBackend.block_views`: how a cache's blocks look to KV connectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hardpoint.plugins import AttentionBackend, KVSpec
from hardpoint.testing.suite import Rule, Violation, short_repr

NUM_BLOCKS = 24
"""Of a cache under check."""

BLOCK_VIEWS = Rule(
    "block views: block_views returns the memory of the cache, all bytes of each block once",
    "return one or more uint8 views [num_blocks, bytes] of the result of allocate, without "
    "copying, with contiguous rows that have bytes_per_block bytes in total; or leave out the "
    "method",
)
MOVED_BLOCKS = Rule(
    "moved blocks: data copied from one block's rows to another block's is read there",
    "keep all of a block in its rows, and nothing that depends on its number",
)


def views_of(backend: AttentionBackend, cache: Any) -> list[torch.Tensor]:
    """Return the views of a cache.

    Raises:
        NotImplementedError: the backend has none.
        Violation: they are not tensors.
    """
    views = backend.block_views(cache)
    is_sequence = isinstance(views, Sequence) and not isinstance(views, torch.Tensor)
    if not is_sequence or not all(isinstance(view, torch.Tensor) for view in views) or not views:
        returned = "one tensor" if isinstance(views, torch.Tensor) else short_repr(views)
        raise BLOCK_VIEWS.violation(f"it returned {returned}, expected a sequence of tensors")
    return list(views)


def check_views(
    backend: AttentionBackend, spec: KVSpec, tensors_of: Callable[[Any], Iterable[torch.Tensor]]
) -> None:
    """Check the shapes and the memory of a cache's views.

    Args:
        backend: under test.
        spec: spec of the layer.
        tensors_of: yields the tensors of a cache.

    Raises:
        Violation: they are wrong.
    """
    cache = backend.allocate(spec, NUM_BLOCKS)
    views = views_of(backend, cache)
    for view in views:
        shape = list(view.shape)
        if view.dtype != torch.uint8 or len(shape) != 2 or shape[0] != NUM_BLOCKS:
            raise BLOCK_VIEWS.violation(
                f"it returned a view {view.dtype} {shape} of a cache of {NUM_BLOCKS} blocks, "
                f"expected torch.uint8 [{NUM_BLOCKS}, bytes]"
            )
        if view.stride(1) != 1:
            raise BLOCK_VIEWS.violation(
                f"the rows of a view {shape} are not contiguous, its strides are {view.stride()}"
            )
    size, expected = sum(view.shape[1] for view in views), backend.bytes_per_block(spec)
    if size != expected:
        raise BLOCK_VIEWS.violation(
            f"the views have {size} bytes per block in all, bytes_per_block returned {expected}"
        )
    _check_memory(views, list(tensors_of(cache)))


def _check_memory(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Count through the views how many times they have each byte of the cache, which is zero."""
    for view in views:
        view += 1
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    counts = [
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        for t in storages.values()
    ]
    written = sum(int((count == 1).sum()) for count in counts)
    repeated = sum(int((count > 1).sum()) for count in counts)
    total = sum(view.numel() for view in views)
    if repeated:
        raise BLOCK_VIEWS.violation(f"{repeated} bytes of the cache are in several blocks or views")
    if written != total:
        raise BLOCK_VIEWS.violation(
            f"of {total} bytes that were written to the views, {written} are in the cache"
        )


def move_blocks(
    backend: AttentionBackend,
    spec: KVSpec,
    cache: Any,
    tables: tuple[Sequence[int], Sequence[int]],
) -> Any:
    """Return a new cache with copies of blocks; all blocks of the old one are filled with noise.

    Args:
        backend: under test.
        spec: spec of the layer.
        cache: the old one.
        tables: the blocks to copy, and where to.
    """
    moved = backend.allocate(spec, NUM_BLOCKS)
    sources = views_of(backend, cache)
    for source, target in zip(sources, views_of(backend, moved), strict=True):
        for old, new in zip(*tables, strict=True):
            target[new] = source[old]
    for source in sources:
        source.fill_(0x5A)
    return moved


def tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache: a tensor, or a list, tuple or dict of such."""
    if isinstance(cache, torch.Tensor):
        yield cache
    elif isinstance(cache, Mapping | list | tuple):
        for part in cache.values() if isinstance(cache, Mapping) else cache:
            yield from tensors_of(part)


def num_bytes(cache: Any) -> int:
    """Return the bytes of the tensors of a cache."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(cache))


def check_size(backend: AttentionBackend, block_size: int, spec: KVSpec) -> None:
    """Check that a block has the size of `bytes_per_block`, and that a new cache is zero.

    Raises:
        Violation: it is not so.
    """
    size = backend.bytes_per_block(spec)
    if type(size) is not int or size < 1:
        raise Violation(
            f"bytes_per_block returned {short_repr(size)}", "return a whole number >= 1"
        )
    few, many = backend.allocate(spec, 8), backend.allocate(spec, 40)
    taken = (num_bytes(many) - num_bytes(few)) / 32
    if taken and not taken <= size <= 2 * taken:
        raise Violation(
            f"each block of {block_size} tokens takes {taken:.0f} bytes of the result of allocate"
            f", bytes_per_block returned {size} for {spec}",
            "count keys and values of all tokens and key heads of a block, in the context's "
            "dtype or as codes and their scales: the engine makes as many blocks as fit into "
            "memory by this number",
        )
    for tensor in tensors_of(few):
        if tensor.any():
            raise Violation("a new cache is not zero", "allocate with torch.zeros")
