"""KV cache groups: which layers share a block table, and which a cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.broken.attention import Plain
from support.searching import examples

from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.checked_attention import CheckedAttention
from hardpoint.host.boundary.layers.groups import LayerGroups, group_layers
from hardpoint.plugins import AttentionContext, KVSpec
from hardpoint.plugins.component import Source
from hardpoint.plugins.kv_cache import KVCacheGroup
from hardpoint.plugins.kv_cache.manager import BlockNeeds
from hardpoint.testing import load_ops

SPEC = KVSpec(4, 2, 8, 0.3)
LENGTH, BLOCK = 1024, 16
SOURCE = Source("attention", "tests:Attention", "hardpoint", "1", "test")


def specs(*windows):
    return [dataclasses.replace(SPEC, window=window) for window in windows]


def grouped(given, whole=None, max_model_len=LENGTH):
    return group_layers(given, whole or given, max_model_len, BLOCK)


def test_layers_are_divided_by_window():
    """Five sliding layers to one full one, as in Gemma 3; the groups have as many layers."""
    found = grouped(specs(*[64, 64, 64, 64, 64, None] * 2))
    assert [group.window for group in found.groups] == [None, 64, 64, 64, 64, 64]
    assert [group.layers for group in found.groups] == [
        (5, 11), (0, 1), (2, 3), (4, 6), (7, 8), (9, 10)
    ]  # fmt: skip
    assert set(found.cache_of) == {0, 1}


@pytest.mark.parametrize(
    ("full", "sliding", "windows", "caches"),
    [
        (4, 4, [None, 64], 4),
        (9, 11, [None, 64], 11),  # nearly as many: a group of each
        (4, 5, [None, 64, 64], 4),
        (5, 29, [None, *[64] * 6], 5),
        (7, 3, [None, None, None, 64], 3),
    ],
)
def test_numbers_of_groups(full, sliding, windows, caches):
    found = grouped(specs(*[None] * full, *[64] * sliding))
    assert [group.window for group in found.groups] == windows
    assert max(found.cache_of) + 1 == caches


def test_one_window_is_one_group():
    found = grouped(specs(64, 64, 64))
    assert found == LayerGroups((KVCacheGroup(64, (0, 1, 2)),), (0, 0, 0), (0, 1, 2))
    other = [*specs(64, 64), KVSpec(4, 4, 16, 0.3, 64)]
    assert [group.window for group in grouped(other).groups] == [64]


@pytest.mark.parametrize(
    "given",
    [
        specs(None, None),
        specs(1024, None, 2000),
        specs(1020, None, None),  # its window is as many blocks as the longest request
        [*specs(64, None), KVSpec(4, 4, 8, 0.3)],
        [*specs(64, None), dataclasses.replace(SPEC, head_size=16, window=64)],
    ],
    ids=["none", "longer", "nearly as long", "heads", "head size"],
)
def test_one_group_of_all_layers_where_windows_save_nothing(given):
    number = len(given)
    assert grouped(given) == LayerGroups.single(number)
    assert [group.window for group in grouped(given).groups] == [None]


def test_a_window_counts_against_the_longest_request():
    layers = specs(64, None, 512)
    assert [g.window for g in grouped(layers).groups] == [None, 64, 512]
    assert [g.window for g in grouped(layers, max_model_len=512).groups] == [None, None, 64]
    assert grouped(layers, max_model_len=64) == LayerGroups.single(3)


def test_no_layers():
    assert grouped([]) == LayerGroups.single(0)
    whole = specs(64, None)
    assert [(g.window, g.layers) for g in grouped([], whole).groups] == [(None, ()), (64, ())]


@examples(100)
@given(st.data())
def test_stages_have_the_same_groups(data):
    windows = st.sampled_from([None, 16, 100, 512, 5000])
    layers = specs(*data.draw(st.lists(windows, min_size=1, max_size=40)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(layers)), max_size=3)))
    one = grouped(layers)
    for begin, end in zip([0, *cuts], [*cuts, len(layers)], strict=True):
        stage = layers[begin:end]
        found = grouped(stage, layers)
        assert [g.window for g in found.groups] == [g.window for g in one.groups]
        assert sorted(layer for g in found.groups for layer in g.layers) == list(range(end - begin))
        for index, group in enumerate(found.groups):
            assert all(found.group_of[layer] == index for layer in group.layers)
            caches = [found.cache_of[layer] for layer in group.layers]
            assert sorted(set(caches)) == sorted(caches)
            assert all(group.window in (None, stage[layer].window) for layer in group.layers)
        assert set(found.cache_of) == set(range(max(found.cache_of, default=-1) + 1))
        assert len(set(found.cache_of)) <= max(len(set(one.cache_of)), 1)


@examples(100)
@given(st.lists(st.sampled_from([None, 16, 100, 512]), min_size=1, max_size=40))
def test_groups_take_less_memory(windows):
    layers = specs(*windows)
    found = grouped(layers)
    held = len(set(found.cache_of)) * BlockNeeds(found.groups, BLOCK, 1).of(LENGTH)
    whole = len(layers) * LENGTH // BLOCK
    assert held < whole or found == LayerGroups.single(len(layers))


class Wide(Plain):
    """Keeps no more of a layer than its window sees."""

    contract = 1

    def bytes_per_block(self, spec):
        return super().bytes_per_block(spec) * (1 if spec.window is None else 2)


def checked(kind, given, groups):
    context = AttentionContext(
        name="attention",
        options=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        block_size=BLOCK,
    )
    return CheckedAttention(kind(context), SOURCE, given, groups, load_ops(torch.float32).rotate)


def test_groups_share_caches():
    layers = specs(64, None, 64, 64, None)
    attention = checked(Plain, layers, grouped(layers))
    caches = attention.allocate(7)
    found = grouped(layers)
    assert len({id(cache) for cache in caches}) == 2
    assert [caches[a] is caches[b] for a, b in ((0, 1), (2, 4), (0, 3))] == [
        found.cache_of[0] == found.cache_of[1],
        found.cache_of[2] == found.cache_of[4],
        found.cache_of[0] == found.cache_of[3],
    ]
    assert attention.bytes_per_block == 2 * attention.layer_bytes[0]
    assert sum(cache.nbytes for cache in {id(c): c for c in caches}.values()) == (
        7 * attention.bytes_per_block
    )


def test_a_backend_whose_blocks_depend_on_the_window_is_named():
    layers = specs(64, None)
    words = r"its bytes_per_block\(\) gave \d+ for KVSpec.* and \d+ for KVSpec.*, expected the same"
    with pytest.raises(PluginFaultError, match=words):
        checked(Wide, layers, grouped(layers))
    checked(Wide, layers, LayerGroups.single(2))
