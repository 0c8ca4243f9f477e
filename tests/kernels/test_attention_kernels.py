"""Paged attention in C++ equals its twin, and a query's result is the same in any step."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.builtins.model_harness import build_backend
from support.cases import nightly_but
from support.searching import examples, searches_long

from hardpoint.builtin_plugins.attention.native_cpu import NativeAttention
from hardpoint.kernels import cpu
from hardpoint.kernels.twins import PagedSequences, paged_attention
from hardpoint.plugins import AttentionStep, KVSpec, ModelError
from hardpoint.toolkit.kv_codes import CODE_DTYPES, dequantize_heads, quantize_heads, rotate_heads

NUM_TOKENS = 6000
"""Of a cache, about."""


def available() -> list[str]:
    """Return the instruction sets that this machine can run."""
    plain = cpu.load("plain")
    return [path for path in cpu.PATHS if plain.supports(path)]


@pytest.fixture(params=nightly_but(available(), available()[0], available()[-1]))
def library(request, monkeypatch) -> cpu.Library:
    """The kernels of each instruction set, for whatever loads them."""
    library = cpu.load(request.param)
    monkeypatch.setattr(cpu, "load", lambda: library)
    return library


def build(dtype: torch.dtype, block_size: int, cache_dtype: str = "auto") -> NativeAttention:
    return build_backend(dtype, block_size, NativeAttention, cache_dtype)


@dataclass
class Sequence:
    """A sequence's queries, keys and values, and how far it is."""

    qkv: list[torch.Tensor]
    blocks: list[int] = field(default_factory=list)
    done: int = 0

    def __len__(self) -> int:
        return len(self.qkv[0])


class Runner:
    """Attends sequences in steps, with shuffled blocks that held NaN before."""

    def __init__(
        self,
        spec: KVSpec,
        dtype: torch.dtype,
        block_size: int,
        seed: int,
        cache_dtype: str = "auto",
    ) -> None:
        self.spec, self.block_size = spec, block_size
        self.backend = build(dtype, block_size, cache_dtype)
        self.num_blocks = NUM_TOKENS // block_size + 20
        self.cache = self.backend.allocate(spec, self.num_blocks)
        self.cache.view(torch.uint8).fill_(255)  # NaN, in scales too
        self.free = random.Random(seed).sample(range(self.num_blocks), self.num_blocks)

    def step(self, counts: list[tuple[Sequence, int]]) -> tuple[torch.Tensor, PagedSequences]:
        """Compute so many tokens more of each; return the outputs and the step."""
        counts.sort(key=lambda item: item[1] != 1)
        slots, size = [], self.block_size
        for sequence, count in counts:
            end = sequence.done + count
            while len(sequence.blocks) * size < end:
                sequence.blocks.append(self.free.pop())
            slots += [
                sequence.blocks[p // size] * size + p % size for p in range(sequence.done, end)
            ]
        width = max(len(sequence.blocks) for sequence, _ in counts)
        table = [[*s.blocks, *[0] * (width - len(s.blocks))] for s, _ in counts]
        step = AttentionStep(
            query_starts=np.cumsum([0, *(count for _, count in counts)]),
            seq_lens=np.array([s.done + count for s, count in counts]),
            num_single=sum(count == 1 for _, count in counts),
            block_table=torch.tensor(table),
            slots=torch.tensor(slots),
            block_size=size,
        )
        qkv = [
            torch.cat([s.qkv[i][s.done : s.done + count] for s, count in counts]) for i in range(3)
        ]
        out = self.backend.attend(self.spec, self.cache, self.backend.plan(step), *qkv)
        for sequence, count in counts:
            sequence.done += count
        paged = PagedSequences(
            [count for _, count in counts],
            [s.done for s, _ in counts],
            [s.blocks for s, _ in counts],
        )
        return out, paged


def random_sequence(spec: KVSpec, length: int, dtype: torch.dtype, seed: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return Sequence(
        [torch.randn(length, n, spec.head_size, generator=generator).to(dtype) for n in heads]
    )


@examples(15, suppress_health_check=list(HealthCheck))
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (3, 1), (8, 2), (10, 2), (7, 1), (39, 3)]),
    head_size=st.sampled_from([1, 2, 15, 16, 17, 40, 64, 80]),
    block_size=st.sampled_from([2, 3, 8, 16, 20, 32, 150]),
    limits=st.tuples(
        st.sampled_from([None, None, 1, 7, 16, 129, 140]),
        st.sampled_from([None, None, 0.5, 30.0]),
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    chunks=st.lists(
        st.lists(st.sampled_from([0, 1, 1, 2, 5, 33, 150]), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    shares=st.booleans(),
)
def test_any_step_equals_the_twin(
    library, heads, head_size, block_size, limits, dtype, chunks, shares
) -> None:
    spec = KVSpec(*heads, head_size, head_size**-0.5, *limits)
    runner = Runner(spec, dtype, block_size, seed=0)
    shape = (runner.num_blocks, block_size, spec.num_kv_heads, head_size)
    cache = tuple(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    sequences = [random_sequence(spec, 600, dtype, seed) for seed in range(3)]
    for index, counts in enumerate(chunks):
        given_counts = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
        if not given_counts:
            continue
        starts = {id(s): s.done for s, _ in given_counts}
        out, paged = runner.step(given_counts)
        qkv = [
            torch.cat([s.qkv[i][starts[id(s)] : s.done] for s, _ in given_counts]) for i in range(3)
        ]
        expected = paged_attention(tuple(qkv), cache, paged, spec.scale, *limits)
        limit = 0.02 if dtype == torch.bfloat16 else 1e-5
        assert (out.float() - expected).abs().nan_to_num(torch.inf).max() < limit
        if shares and not index:
            # The other sequences go on behind the blocks of the first one.
            for other in sequences[1:]:
                whole = sequences[0].done // block_size
                other.blocks, other.done = sequences[0].blocks[:whole], whole * block_size


@examples(15, suppress_health_check=list(HealthCheck))
@given(
    heads=st.sampled_from([(1, 1), (3, 1), (8, 2), (39, 3)]),
    sizes=st.tuples(
        st.sampled_from([1, 2, 15, 17, 40, 64, 130]), st.sampled_from([2, 3, 16, 20, 150])
    ),
    limits=st.tuples(st.sampled_from([None, None, 1, 7, 129]), st.sampled_from([None, 0.5])),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    cache_dtype=st.sampled_from(sorted(CODE_DTYPES)),
    chunks=st.lists(
        st.lists(st.sampled_from([0, 1, 2, 33, 150]), min_size=3, max_size=3),
        min_size=1,
        max_size=3,
    ),
    factor=st.sampled_from([1.0, 1.0, 3e-28, 1e-33, 1e30]),
)
def test_codes_are_read_as_the_numbers_that_they_stand_for(
    library, heads, sizes, limits, dtype, cache_dtype, chunks, factor
) -> None:
    head_size, block_size = sizes
    spec = KVSpec(*heads, head_size, head_size**-0.5, *limits)
    runner = Runner(spec, dtype, block_size, 0, cache_dtype)
    shape = (runner.num_blocks, block_size, spec.num_kv_heads, head_size)
    cache = tuple(torch.full(shape, torch.nan) for _ in range(2))
    sequences = [random_sequence(spec, 600, dtype, seed) for seed in range(3)]
    for sequence in sequences:
        _, k, v = sequence.qkv
        v *= factor
        k[::7], v[::5] = 0.0, 0.0
    for counts in chunks:
        given_counts = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
        if not given_counts:
            continue
        starts = {id(s): s.done for s, _ in given_counts}
        out, paged = runner.step(given_counts)
        q, k, v = (
            torch.cat([s.qkv[i][starts[id(s)] : s.done] for s, _ in given_counts]) for i in range(3)
        )
        q, k = rotate_heads(q), rotate_heads(k)
        k, v = (
            dequantize_heads(*quantize_heads(side, cache_dtype), torch.float32) for side in (k, v)
        )
        expected = paged_attention((q, k, v), cache, paged, spec.scale, *limits)
        limit = 0.02 if dtype == torch.bfloat16 else 1e-5
        assert ((out.float() - expected) / factor).abs().nan_to_num(torch.inf).max() < limit


@pytest.mark.parametrize("cache_dtype", CODE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_that_is_not_finite_is_nan_for_those_who_see_it(library, dtype, cache_dtype) -> None:
    spec = KVSpec(2, 2, 16, 0.25, 3)
    runner, sequence = Runner(spec, dtype, 16, 0, cache_dtype), random_sequence(spec, 12, dtype, 0)
    sequence.qkv[1][4, 0, 3], sequence.qkv[2][4, 1, 5] = torch.inf, torch.nan
    out, _ = runner.step([(sequence, 12)])
    assert out[4:7].isnan().all()
    assert out[:, 0].isnan().all(-1).tolist() == [4 <= i < 7 for i in range(12)]


@pytest.mark.parametrize("cache_dtype", CODE_DTYPES)
def test_codes_and_scales_are_those_of_torch(library, cache_dtype) -> None:
    size, kv_heads, tokens = 24, 3, 16
    spec = KVSpec(6, kv_heads, size, 0.25)
    runner = Runner(spec, torch.bfloat16, tokens, 0, cache_dtype)
    sequence = random_sequence(spec, tokens, torch.bfloat16, 5)
    runner.step([(sequence, tokens)])
    block = runner.cache[sequence.blocks[0]]
    keys, values = block.split([kv_heads * (size * 16 + 64), kv_heads * (2 * 256 + 64)])
    keys, values = keys.view(kv_heads, -1), values.view(kv_heads, -1)
    stored = (
        keys[:, :-64].view(kv_heads, size, tokens).permute(2, 0, 1),
        values[:, :-64].view(kv_heads, 2, tokens, 16).permute(2, 0, 1, 3).flatten(2)[..., :size],
    )
    scales = [side[:, -64:].contiguous().view(torch.float32).T for side in (keys, values)]
    sides = rotate_heads(sequence.qkv[1]), sequence.qkv[2]
    for codes, stored_scales, side in zip(stored, scales, sides, strict=True):
        expected, expected_scales = quantize_heads(side, cache_dtype)
        assert torch.equal(codes, expected.view(torch.uint8))
        assert torch.equal(stored_scales, expected_scales)


SHARED = (0, 300, 300, 150, 270, 300)
"""How many first tokens of a common beginning each sequence of a schedule has."""
OWN = (400, 40, 20, 30, 6, 1)


def schedule_sequences(spec: KVSpec, dtype: torch.dtype) -> list[Sequence]:
    beginning = random_sequence(spec, max(SHARED), dtype, seed=1)
    return [
        Sequence(
            [
                torch.cat((first[:shared], rest))
                for first, rest in zip(
                    beginning.qkv, random_sequence(spec, length, dtype, seed).qkv, strict=True
                )
            ]
        )
        for seed, (shared, length) in enumerate(zip(SHARED, OWN, strict=True), 10)
    ]


def run_schedule(
    runner: Runner, sequences: list[Sequence], rng: random.Random
) -> list[torch.Tensor]:
    """Compute sequences in random steps; return their outputs, NaN where none was computed."""
    outputs = [torch.full_like(s.qkv[0], torch.nan) for s in sequences]
    torch.set_num_threads(rng.choice([1, 2, 3]))
    while unfinished := [i for i, s in enumerate(sequences) if s.done < len(s)]:
        counts = []
        for index in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            sequence = sequences[index]
            if rng.random() < 0.05:  # preempted
                sequence.done, sequence.blocks = 0, []
            if not sequence.done and rng.random() < 0.8:
                reuse_blocks(runner, sequences, index, rng)
            longest = min(rng.choice([1, 1, 17, 128, 500]), len(sequence) - sequence.done)
            counts.append((sequence, rng.randint(1, longest)))
        out, _ = runner.step(counts)
        for (sequence, count), part in zip(counts, out.split([n for _, n in counts]), strict=True):
            index = next(i for i, other in enumerate(sequences) if other is sequence)
            outputs[index][sequence.done - count : sequence.done] = part
    return outputs


def reuse_blocks(runner: Runner, sequences: list[Sequence], index: int, rng: random.Random) -> None:
    """Let a sequence go on behind the blocks of another one with the same beginning."""
    other = rng.choice([i for i in range(len(sequences)) if i != index])
    common = min(SHARED[index], SHARED[other], sequences[other].done)
    blocks = common // runner.block_size
    sequences[index].blocks = sequences[other].blocks[:blocks]
    sequences[index].done = blocks * runner.block_size


@pytest.fixture
def threads():
    """Restore the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_invariant(
    dtype: torch.dtype,
    window: int | None,
    block_size: int,
    heads: tuple[int, int],
    seed: int,
    softcap: float | None = None,
    cache_dtype: str = "auto",
    sinks: torch.Tensor | None = None,
) -> None:
    spec = KVSpec(*heads, 24, 0.3, window, softcap, sinks)
    alone, settings = schedule_sequences(spec, dtype), (spec, dtype, block_size, seed, cache_dtype)
    expected = [Runner(*settings).step([(s, len(s))])[0] for s in alone]
    runner, rng = Runner(*settings), random.Random(seed)
    got = run_schedule(runner, schedule_sequences(spec, dtype), rng)
    for out, reference in zip(got, expected, strict=True):
        computed = ~out.isnan()
        assert torch.equal(out[computed], reference[computed])


BEFORE = 250  # tokens, so that the rows are in two parts of the keys

CASES = [
    (torch.bfloat16, None, 16, (6, 2)),
    (torch.bfloat16, 150, 16, (3, 1)),
    (torch.float32, None, 32, (4, 4)),
    (torch.float32, 70, 8, (5, 1)),
]


@pytest.mark.parametrize("case", CASES[1:3])
def test_a_query_has_the_same_result_in_any_step(library, threads, case) -> None:
    assert_invariant(*case, seed=0)


@pytest.mark.parametrize("cache_dtype", CODE_DTYPES)
def test_a_query_of_codes_has_the_same_result_in_any_step(library, threads, cache_dtype) -> None:
    assert_invariant(*CASES[0], seed=0, cache_dtype=cache_dtype)


def test_a_query_with_a_soft_cap_has_the_same_result_in_any_step(library, threads) -> None:
    assert_invariant(*CASES[1], seed=0, softcap=2.0)


def test_a_query_with_sinks_has_the_same_result_in_any_step(library, threads) -> None:
    assert_invariant(*CASES[1], seed=0, sinks=torch.tensor([-3.0, 0.0, 4.0]))


def test_sinks_that_are_far_from_all_scores_are_exact(library) -> None:
    sinks = torch.tensor([-1e4, -60.0, 60.0, 1e4])
    spec = KVSpec(4, 1, 16, 1.0, None, None, sinks)
    runner, sequence = (
        Runner(spec, torch.float32, 16, 0),
        random_sequence(spec, 40, torch.float32, 3),
    )
    cache = tuple(torch.zeros(runner.num_blocks, 16, 1, 16) for _ in range(2))
    out, paged = runner.step([(sequence, 40)])
    expected = paged_attention(tuple(sequence.qkv), cache, paged, 1.0, None, None, sinks)
    assert (out - expected).abs().max() < 2e-6
    assert out[:, 3].eq(0).all()
    assert out[:, 0].abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_dtype", ["auto", *CODE_DTYPES])
def test_each_of_up_to_16_rows_has_the_bits_of_the_row_alone(
    library, threads, dtype, cache_dtype
) -> None:
    groups, limits = (1, 3, 4, 8), ((None, None), (None, 2.0), (150, None), (5, 0.5))
    together = itertools.product if searches_long() else partial(zip, strict=True)
    for group, limit in together(groups, limits):
        settings = KVSpec(2 * group, 2, 24, 0.3, *limit), dtype, 16, 0, cache_dtype
        sequence = random_sequence(settings[0], BEFORE + 16, dtype, seed=group)
        whole = Runner(*settings).step([(sequence, BEFORE + 16)])[0][BEFORE:]
        runner, sequence.done, sequence.blocks = Runner(*settings), 0, []
        runner.step([(sequence, BEFORE)])
        torch.set_num_threads(1)
        alone = torch.cat([runner.step([(sequence, 1)])[0] for _ in range(16)])
        assert torch.equal(alone, whole)
        for count in range(2, 17):
            torch.set_num_threads(1 + count % 2)
            sequence.done = BEFORE
            assert torch.equal(runner.step([(sequence, count)])[0], alone[:count]), (group, limit)


@pytest.mark.parametrize("head_size", [17, 40, 64, 80, 160])
def test_rows_of_any_head_size_have_the_bits_that_they_have_in_a_prefill(
    library, head_size
) -> None:
    """3 to 48 rows of a key head: tiles of fewer rows and of fewer depths than there are."""
    settings = KVSpec(6, 2, head_size, head_size**-0.5), torch.bfloat16, 16, 0
    sequence = random_sequence(settings[0], BEFORE + 16, torch.bfloat16, seed=head_size)
    whole = Runner(*settings).step([(sequence, BEFORE + 16)])[0][BEFORE:]
    runner, sequence.done, sequence.blocks = Runner(*settings), 0, []
    runner.step([(sequence, BEFORE)])
    for count in (1, 2, 5, 6, 10, 11, 16):
        sequence.done = BEFORE
        assert torch.equal(runner.step([(sequence, count)])[0], whole[:count])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [1, 3, 5])
def test_what_is_not_finite_reaches_those_rows_alone_that_see_it(
    library, dtype, window, group
) -> None:
    settings = KVSpec(2 * group, 2, 40, 0.3, window), dtype, 16, 0
    sequence = random_sequence(settings[0], BEFORE + 16, dtype, seed=group)
    sequence.qkv[2][BEFORE + 7, 0, 3], sequence.qkv[2][BEFORE + 9, 1, 39] = torch.inf, torch.nan
    sequence.qkv[1][BEFORE + 12, 1, 0] = torch.nan
    runner = Runner(*settings)
    runner.step([(sequence, BEFORE)])
    alone = torch.cat([runner.step([(sequence, 1)])[0] for _ in range(16)])
    assert alone[:7].isfinite().all()
    assert not alone[7:].isfinite().all()
    for chunk in (0, 100):
        sequence.done = BEFORE - chunk
        output = runner.step([(sequence, chunk + 16)])[0][chunk:]
        assert torch.equal(output.nan_to_num(7.0), alone.nan_to_num(7.0))


def test_large_and_small_scores_are_capped_as_exactly_as_torch_does(library) -> None:
    for size, softcap in ((1e-3, 50.0), (0.3, 1.0), (10.0, 4.0), (1e4, 2.0)):
        spec = KVSpec(2, 1, 16, 1.0, None, softcap)
        runner, sequence = (
            Runner(spec, torch.float32, 16, 0),
            random_sequence(spec, 40, torch.float32, 3),
        )
        sequence.qkv[0] *= size
        cache = tuple(torch.zeros(runner.num_blocks, 16, 1, 16) for _ in range(2))
        out, paged = runner.step([(sequence, 40)])
        expected = paged_attention(tuple(sequence.qkv), cache, paged, 1.0, None, softcap)
        assert (out - expected).abs().max() < 2e-6, (size, softcap)


@pytest.mark.nightly
@pytest.mark.parametrize("cache_dtype", ["auto", *CODE_DTYPES])
@pytest.mark.parametrize("case", CASES)
def test_a_query_has_the_same_result_in_many_schedules(library, threads, case, cache_dtype) -> None:
    for seed in range(40 if cache_dtype == "auto" else 20):
        assert_invariant(*case, seed, cache_dtype=cache_dtype)


@pytest.mark.parametrize(
    ("num_threads", "tokens", "context"),
    [(2, 512, 8192), (8, 2048, 8192), (8, 2048, 131072), (64, 8192, 32768), (64, 1, 131072)],
)
@pytest.mark.usefixtures("threads")
def test_results_that_wait_take_little_memory(library, num_threads, tokens, context):
    """At most 76 MB for heads of 128, and there are items for all threads."""
    torch.set_num_threads(num_threads)
    heads, kv_heads, blocks = 32, 8, np.arange(context // 16)
    starts, lengths, slots = np.array([0, tokens]), np.array([context]), np.zeros(tokens, np.int64)
    plan = np.empty(1 << 22, np.int64)
    size = library.function("attention_plan", None)(
        starts.ctypes.data, lengths.ctypes.data, 1, blocks.ctypes.data, len(blocks),
        slots.ctypes.data, None, 16, 0, heads, kv_heads, plan.ctypes.data, plan.nbytes,
    )  # fmt: skip
    assert size <= plan.nbytes
    num_items, num_pieces = plan[8], plan[12]
    assert num_pieces * heads <= 1 << 17
    assert num_items * kv_heads >= 2 * num_threads


def test_a_dtype_without_kernels_is_an_error() -> None:
    with pytest.raises(
        ModelError, match="attention.use: 'native_cpu' computes in bfloat16, float32"
    ):
        build(torch.float16, 16)


def test_missing_kernels_are_an_error(monkeypatch) -> None:
    def unavailable() -> None:
        raise cpu.KernelsUnavailableError("the processor has no avx2")

    monkeypatch.setattr(cpu, "load", unavailable)
    with pytest.raises(ModelError, match="'native_cpu' cannot be used: the processor has no avx2"):
        build(torch.bfloat16, 16)
