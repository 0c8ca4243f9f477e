from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.model_harness import Blocks, build_backend
from support.searching import examples

from hardpoint.builtin_plugins.attention.torch import AttentionPlan, _groups
from hardpoint.plugins import KVSpec

NUM_BLOCKS = 96


class Naive:
    """Keeps every sequence's keys and values whole and attends with explicit loops."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.keys: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}

    def attend(self, counts, q, k, v) -> torch.Tensor:
        outputs, start = [], 0
        for name, count in counts:
            rows = slice(start, start + count)
            self.keys[name] = torch.cat((self.keys.get(name, k[:0]), k[rows]))
            self.values[name] = torch.cat((self.values.get(name, v[:0]), v[rows]))
            outputs += [self._one(name, q[start + i], count - i - 1) for i in range(count)]
            start += count
        return torch.stack(outputs)

    def _one(self, name: str, query: torch.Tensor, later: int) -> torch.Tensor:
        spec = self.spec
        end = len(self.keys[name]) - later
        first = 0 if spec.window is None else max(end - spec.window, 0)
        keys, values = self.keys[name][first:end], self.values[name][first:end]
        heads = []
        for head in range(spec.num_heads):
            shared = head // (spec.num_heads // spec.num_kv_heads)
            scores = keys[:, shared] @ query[head] * spec.scale
            heads.append(scores.softmax(0) @ values[:, shared])
        return torch.stack(heads)


def run(spec: KVSpec, steps, *, block_size: int, dtype=torch.float32, tolerance=1e-5) -> None:
    """Run steps of (name, count) through the backend and the naive model and compare."""
    backend, naive = build_backend(dtype, block_size), Naive(spec)
    cache, blocks = backend.allocate(spec, NUM_BLOCKS), Blocks(NUM_BLOCKS, block_size)
    generator = torch.Generator().manual_seed(0)
    for counts in steps:
        counts = sorted(counts, key=lambda item: item[1] != 1)
        step, _ = blocks.step(counts)
        tokens = sum(count for _, count in counts)
        q, k, v = (
            torch.randn(tokens, heads, spec.head_size, generator=generator).to(dtype)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        got = backend.attend(spec, cache, backend.plan(step), q, k, v)
        expected = naive.attend(counts, q.float(), k.float(), v.float())
        assert got.shape == q.shape
        assert (got.float() - expected).abs().max() < tolerance, counts


@examples(60)
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3)]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 3, 8, 17]),
    steps=st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6), min_size=1).map(
            lambda counts: list(counts.items())
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_any_mix_of_steps_equals_naive_attention(heads, block_size, window, steps) -> None:
    spec = KVSpec(*heads, head_size=8, scale=0.3, window=window)
    run(spec, steps, block_size=block_size)


@pytest.mark.parametrize("window", [None, 40, 200])
def test_decode_of_very_different_lengths_is_split_and_right(window, monkeypatch) -> None:
    monkeypatch.setattr("hardpoint.builtin_plugins.attention.torch._SPLIT_TOKENS", 16)
    rng = random.Random(1)
    lengths = {f"s{i}": rng.choice([1, 3, 5, 150, 300]) for i in range(9)}
    singles = [(name, 1) for name in lengths]
    spec = KVSpec(6, 2, 8, 0.3, window)
    run(spec, [list(lengths.items()), singles, [*singles, ("late", 20)]], block_size=16)


def test_bfloat16_stays_close() -> None:
    steps = [[("a", 30), ("b", 4)], [("a", 1), ("b", 9)], [("a", 1), ("b", 1)]]
    run(KVSpec(6, 2, 64, 0.125), steps, block_size=16, dtype=torch.bfloat16, tolerance=0.03)


def test_similar_lengths_stay_one_group() -> None:
    assert _groups(torch.full((32,), 500).numpy()) == [None]
    assert _groups(torch.tensor([10, 1500]).numpy()) == [None]


def test_groups_hold_every_row_once_and_waste_at_most_half() -> None:
    lengths = torch.tensor([8000, 10, 9, 4100, 700, 20, 3, 360, 1]).numpy()
    groups = _groups(lengths)
    assert sorted(row for group in groups for row in group) == list(range(9))
    assert len(groups) > 1
    for group in groups:
        assert 2 * lengths[group].min() >= lengths[group].max()


def test_masks_are_shared_by_layers_of_one_window() -> None:
    blocks = Blocks(NUM_BLOCKS, 16)
    blocks.step([("a", 40), ("b", 20)])
    step, _ = blocks.step([("a", 1), ("b", 1)])
    plan = AttentionPlan(step, torch.float32)
    assert plan.for_window(None) is plan.for_window(None)
    assert plan.for_window(1000) is plan.for_window(None)
    assert plan.for_window(8) is not plan.for_window(None)
    assert plan.for_window(8).decodes[0].length < plan.for_window(None).decodes[0].length


def test_padding_never_reads_other_sequences() -> None:
    spec = KVSpec(2, 1, 8, 0.3)
    backend, blocks = build_backend(torch.float32, 4), Blocks(NUM_BLOCKS, 4)
    keys, values = cache = backend.allocate(spec, NUM_BLOCKS)
    step, _ = blocks.step([("short", 4), ("long", 40)])
    used = step.block_table.unique()
    unused = torch.ones(NUM_BLOCKS, dtype=torch.bool)
    unused[used[used != 0]] = False
    q, k = torch.randn(44, 2, 8), torch.randn(44, 1, 8)
    backend.attend(spec, cache, backend.plan(step), q, k, k)
    keys[unused], values[unused] = torch.nan, torch.nan
    step, _ = blocks.step([("short", 1), ("long", 1)])
    # The new block of "short" was poisoned as unused; real caches hold finite numbers there.
    fresh = step.block_table[0, 1]
    keys[fresh], values[fresh] = 0.0, 0.0
    out = backend.attend(spec, cache, backend.plan(step), q[:2], k[:2], k[:2])
    assert out.isfinite().all()


def test_cache_size_is_what_bytes_per_block_says() -> None:
    backend = build_backend(torch.bfloat16, 16)
    spec = KVSpec(6, 2, 64, 0.125)
    keys, values = backend.allocate(spec, 5)
    assert keys.nbytes + values.nbytes == 5 * backend.bytes_per_block(spec)
    assert not keys.any()
    assert not values.any()
