from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.builtins.model_harness import SequenceBlocks, build_backend
from support.searching import examples

from hardpoint.builtin_plugins.attention.native_cpu import NativeAttention
from hardpoint.builtin_plugins.attention.plan import AttentionPlan, _groups, _shared_prefixes
from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.builtin_plugins.attention.triton import TritonAttention
from hardpoint.plugins import AttentionContext, AttentionStep, KVSpec, ModelError
from hardpoint.toolkit.kv_codes import CODE_DTYPES

NUM_BLOCKS = 96


def blocks_of(block_size):
    return SequenceBlocks(NUM_BLOCKS, block_size, torch.device("cpu"), shuffled=True)


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
            outputs += [self.one(name, q[start + i], count - i - 1) for i in range(count)]
            start += count
        return torch.stack(outputs)

    def one(self, name: str, query: torch.Tensor, later: int) -> torch.Tensor:
        spec = self.spec
        end = len(self.keys[name]) - later
        first = 0 if spec.window is None else max(end - spec.window, 0)
        keys, values = self.keys[name][first:end], self.values[name][first:end]
        heads = []
        for head in range(spec.num_heads):
            shared = head // (spec.num_heads // spec.num_kv_heads)
            scores = keys[:, shared] @ query[head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            heads.append(scores.softmax(0) @ values[:, shared])
        return torch.stack(heads)


def run(spec: KVSpec, steps, *, block_size: int, dtype=torch.float32, tolerance=1e-5) -> None:
    """Run steps of (name, count) through the backend and the naive model and compare."""
    backend, naive = build_backend(dtype, block_size), Naive(spec)
    cache, blocks = backend.allocate(spec, NUM_BLOCKS), blocks_of(block_size)
    generator = torch.Generator().manual_seed(0)
    for counts in steps:
        counts = sorted(counts, key=lambda item: item[1] != 1)
        step = blocks.step(counts)
        tokens = sum(count for _, count in counts)
        q, k, v = (
            torch.randn(tokens, heads, spec.head_size, generator=generator).to(dtype)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        got = backend.attend(spec, cache, backend.plan(step), q, k, v)
        expected = naive.attend(counts, q.float(), k.float(), v.float())
        assert got.shape == q.shape
        assert (got.float() - expected).abs().max() < tolerance, counts


@examples(8)
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3)]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 3, 8, 17]),
    softcap=st.sampled_from([None, 1.5]),
    steps=st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6), min_size=1).map(
            lambda counts: list(counts.items())
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_any_mix_of_steps_equals_naive_attention(heads, block_size, window, softcap, steps) -> None:
    spec = KVSpec(*heads, head_size=8, scale=0.3, window=window, softcap=softcap)
    run(spec, steps, block_size=block_size)


@pytest.mark.parametrize("window", [None, 40, 200])
def test_decode_of_very_different_lengths_is_split_and_right(window, monkeypatch) -> None:
    monkeypatch.setattr("hardpoint.builtin_plugins.attention.plan._SPLIT_TOKENS", 16)
    rng = random.Random(1)
    lengths = {f"s{i}": rng.choice([1, 3, 5, 150, 300]) for i in range(9)}
    singles = [(name, 1) for name in lengths]
    spec = KVSpec(6, 2, 8, 0.3, window)
    run(spec, [list(lengths.items()), singles, [*singles, ("late", 20)]], block_size=16)


@pytest.mark.parametrize("window", [None, 30])
def test_capped_scores_are_computed_some_rows_at_a_time(window, monkeypatch) -> None:
    module = "hardpoint.builtin_plugins.attention.torch"
    monkeypatch.setattr(f"{module}._PLAIN_SCORES", 700)
    steps = [[("a", 90), ("b", 4)], [("a", 1), ("b", 50)], [("a", 1), ("b", 1)]]
    run(KVSpec(6, 2, 8, 0.3, window, 0.7), steps, block_size=16)


def test_a_result_may_be_in_memory_in_another_order(monkeypatch) -> None:
    """As on a GPU, where torch chooses the order."""
    module = "hardpoint.builtin_plugins.attention.torch.F"
    attention = torch.nn.functional.scaled_dot_product_attention

    def ordered(*args, **options):
        return attention(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(f"{module}.scaled_dot_product_attention", ordered)
    steps = [[("a", 9), ("b", 4)], [("a", 1), ("b", 2)], [("a", 1), ("b", 1)]]
    run(KVSpec(6, 2, 8, 0.3), steps, block_size=16)


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
    blocks = blocks_of(16)
    blocks.step([("a", 40), ("b", 20)])
    step = blocks.step([("a", 1), ("b", 1)])
    plan = AttentionPlan(step, torch.float32)
    assert plan.for_window(None) is plan.for_window(None)
    assert plan.for_window(1000) is plan.for_window(None)
    assert plan.for_window(8) is not plan.for_window(None)
    assert plan.for_window(8).decodes[0].length < plan.for_window(None).decodes[0].length


def test_padding_never_reads_other_sequences() -> None:
    spec = KVSpec(2, 1, 8, 0.3)
    backend, blocks = build_backend(torch.float32, 4), blocks_of(4)
    keys, values = cache = backend.allocate(spec, NUM_BLOCKS)
    step = blocks.step([("short", 4), ("long", 40)])
    used = step.block_table.unique()
    unused = torch.ones(NUM_BLOCKS, dtype=torch.bool)
    unused[used[used != 0]] = False
    q, k = torch.randn(44, 2, 8), torch.randn(44, 1, 8)
    backend.attend(spec, cache, backend.plan(step), q, k, k)
    keys[unused], values[unused] = torch.nan, torch.nan
    step = blocks.step([("short", 1), ("long", 1)])
    # The new block of "short" was poisoned as unused; real caches hold finite numbers there.
    fresh = step.block_table[0, 1]
    keys[fresh], values[fresh] = 0.0, 0.0
    out = backend.attend(spec, cache, backend.plan(step), q[:2], k[:2], k[:2])
    assert out.isfinite().all()


def test_cache_size_is_as_bytes_per_block_returns() -> None:
    backend = build_backend(torch.bfloat16, 16)
    spec = KVSpec(6, 2, 64, 0.125)
    keys, values = backend.allocate(spec, 5)
    assert keys.nbytes + values.nbytes == 5 * backend.bytes_per_block(spec)
    assert not keys.any()
    assert not values.any()


class Tables:
    """Sequences with chosen blocks, so that they can share some."""

    def __init__(self, spec: KVSpec, *, dtype=torch.float32, block_size: int = 4) -> None:
        self.spec, self.dtype, self.block_size = spec, dtype, block_size
        self.backend = build_backend(dtype, block_size)
        self.cache = self.backend.allocate(spec, 400)
        generator = torch.Generator().manual_seed(0)
        for side in self.cache:
            side.copy_(torch.randn(side.shape, generator=generator))

    def check(self, sequences, tolerance: float) -> AttentionPlan:
        """Attend (table, computed tokens, queries) of each sequence; compare with plain loops."""
        sequences = sorted(sequences, key=lambda sequence: sequence[2] != 1)
        counts = np.array([count for *_, count in sequences])
        lengths = np.array([old for _, old, _ in sequences]) + counts
        table = torch.zeros(len(sequences), max(len(t) for t, *_ in sequences), dtype=torch.int64)
        size, slots = self.block_size, []
        for row, (blocks, old, count) in enumerate(sequences):
            table[row, : len(blocks)] = torch.tensor(blocks)
            slots += [blocks[p // size] * size + p % size for p in range(old, old + count)]
        starts = np.concatenate(([0], counts.cumsum()))
        step = AttentionStep(
            query_starts=starts,
            seq_lens=lengths,
            num_single=int((counts == 1).sum()),
            block_table=table,
            slots=torch.tensor(slots),
            block_size=size,
        )
        plan, spec = self.backend.plan(step), self.spec
        qkv = torch.randn(len(slots), spec.num_heads + 2 * spec.num_kv_heads, spec.head_size)
        q, k, v = qkv.to(self.dtype).split([spec.num_heads, *[spec.num_kv_heads] * 2], 1)
        with torch.inference_mode():
            got = self.backend.attend(spec, self.cache, plan, q, k, v)
        for row, (blocks, old, count) in enumerate(sequences):
            naive = Naive(spec)
            keys, values = (side[blocks].flatten(0, 1)[: old + count] for side in self.cache)
            naive.keys["s"], naive.values["s"] = keys.float(), values.float()
            rows = range(starts[row], starts[row + 1])
            for later, query in zip(range(count)[::-1], rows, strict=True):
                expected = naive.one("s", q[query].float(), later)
                assert (got[query].float() - expected).abs().max() < tolerance, (row, later)
        return plan


@pytest.fixture
def sharing_pays(monkeypatch) -> None:
    monkeypatch.setattr("hardpoint.builtin_plugins.attention.plan._SHARED_TOKENS", 8)


@pytest.mark.usefixtures("sharing_pays")
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
@pytest.mark.parametrize("window", [None, 1000, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_sequences_that_share_blocks_equal_naive_attention(heads, window, dtype, softcap) -> None:
    tables = Tables(KVSpec(*heads, 8, 0.3, window, softcap), dtype=dtype)
    outer, inner = list(range(1, 7)), list(range(10, 14))
    sequences = [
        ([*outer, 20], 25, 1),  # an outer prefix of 6 blocks
        ([*outer, *inner, 21, 22], 45, 1),  # which these continue by 4 more
        ([*outer, *inner, 23, 24], 40, 7),
        ([*outer, *inner, 25], 41, 3),
        ([*outer, *inner], 39, 1),  # whose own token is in the shared part
        ([*outer[:4], 26], 17, 2),
        ([30, 31, 32], 10, 1),  # shares nothing
        ([40, 41, 42], 5, 4),
        ([43], 0, 4),
        ([0, 44], 4, 1),  # block 0 is also what pads tables
    ]
    plan = tables.check(sequences, 1e-5 if dtype == torch.float32 else 0.03)
    work = plan.for_window(window)
    if window == 13:
        assert not [prefix for prefix in work.prefixes if len(prefix.blocks) > 3]
    else:
        # Those of 4 and 2 blocks are `outer`, of which one sequence has 4; of `inner` one sees 3.
        assert [len(prefix.blocks) for prefix in work.prefixes] == [4, 2, 3, 1]
    tables.check([(blocks, old, 1) for blocks, old, _ in sequences], 0.03)


@pytest.mark.usefixtures("sharing_pays")
def test_a_single_chunk_after_a_prefix_stays_causal() -> None:
    tables = Tables(KVSpec(6, 2, 8, 0.3))
    tables.check([([1, 2, 3, 4, 5], 12, 5), ([1, 2, 3, 6], 12, 1)], 1e-5)


@examples(8)
@given(data=st.data())
def test_any_tables_that_share_blocks_equal_naive_attention(data) -> None:
    tables = Tables(KVSpec(4, 2, 8, 0.3, data.draw(st.sampled_from([None, 9, 30]))), block_size=2)
    sequences = []
    for index in range(data.draw(st.integers(2, 6))):
        shared = data.draw(st.sampled_from([0, 0, 3, 8, 12]))
        num_suffix, count = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 1, 2, 5]))
        last = -(-(2 * shared + num_suffix + count) // 2)
        table = [*range(1, shared + 1), *range(20 * (index + 1), 20 * (index + 1) + last - shared)]
        sequences.append((table, 2 * shared + num_suffix, count))
    with pytest.MonkeyPatch.context() as patch:
        package = "hardpoint.builtin_plugins.attention"
        patch.setattr(f"{package}.plan._SHARED_TOKENS", data.draw(st.sampled_from([8, 4096])))
        patch.setattr(f"{package}.plan._SPLIT_TOKENS", data.draw(st.sampled_from([0, 2048])))
        patch.setattr(f"{package}.torch._KEPT_BLOCKS", data.draw(st.sampled_from([1, 64])))
        tables.check(sequences, 1e-5)


@pytest.mark.parametrize("window", [None, 50, 150])
@pytest.mark.parametrize("context", [0, 70])
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_long_chunks_of_16_bits_are_computed_in_float32(window, context, softcap) -> None:
    tables = Tables(KVSpec(6, 2, 8, 0.3, window, softcap), dtype=torch.bfloat16, block_size=16)
    plan = tables.check([(list(range(1, 31)), context, 300), ([40], 3, 1)], 0.02)
    assert [len(chunk.pieces) for chunk in plan.for_window(window).chunks] == [3]


def test_prefixes_are_found_where_they_pay() -> None:
    table = np.array([[1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 4, 7], [5, 2, 3, 6], [1, 2, 3, 0]])
    visible = np.array([3, 4, 4, 4, 1])

    def found(block_size: int):
        return [(s.tolist(), *ends) for s, *ends in _shared_prefixes(table, visible, block_size)]

    assert found(1024) == [([0, 1, 2], 0, 2)]
    assert found(4096) == [([0, 1, 2, 4], 0, 1), ([0, 1, 2], 1, 2), ([0, 1], 2, 3)]
    assert found(512) == []


def test_groups_are_limited_in_size_on_a_cpu() -> None:
    lengths, queries = np.full(100, 400), np.full(100, 1)
    groups = _groups(lengths, queries)
    assert sorted(row for group in groups for row in group) == list(range(100))
    assert [len(group) for group in groups] == [40, 40, 20]
    assert _groups(lengths, queries, bounded=False) == [None]


def test_chunks_of_equal_shape_are_one_group() -> None:
    queries = np.array([32] * 20 + [300, 5])
    groups = _groups(queries + 16, queries)
    assert sorted(len(group) for group in groups) == [1, 1, 20]


def test_steps_use_the_memory_of_earlier_ones(monkeypatch) -> None:
    tables = Tables(KVSpec(6, 2, 64, 0.125), block_size=16)
    sequences = [(list(range(5 * i, 5 * i + 5)), 70, 1) for i in range(40)]
    allocated = []
    module = "hardpoint.builtin_plugins.attention.torch"
    monkeypatch.setattr(f"{module}._zeroed_pages", allocating(allocated))
    tables.check(sequences, 1e-5)
    assert len(allocated) == 2  # keys and values
    tables.check(sequences, 1e-5)
    assert len(allocated) == 2
    tables.backend.close()
    tables.check(sequences, 1e-5)
    assert len(allocated) == 4


def allocating(sizes: list[int]):
    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    return allocate


@pytest.mark.parametrize(
    ("dtype", "size", "words"),
    [
        (torch.float32, 288, "at most 256 elements in float32, the model's have 288"),
        (torch.bfloat16, 576, "at most 512 elements in bfloat16, the model's have 576"),
    ],
)
def test_triton_refuses_heads_that_are_too_large(dtype, size, words) -> None:
    pytest.importorskip("triton")
    backend = build_backend(dtype, 16, TritonAttention)
    spec = KVSpec(4, 2, size, 0.1)
    message = f"attention.use: 'triton' has kernels for heads of {words}"
    with pytest.raises(ModelError, match=message):
        backend.bytes_per_block(spec)
    with pytest.raises(ModelError, match=message):
        backend.allocate(spec, 1)


def test_triton_rotates_where_it_writes() -> None:
    pytest.importorskip("triton")
    backend = build_backend(torch.float32, 4, TritonAttention)
    blocks = blocks_of(4)
    spec = KVSpec(4, 2, 8, 0.3)
    step = blocks.step([("a", 1), ("b", 6)])
    q, k, v = (torch.randn(7, heads, 8) for heads in (4, 2, 2))
    turns = torch.rand(7, 2)
    angles = torch.cat((turns.cos(), turns.sin()), 1)
    a, b = torch.cat((q, k), 1)[..., :4].chunk(2, -1)
    cos, sin = angles[:, None].chunk(2, -1)
    turned = torch.cat((q, k), 1)
    turned[..., :4] = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    rotated = turned.split([4, 2], 1)
    plan, caches = backend.plan(step), [backend.allocate(spec, NUM_BLOCKS) for _ in range(2)]
    expected = backend.attend(spec, caches[0], plan, *(x.clone() for x in rotated), v)
    got = backend.rotate_and_attend(spec, caches[1], plan, q, k, v, angles)
    assert torch.allclose(got, expected, 1e-5, 1e-6)
    assert torch.allclose(*(keys_and_values for (keys_and_values,) in caches), 1e-5, 1e-6)


@pytest.mark.parametrize("cache_dtype", CODE_DTYPES)
def test_triton_reads_the_codes_that_torch_reads(cache_dtype) -> None:
    pytest.importorskip("triton")
    spec, generator = KVSpec(4, 2, 24, 0.3), torch.Generator().manual_seed(0)
    backends = [
        build_backend(torch.float32, 4, cls, cache_dtype=cache_dtype)
        for cls in (TorchAttention, TritonAttention)
    ]
    caches = [backend.allocate(spec, NUM_BLOCKS) for backend in backends]
    sizes = {backend.bytes_per_block(spec) for backend in backends}
    assert sizes == {2 * 2 * 4 * (24 + 4)}
    blocks = blocks_of(4)
    for counts in ([("a", 9), ("b", 3)], [("a", 1), ("b", 4)], [("a", 1), ("b", 1)]):
        step = blocks.step(counts)
        tokens = sum(count for _, count in counts)
        q, k, v = (torch.randn(tokens, heads, 24, generator=generator) for heads in (4, 2, 2))
        expected, got = (
            backend.attend(spec, cache, backend.plan(step), q.clone(), k.clone(), v.clone())
            for backend, cache in zip(backends, caches, strict=True)
        )
        assert torch.allclose(got, expected, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_tokens_of_long_spans_see_all_of_them(dtype, window):
    # Longer than what either backend reads at once, in a chunk that has tokens before it.
    spec, before, count = KVSpec(4, 2, 16, 0.3, window), 30, 400
    spans = [range(50, 210), range(260, 420)]
    positions = np.arange(before, before + count)
    sees = positions.copy()
    for span in spans:
        sees[span.start - before : span.stop - before] = span.stop - 1
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(before + count, heads, 16, generator=generator).to(dtype) for heads in (4, 2, 2)
    )
    distance = torch.from_numpy(positions)[:, None] - torch.arange(before + count)
    hidden = torch.arange(before + count) > torch.from_numpy(sees)[:, None]
    hidden |= distance >= (window or 10_000)
    keys, values = (side.double().repeat_interleave(2, 1) for side in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[before:].double(), keys) * spec.scale
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values)
    for cls in (TorchAttention, NativeAttention):
        context = AttentionContext(
            name="x", options=None, device=torch.device("cpu"), dtype=dtype, block_size=16
        )
        backend = cls(context)
        cache = backend.allocate(spec, 32)
        for start, end, seen in ((0, before, None), (before, before + count, sees)):
            step = AttentionStep(
                query_starts=np.array([0, end - start]),
                seq_lens=np.array([end]),
                num_single=0,
                block_table=torch.arange(32)[None, : -(-end // 16)].contiguous(),
                slots=torch.arange(start, end),
                block_size=16,
                sees=seen,
            )
            part = (side[start:end].clone() for side in (q, k, v))
            out = backend.attend(spec, cache, backend.plan(step), *part)
        assert (out.double() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.03)
