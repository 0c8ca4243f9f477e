"""Paged attention in Triton equals its twin, and a sequence's result does not depend on others."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import nightly_but
from support.triton import kernel_device, kernel_examples

from hardpoint.kernels.twins import PagedSequences, paged_attention
from hardpoint.toolkit.kv_codes import CODE_DTYPES, dequantize_heads, quantize_heads, rotate_heads

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
attention = pytest.importorskip("hardpoint.kernels.triton.attention")
tiles = pytest.importorskip("hardpoint.kernels.triton.attention_tiles")
kv_cache = pytest.importorskip("hardpoint.kernels.triton.kv_cache")
kv_codes = pytest.importorskip("hardpoint.kernels.triton.kv_codes")

DEVICE = torch.device(kernel_device())
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Layer:
    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    rotated: int = 0
    """Elements of a head; 0: there are no angles."""
    has_sinks: bool = False
    cache_dtype: str = "auto"

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def sinks(self) -> torch.Tensor | None:
        return torch.linspace(-3, 4, self.heads) if self.has_sinks else None


Part = tuple[int, int]
"""Queries of a sequence, and its length; (1, 0) is padding."""


Span = tuple[float, float]
"""Where the tokens that see each other begin and end, as shares of the queries of a sequence."""


class Step:
    """Sequences in shuffled blocks; values that none of them may see are NaN."""

    def __init__(
        self,
        layer: Layer,
        parts: list[Part],
        seed: int = 0,
        longest: int = 0,
        span: Span | None = None,
    ) -> None:
        self.layer = layer
        self.parts = sorted(parts, key=lambda part: part[0] != 1)
        self.generator = torch.Generator().manual_seed(seed)
        size = layer.block_size
        wanted = [-(-length // size) for _, length in self.parts]
        ids = random.Random(seed).sample(range(sum(wanted) + 3), sum(wanted) + 3)
        self.blocks = [[ids.pop() for _ in range(count)] for count in wanted]
        shape = (sum(wanted) + 3, 2, layer.kv_heads, size, layer.head_size)
        self.cache = torch.full(shape, torch.nan, dtype=layer.dtype)
        for blocks, (count, length) in zip(self.blocks, self.parts, strict=True):
            oldest = max(length - count + 1 - (layer.window or length), 0)
            for position in range(oldest, length):
                place = self.cache[blocks[position // size], :, :, position % size]
                place.copy_(self.randn(*place.shape))
        self.slots = torch.tensor([slot for row in range(len(parts)) for slot in self._slots(row)])
        self.table = torch.zeros(len(parts), max(wanted) + 1, dtype=torch.int64)
        for row, blocks in enumerate(self.blocks):
            self.table[row, : len(blocks)] = torch.tensor(blocks)
        heads = (layer.heads, layer.kv_heads, layer.kv_heads)
        tokens = len(self.slots)
        self.qkv = self.randn(tokens, sum(heads), layer.head_size).split(heads, 1)
        turns = torch.rand(tokens, layer.rotated // 2, generator=self.generator) * 6
        self.angles = torch.cat((turns.cos(), turns.sin()), 1) if layer.rotated else None
        self.sees = None if span is None else [self._sees(part, span) for part in self.parts]
        single = [length for count, length in self.parts if count == 1]
        starts = np.cumsum([0, *(count for count, _ in self.parts)])
        self.paged = attention.PagedStep(
            torch.tensor(starts).to(DEVICE),
            torch.tensor([length for _, length in self.parts]).to(DEVICE),
            self.table.to(DEVICE),
            len(single),
            max(single, default=0) + longest,
            None if self.sees is None else torch.tensor([*chain(*self.sees)]).to(DEVICE),
        )

    @staticmethod
    def _sees(part: Part, span: Span) -> list[int]:
        count, length = part
        first, last = (round(end * (count - 1)) for end in sorted(span))
        return [length - count + (last if first <= i <= last else i) for i in range(count)]

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.layer.dtype)

    def _slots(self, row: int) -> list[int]:
        (count, length), blocks, size = self.parts[row], self.blocks[row], self.layer.block_size
        positions = range(length - count, length)
        return [blocks[p // size] * size + p % size if length else -1 for p in positions]

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of the kernels, and the cache; of codes, as numbers."""
        layer, scales = self.layer, None
        cache = self.cache.clone().to(DEVICE)
        packed = torch.cat(self.qkv, 1).to(DEVICE)  # q, k and v are parts of wider rows
        q, k, v = packed.split([part.shape[1] for part in self.qkv], 1)
        angles = None if self.angles is None else self.angles.to(DEVICE)
        if layer.cache_dtype == "auto":
            kv_cache.store(q, k, v, cache, self.slots.to(DEVICE), angles)
        else:
            codes, scales = quantize_heads(cache, layer.cache_dtype)
            cache = codes.view(kv_codes.CODE_DTYPES[layer.cache_dtype])
            q = kv_codes.store_codes(q, k, v, (cache, scales), self.slots.to(DEVICE), angles)
        sinks = None if layer.sinks is None else layer.sinks.to(DEVICE)
        out = attention.attend(
            q, cache, self.paged, layer.scale, layer.window, layer.softcap, sinks, scales
        )
        if scales is not None:
            cache = cache.view(CODE_DTYPES[layer.cache_dtype])
            cache = dequantize_heads(cache, scales, torch.float32)
        return out.cpu(), cache.cpu()

    def written(self) -> torch.Tensor:
        """Return the cache after the step, as numbers."""
        cache, (_, k, v) = self.cache.clone(), self._real()
        if self.layer.cache_dtype != "auto":
            k, v, cache = (self._coded(side) for side in (rotate_heads(k), v, cache))
        blocks, places = self._real_slots()
        cache[blocks, 0, :, places], cache[blocks, 1, :, places] = k, v
        return cache

    def twin(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the right results, of the sequences that are no padding.

        Args:
            cache: has the keys and values of the step.
        """
        layer, (q, _, _) = self.layer, self._real()
        if layer.cache_dtype != "auto":
            q = rotate_heads(q)
        blocks, places = self._real_slots()
        k, v = (cache[blocks, side, :, places] for side in range(2))
        given_parts = [
            (*part, blocks) for part, blocks in zip(self.parts, self.blocks, strict=True) if part[1]
        ]
        counts, lengths, tables = zip(*given_parts, strict=True)
        sides = (cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2))
        sees = self.sees and [
            sees for sees, part in zip(self.sees, self.parts, strict=True) if part[1]
        ]
        sequences = PagedSequences(counts, lengths, tables, sees)
        return paged_attention(
            (q, k, v), sides, sequences, layer.scale, layer.window, layer.softcap, layer.sinks
        )

    def _real(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of the sequences that are no padding, turned."""
        real = self.slots >= 0
        q, k, v = (part[real] for part in self.qkv)
        if self.angles is not None:
            q, k = (rotate(part, self.angles[real]) for part in (q, k))
        return q, k, v

    def _real_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return their blocks, and the places in them."""
        slots = self.slots[self.slots >= 0]
        return slots // self.layer.block_size, slots % self.layer.block_size

    def _coded(self, x: torch.Tensor) -> torch.Tensor:
        """Return heads after they were written as codes and read, float32."""
        return dequantize_heads(*quantize_heads(x, self.layer.cache_dtype), torch.float32)

    def check(self) -> None:
        out, cache = self.run()
        written = self.written()
        expected = self.twin(cache)  # a neighboring code of a key may change a result by much
        real, limit = self.slots >= 0, LIMITS[self.layer.dtype]
        assert out.dtype == self.layer.dtype
        # The interpreter cuts bfloat16 off, where a GPU rounds.
        assert torch.allclose(out[real].float(), expected, limit, limit)
        assert not out[~real].any()
        eps = torch.finfo(self.layer.dtype).eps
        if self.layer.cache_dtype != "auto":
            # A key whose rotation is rounded to another number may get a neighboring code.
            eps = 0.0 if self.angles is None else 0.15
        assert torch.allclose(cache.float(), written.float(), eps, eps, equal_nan=True)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    size = angles.shape[1]
    a, b = x[..., :size].float().chunk(2, -1)
    cos, sin = angles.unsqueeze(1).chunk(2, -1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), x[..., size:]), -1)


def parts() -> st.SearchStrategy[list[Part]]:
    old = st.sampled_from([0, 1, 15, 70, 150])
    chunk = st.tuples(st.sampled_from([1, 1, 2, 9, 40]), old).map(lambda p: (p[0], sum(p)))
    return st.lists(chunk, min_size=1, max_size=3)


# An interpreted step takes a third of a second.
@kernel_examples(5, 80)
@given(
    heads=st.sampled_from([(1, 1), (6, 2), (3, 3), (7, 1)]),
    head_size=st.sampled_from([1, 2, 16, 24, 40, 96]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    limits=st.tuples(
        st.sampled_from([None, None, 1, 7, 64, 90]),
        st.sampled_from([None, None, 0.5, 30.0]),
        st.booleans(),
    ),
    dtype=st.sampled_from(list(LIMITS)),
    rotated=st.sampled_from([0.0, 0.5, 1.0]),
    given_parts=parts(),
    padding=st.integers(0, 2),
)
def test_any_step_equals_the_twin(
    heads, head_size, block_size, limits, dtype, rotated, given_parts, padding
) -> None:
    size, (window, softcap, has_sinks) = int(head_size * rotated) // 2 * 2, limits
    layer = Layer(*heads, head_size, block_size, window, softcap, dtype, size, has_sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "LEAST_SPLIT", 64)
        Step(layer, [*given_parts, *[(1, 0)] * padding]).check()


@kernel_examples(5, 80)
@given(
    layer=st.builds(
        lambda heads, *rest: Layer(*heads, *rest),
        st.sampled_from([(1, 1), (6, 2), (7, 1)]),
        st.sampled_from([1, 2, 24, 40, 96]),
        st.sampled_from([3, 16]),  # tokens of a block
        st.sampled_from([None, None, 1, 7, 64]),  # window
        st.sampled_from([None, None, 0.5]),  # softcap
        st.sampled_from(list(LIMITS)),
        st.sampled_from([0, 0.5, 1]),  # rotated
        st.booleans(),  # sinks
        st.sampled_from(["auto", *CODE_DTYPES]),
    ),
    given_parts=parts(),
    span=st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)),
    padding=st.integers(0, 1),
)
def test_any_step_of_codes_or_spans_equals_the_twin(layer, given_parts, span, padding) -> None:
    layer = replace(layer, rotated=int(layer.head_size * layer.rotated) // 2 * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "LEAST_SPLIT", 64)
        Step(layer, [*given_parts, *[(1, 0)] * padding], span=span).check()


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("span", [(0, 1), (0.2, 0.9), (0.5, 0.5)])
def test_spans_of_several_tiles_equal_the_twin(window, span) -> None:
    Step(Layer(2, 1, 16, 16, window), [(70, 100), (1, 9), (33, 33)], span=span).check()


ODD_HEADS = torch.tensor(
    [
        [0.0] * 8,
        [2.0**-101] * 8,
        [2.0**-100] + [0.0] * 7,
        [torch.inf] + [1.0] * 7,
        [-torch.inf] + [1.0] * 7,
        [torch.nan] + [1.0] * 7,
        [3e38, -3e38] + [1.0] * 6,
        [1.0] * 8,
        [1e-6, -1e-6, 448.0, -448.0, 0.0156, 0.01563, 17.0, -19.0],
        [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.0, -127.0],
    ]
)


@pytest.mark.parametrize("cache_dtype", CODE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_the_toolkit(cache_dtype, dtype) -> None:
    """Bit for bit, and of numbers that have no code."""
    generator = torch.Generator().manual_seed(0)
    for size in (8, 24, 96):
        k, v = (torch.randn(40, 2, size, generator=generator) * 30 for _ in range(2))
        k[:10, 0, :8], v[:10, 1, :8] = ODD_HEADS, ODD_HEADS
        k, v = k.to(DEVICE, dtype), v.to(DEVICE, dtype)
        codes = torch.zeros(
            3, 2, 2, 16, size, dtype=kv_codes.CODE_DTYPES[cache_dtype], device=DEVICE
        )
        scales = torch.zeros(codes.shape[:-1], device=DEVICE)
        kv_codes.store_codes(k, k, v, (codes, scales), torch.arange(40).to(DEVICE))
        for side, heads in enumerate((rotate_heads(k), v)):
            expected, factors = quantize_heads(heads, cache_dtype)
            written = codes[:, side].transpose(1, 2).flatten(0, 1)[:40]
            assert torch.equal(written.view(torch.uint8), expected.view(torch.uint8))
            got = scales[:, side].transpose(1, 2).flatten(0, 1)[:40]
            assert torch.equal(got.nan_to_num(-1.0), factors.nan_to_num(-1.0))


@triton.jit
def decode_kernel(codes, numbers):
    at = tl.arange(0, 256)
    tl.store(numbers + at, kv_codes.decode(tl.load(codes + at)))


@pytest.mark.parametrize(("cache_dtype", "dtype"), CODE_DTYPES.items())
def test_all_codes_are_decoded(cache_dtype, dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).to(DEVICE)
    numbers = torch.empty(256, device=DEVICE)
    decode_kernel[(1,)](codes.view(kv_codes.CODE_DTYPES[cache_dtype]), numbers)
    expected = codes.view(dtype).float()
    # The format has no subnormal number but 0, and no NaN.
    has = (expected.abs() >= 2.0**-6) | (expected == 0)
    assert torch.equal(numbers[has], expected[has])
    assert has.sum() >= 240


@pytest.mark.parametrize(
    "layer",
    [
        Layer(4, 2, 256, 16, dtype=torch.bfloat16, rotated=256),
        pytest.param(Layer(71, 1, 64, 16), marks=pytest.mark.nightly),
        Layer(65, 1, 16, 16, 20, 2.0),  # more query heads than a tile has rows
        Layer(4, 2, 512, 16, dtype=torch.bfloat16, rotated=128),
        Layer(2, 1, 288, 16, 20, dtype=torch.float16),
        Layer(2, 1, 512, 16, dtype=torch.bfloat16, rotated=512, cache_dtype="fp8"),
    ],
)
def test_large_and_many_heads_equal_the_twin(layer) -> None:
    Step(layer, [(1, 20), (1, 1), (6, 30)]).check()


@pytest.mark.parametrize(
    ("window", "has_sinks"),
    nightly_but([(None, False), (290, False), (290, True)], (290, True)),
)
def test_long_sequences_are_split(window, has_sinks, monkeypatch) -> None:
    monkeypatch.setattr(tiles, "LEAST_SPLIT", 64)
    monkeypatch.setattr(tiles, "MOST_SPLITS", (16, 16))
    layer = Layer(4, 2, 16, 16, window, has_sinks=has_sinks)
    # One split, one that is just full, some, and as many as there may be, which are longer then.
    Step(layer, [(1, 3), (1, 64), (1, 65), (1, 500), (1, 1100)]).check()


@pytest.mark.parametrize("window", nightly_but([None, 150], 150))
def test_what_others_do_changes_no_bit_of_a_single_query(window, monkeypatch) -> None:
    monkeypatch.setattr(tiles, "LEAST_SPLIT", 64)
    layer = Layer(4, 2, 16, 16, window)
    alone = Step(layer, [(1, 333)])
    others = Step(layer, [(1, 333), (1, 0), (1, 30), (1, 500), (5, 40)], longest=1500)
    # The same sequence, in the blocks that it has in the other step.
    for old, new in zip(alone.blocks[0], others.blocks[0], strict=True):
        others.cache[new] = alone.cache[old]
    for mine, its in zip(others.qkv, alone.qkv, strict=True):
        mine[0] = its[0]
    assert torch.equal(others.run()[0][0], alone.run()[0][0])


@pytest.mark.parametrize(("programs", "listed"), nightly_but([(1, 128), (6, 2)], (6, 2)))
def test_programs_take_turns(programs, listed, monkeypatch) -> None:
    """Fewer programs than splits: each takes several, and no bit differs."""
    monkeypatch.setattr(tiles, "LEAST_SPLIT", 64)
    step = Step(Layer(4, 2, 16, 16), [(1, 500), (1, 3), (1, 0), (1, 700)], longest=1000)
    expected = step.run()[0]
    monkeypatch.setattr(attention, "STEP_PROGRAMS", programs)
    monkeypatch.setattr(tiles, "LISTED", listed)
    assert torch.equal(step.run()[0], expected)


@triton.jit
def find_kernel(lens, pairs, num_seqs, window, listed: tl.constexpr, windowed: tl.constexpr):
    place = tl.program_id(0)
    sequence, split = attention.find_split(
        lens, place, num_seqs, window, listed, 16, 64, 4, windowed
    )
    tl.store(pairs + 2 * place, sequence)
    tl.store(pairs + 2 * place + 1, split)


@pytest.mark.parametrize("window", [None, 100])
def test_the_splits_of_a_long_sequence_are_of_different_programs(window) -> None:
    """They are neighbors in one list; each has a program, independent of the others' needs."""
    lens = [3, 0, 1500, 65]
    spans = [length - max(length - (window or length), 0) // 16 * 16 for length in lens]
    sizes = [max(-(-span // 64) * 16, 64) for span in spans]
    counts = [max(-(-span // size), 1) for span, size in zip(spans, sizes, strict=True)]
    expected = [[row, split] for row, count in enumerate(counts) for split in range(count)]
    for listed in (2, 4):
        pairs = torch.zeros(len(expected) + 1, 2, dtype=torch.int64, device=DEVICE)
        find_kernel[(len(pairs),)](
            torch.tensor(lens, device=DEVICE), pairs, len(lens), window or 0, listed,
            window is not None,
        )  # fmt: skip
        assert pairs[: len(expected)].tolist() == expected
        assert pairs[len(expected) :, 0].tolist() == [len(lens)]


class Launches:
    """Stands for a kernel; notes the grids."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids.append(grid)
        return lambda *_, **__: None


def test_programs_are_as_many_however_many_sequences_there_are(monkeypatch) -> None:
    launches = Launches()
    monkeypatch.setattr(attention, "singles_kernel", launches)
    monkeypatch.setattr(attention, "combine_kernel", launches)
    for count in (1, 64, 4000):
        starts = torch.arange(count + 1)
        lens = torch.full((count,), 20)
        step = attention.PagedStep(starts, lens, torch.zeros(count, 9).long(), count, 131072)
        q, cache = torch.zeros(count, 32, 16), torch.zeros(1, 2, 8, 16, 16)
        attention.attend(q, cache, step, 1.0)
    assert launches.grids[::2] == [(32, 8), (512, 8), (512, 8)]


def test_tensors_give_the_sizes_and_the_host_only_their_limits() -> None:
    """A recorded step has upper bounds, and runs with later contents of its tensors."""
    layer = Layer(4, 2, 16, 16)
    step = Step(layer, [(1, 40), (1, 300), (1, 7)], longest=1000)
    expected = step.twin(step.written())
    paged = step.paged
    step.paged = replace(paged, lens=torch.zeros_like(paged.lens))
    assert not step.run()[0].any()
    step.paged.lens.copy_(paged.lens)
    assert (step.run()[0] - expected).abs().max() < 2e-5


def test_variants_have_the_arguments_of_their_kernels() -> None:
    for module in (attention, kv_cache, kv_codes):
        for variant in module.VARIANTS:
            assert {*variant.types, *variant.constants} == {*variant.kernel.arg_names}, variant.name
