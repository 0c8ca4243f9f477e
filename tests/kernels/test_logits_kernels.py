"""Operations on logits choose the tokens that `Ops` defines, on every instruction set and shape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.builtin_plugins.ops.native_cpu import NativeOps
from hardpoint.kernels import cpu
from hardpoint.plugins import Ops, OpsContext
from hardpoint.testing import load_ops

TORCH = load_ops(torch.float32)
VALUES = st.sampled_from([-math.inf, math.inf, math.nan, 0.0, -0.0, 1e-45, -1e-39, 3e38, -3e38])


@pytest.fixture(scope="module", params=cpu.PATHS)
def native(request):
    """Returns operations with the kernels of one instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu.VARIABLE, request.param)
        cpu.load.cache_clear()
        try:
            cpu.load()
        except cpu.KernelsUnavailableError as cause:
            pytest.skip(str(cause))
        device = torch.device("cpu")
        yield NativeOps(OpsContext(name="n", options=None, device=device, dtype=torch.float32))
        cpu.load.cache_clear()


def logits_of(rows, vocab, seed, scale, masked, values):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * scale
    if scale > 10:
        logits.round_()
    logits[torch.rand(rows, vocab, generator=generator) < masked] = -math.inf
    for value in values:
        logits[int(torch.randint(rows, (1,), generator=generator))] = torch.where(
            torch.rand(vocab, generator=generator) < 0.1, value, logits[0]
        )
    return logits


def column(strategy, rows, dtype, data):
    values = data.draw(st.lists(strategy, min_size=rows, max_size=rows))
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


def check(name, ops, logits, *arguments):
    """Compare a method with `Ops`, and with torch's own ways."""
    results = []
    for method in (getattr(Ops, name), getattr(TORCH, name), getattr(ops, name)):
        copy = logits.clone()
        inputs = (TORCH, copy) if not results else (copy,)
        result = method(*inputs, *arguments)
        results.append(copy.view(torch.int32) if result is None else result)
    for result in results[1:]:
        assert torch.equal(result, results[0]), name


@examples(40)
@given(
    data=st.data(),
    rows=st.integers(1, 4),
    vocab=st.integers(1, 140) | st.integers(1000, 5000),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 1e-41, 0.01, 1.0, 4.0, 60.0]),
    masked=st.sampled_from([0.0, 0.0, 0.1, 0.95]),
    values=st.lists(VALUES, max_size=2),
)
def test_any_logits(native, data, rows, vocab, seed, scale, masked, values):
    logits = logits_of(rows, vocab, seed, scale, masked, values)
    k = column(st.integers(-1, vocab + 2) | st.integers(1, 5), rows, torch.int64, data)
    if in_use := [each for each in k.flatten().tolist() if 0 < each < vocab]:
        check("keep_top_k", native, logits, k, max(in_use))
    shares = st.floats(0, 1, width=32) | st.sampled_from([1e-7, 0.9, 0.999, 0.9999999])
    p = column(shares, rows, torch.float32, data)
    check("keep_top_p", native, logits, p)
    check("keep_min_p", native, logits, p)
    check("argmax", native, logits)
    chosen_rows = data.draw(st.lists(st.integers(0, rows - 1), unique=True, min_size=1))
    columns = -(-vocab // 32)
    patterns = st.sampled_from([0, 0, -1, 1, -(2**31), 0x5A5A0FF0])
    bits = data.draw(st.lists(patterns, min_size=columns, max_size=columns))
    bitmask = torch.tensor([bits[row:] + bits[:row] for row in chosen_rows], dtype=torch.int32)
    check("keep_tokens", native, logits, torch.tensor(chosen_rows), bitmask)
    seeds = column(st.integers(-(2**63), 2**63 - 1), rows, torch.int64, data).flatten()
    greedy = column(st.booleans(), rows, torch.bool, data).flatten()
    check("draw", native, logits, seeds, seeds.abs() % 9999, greedy)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("scale", [0.0, 0.001, 3.0])
def test_a_wide_vocabulary(native, rows, scale):
    logits = torch.randn(rows, 49_152, generator=torch.Generator().manual_seed(rows)) * scale
    logits[-1, -1] = logits.max()  # a tie with the last token
    check("argmax", native, logits)
    for k in (1, 50, 2000, 40_000):
        check("keep_top_k", native, logits, torch.full((rows, 1), k), k)
    for p in (0.5, 0.999999):
        check("keep_top_p", native, logits, torch.full((rows, 1), p))
    positions = torch.arange(rows)
    check("draw", native, logits, positions * 7, positions, positions == 1)


def test_threads_do_not_show(native):
    logits = torch.randn(2, 70_000, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    tokens = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            tokens.append(native.argmax(logits[:1]).tolist())
            columns = torch.tensor([3, 4]), torch.tensor([0, 9]), torch.tensor([False, False])
            tokens.append([native.draw(logits[:n], *(c[:n] for c in columns)) for n in (1, 2)])
    finally:
        torch.set_num_threads(threads)
    assert tokens[::2] == [tokens[0]] * 3
    for drawn in tokens[1::2]:
        assert drawn[0].tolist() + drawn[1].tolist() == [
            *tokens[1][0].tolist(),
            *tokens[1][1].tolist(),
        ]
        assert drawn[0][0] == drawn[1][0]


def test_logits_that_do_not_lie_in_one_piece(native):
    logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(1)).t()
    expected = logits.contiguous().clone()
    assert torch.equal(native.argmax(logits), expected.argmax(-1))
    native.keep_min_p(logits, torch.full((3, 1), 0.5))
    Ops.keep_min_p(TORCH, expected, torch.full((3, 1), 0.5))
    assert torch.equal(logits, expected)
    bitmask = torch.randint(-999, 999, (16, 2), generator=torch.Generator().manual_seed(2))
    rows, bitmask = torch.tensor([2, 0]), bitmask.int().t()
    native.keep_tokens(logits, rows, bitmask)
    Ops.keep_tokens(TORCH, expected, rows, bitmask)
    assert torch.equal(logits, expected)
