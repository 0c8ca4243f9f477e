"""Triton's kernels of logits choose and mask the very tokens that `Ops` says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.plugins import Op, Ops
from hardpoint.testing import load_ops

logits_kernels = pytest.importorskip("hardpoint.kernels.triton.logits")

TORCH = load_ops(torch.float32)
VALUES = st.sampled_from([-math.inf, math.inf, math.nan, 0.0, -0.0, 1e-45, -1e-39, 3e38, -3e38])


@st.composite
def logits_of(draw):
    """Rows of wider ones, of the kinds that sampling meets and of those that it should not."""
    rows = draw(st.integers(1, 3))
    # The interpreter takes its time for the parts of a row: few have some.
    is_wide = draw(st.integers(0, 9)) == 9
    vocab = draw(st.integers(2040, 5000) if is_wide else st.integers(1, 140))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.0, 1e-41, 0.01, 1.0, 4.0, 60.0]))
    logits = torch.randn(rows, vocab + draw(st.integers(0, 3)), generator=generator)[:, :vocab]
    logits *= scale
    if scale > 10:
        logits.round_()
    masked = draw(st.sampled_from([0.0, 0.0, 0.1, 0.95]))
    logits[torch.rand(rows, vocab, generator=generator) < masked] = -math.inf
    for value in draw(st.lists(VALUES, max_size=2)):
        row = int(torch.randint(rows, (1,), generator=generator))
        logits[row, torch.rand(vocab, generator=generator) < 0.1] = value
    return logits


def column(data, strategy, rows, dtype):
    values = data.draw(st.lists(strategy, min_size=rows, max_size=rows))
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


def assert_equal(result, expected):
    """Compare bit for bit, but for the bits of NaN."""
    differs = result.view(torch.int32) != expected.view(torch.int32)
    assert not (differs & ~(result.isnan() & expected.isnan())).any()


def check(name, logits, *arguments):
    """Compare a kernel's function with the method of `Ops` of that name."""
    expected = logits.clone()
    wanted = getattr(Ops, name)(TORCH, expected, *arguments)
    wide = torch.nn.functional.pad(logits, (0, 3))
    given = arguments[:1] if name == "keep_top_k" else arguments
    result = getattr(logits_kernels, name)(wide[:, :-3], *given)
    assert (result is None) == (wanted is None)
    if wanted is not None:
        assert torch.equal(result, wanted), name
    assert_equal(wide[:, :-3], expected)
    assert not wide[:, -3:].any(), name


@examples(25)
@given(logits=logits_of(), data=st.data())
def test_choices(logits, data):
    check("argmax", logits)
    seeds = column(data, st.integers(-(2**63), 2**63 - 1), len(logits), torch.int64).flatten()
    greedy = column(data, st.booleans(), len(logits), torch.bool).flatten()
    check("draw", logits, seeds, seeds.abs() % 9999, greedy)


SHARES = st.floats(0, 1, width=32) | st.sampled_from([1e-7, 0.9, 0.999, 0.9999999, 1.0, 0.0])


@examples(8)
@given(logits=logits_of(), data=st.data())
def test_shares(logits, data):
    p = column(data, SHARES, len(logits), torch.float32)
    check("keep_min_p", logits, p)
    check("keep_top_p", logits, p)


@examples(8)
@given(logits=logits_of(), data=st.data())
def test_top_k(logits, data):
    rows, vocab = logits.shape
    k = column(data, st.integers(-1, vocab + 2) | st.integers(1, 5), rows, torch.int64)
    if in_use := [each for each in k.flatten().tolist() if 0 < each < vocab]:
        check("keep_top_k", logits, k, max(in_use))


@examples(15)
@given(logits=logits_of(), data=st.data())
def test_masks_edits_and_divisors(logits, data):
    rows, vocab = logits.shape
    chosen = data.draw(st.lists(st.integers(0, rows - 1), unique=True, min_size=1))
    columns = -(-vocab // 32)
    patterns = st.sampled_from([0, 0, -1, 1, -(2**31), 0x5A5A0FF0])
    bits = data.draw(st.lists(patterns, min_size=columns, max_size=columns))
    bitmask = torch.tensor([bits[row:] + bits[:row] for row in chosen], dtype=torch.int32)
    check("keep_tokens", logits, torch.tensor(chosen), bitmask)
    divisors = column(
        data,
        st.floats(2.0**-20, 2.0**100, width=32) | st.sampled_from([0.7, 1e-5, 1e30]),
        rows,
        torch.float32,
    )
    check("divide", logits, divisors)


@examples(10)
@given(logits=logits_of(), data=st.data(), op=st.sampled_from(Op))
def test_edits(logits, data, op):
    spots = st.lists(st.integers(0, logits.numel() - 1), unique=True, min_size=1, max_size=300)
    places = torch.tensor(data.draw(spots))
    values = torch.randn(len(places), generator=torch.Generator().manual_seed(1)) * 9
    rows = (places // logits.shape[1]).unique()
    expected, result = logits.clone(), torch.nn.functional.pad(logits, (0, 3))[:, :-3]
    Ops.edit(TORCH, expected, op, places, values, rows)
    if op is Op.KEEP_ONLY:
        logits_kernels.put_only(result, places, rows)
    else:
        logits_kernels.put(result, places, values, add=op is Op.ADD)
    assert_equal(result, expected)
