"""KV cache groups: layers with the same sliding window, which have blocks of their own.

Blocks of all groups come from one pool, so they have one size. As in vLLM's hybrid KV cache, the
layers of each window are divided into groups of about as many layers, and the i-th layers of all
groups share the i-th cache: a block has room for one layer of each cache, and belongs to the group
whose table it is in.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hardpoint.plugins import KVSpec
from hardpoint.plugins.kv_cache import KVCacheGroup
from hardpoint.plugins.kv_cache.manager import STATE_WINDOW, BlockNeeds

_ONE_GROUP_RATIO = 1.25  # numbers of layers below which short groups waste less than more groups do


@dataclass(frozen=True)
class LayerGroups:
    """The groups of a rank's layers.

    Attributes:
        groups: the same in all ranks, but for their layers.
        group_of: index of the group, by layer.
        cache_of: index of the cache, by layer. The layers of a group have different ones.
    """

    groups: tuple[KVCacheGroup, ...]
    group_of: tuple[int, ...]
    cache_of: tuple[int, ...]

    @classmethod
    def single(cls, num_layers: int, window: int | None = None) -> LayerGroups:
        """Return one group, in which every layer has a cache of its own."""
        layers = tuple(range(num_layers))
        return cls((KVCacheGroup(window, layers),), (0,) * num_layers, layers)

    def with_states(self, *, has_attention: bool) -> LayerGroups:
        """Return these groups and one of layers with states.

        Args:
            has_attention: whether any stage has layers of these groups; else they are left out.
        """
        groups = self.groups if has_attention else ()
        return replace(self, groups=(*groups, KVCacheGroup(STATE_WINDOW, has_states=True)))

    @classmethod
    def divided(cls, specs: Sequence[KVSpec], counts: dict[int | None, int]) -> LayerGroups:
        """Return groups among which the layers of each window are divided evenly.

        Args:
            counts: number of groups, by window.
        """
        groups: list[KVCacheGroup] = []
        group_of, cache_of = [0] * len(specs), [0] * len(specs)
        for window, count in counts.items():
            layers = [index for index, spec in enumerate(specs) if spec.window == window]
            borders = [len(layers) * part // count for part in range(count + 1)]
            for begin, end in itertools.pairwise(borders):
                for cache, layer in enumerate(layers[begin:end]):
                    group_of[layer], cache_of[layer] = len(groups), cache
                groups.append(KVCacheGroup(window, tuple(layers[begin:end])))
        return cls(tuple(groups), tuple(group_of), tuple(cache_of))


def group_layers(
    specs: Sequence[KVSpec], whole: Sequence[KVSpec], max_model_len: int, block_size: int
) -> LayerGroups:
    """Return the groups of a rank's layers: one, unless several windows save memory.

    Args:
        whole: specs of the layers of all stages, which decide on the groups.
        max_model_len: longest request; a window that is no shorter is ignored.
    """
    specs, whole = _limited(specs, max_model_len), _limited(whole, max_model_len)
    layers = Counter(spec.window for spec in whole)
    if len(layers) == 1:
        counts = dict.fromkeys(layers, 1)
    elif len({replace(spec, window=None) for spec in whole}) == 1:
        counts = _num_groups(layers)
    else:  # caches of several shapes
        counts = {}
    if not _saves_memory(layers, counts, max_model_len, block_size):
        return LayerGroups.single(len(specs))
    if len(counts) == 1:
        return LayerGroups.single(len(specs), *counts)
    return LayerGroups.divided(specs, counts)


def _limited(specs: Sequence[KVSpec], max_model_len: int) -> list[KVSpec]:
    return [
        replace(spec, window=None) if (spec.window or 0) >= max_model_len else spec
        for spec in specs
    ]


def _num_groups(layers: Counter[int | None]) -> dict[int | None, int]:
    """Return the number of groups by window, the unlimited one first."""
    size, largest = min(layers.values()), max(layers.values())
    if largest < _ONE_GROUP_RATIO * size:
        size = largest
    ordered = sorted(layers, key=lambda window: window or 0)
    return {window: -(-layers[window] // size) for window in ordered}


def _saves_memory(
    layers: Counter[int | None],
    counts: dict[int | None, int],
    max_model_len: int,
    block_size: int,
) -> bool:
    """Return whether the longest request holds less with groups while it generates tokens."""
    if not counts:
        return False
    groups = [KVCacheGroup(window) for window, count in counts.items() for _ in range(count)]
    caches = max(-(-layers[window] // count) for window, count in counts.items())
    grouped = caches * BlockNeeds(groups, block_size, 1).of(max_model_len)
    return grouped < layers.total() * BlockNeeds((KVCacheGroup(),), block_size).of(max_model_len)
