"""Triton's kernels of logits choose and mask the very tokens that `Ops` says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.plugins import Ops
from hardpoint.testing import load_ops

logits_kernels = pytest.importorskip("hardpoint.kernels.triton.logits")

TORCH = load_ops(torch.float32)
VALUES = st.sampled_from([-math.inf, math.inf, math.nan, 0.0, -0.0, 1e-45, -1e-39, 3e38, -3e38])


@st.composite
def logits_of(draw):
    """Rows of wider ones, of the kinds that sampling meets and of those that it should not."""
    rows, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 140) | st.integers(2040, 5000))
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


def check(name, logits, *arguments):
    """Compare a kernel's function with the method of `Ops` of that name."""
    results = []
    for function in (getattr(Ops, name).__get__(TORCH), getattr(logits_kernels, name)):
        wide = torch.nn.functional.pad(logits, (0, 3))
        given = wide[:, :-3]
        result = function(given, *arguments[: 1 if name == "keep_top_k" and results else None])
        assert not wide[:, -3:].any(), name
        results.append(given.view(torch.int32) if result is None else result)
        if result is not None:
            assert torch.equal(given.view(torch.int32), logits.view(torch.int32)), name
    assert torch.equal(*results), name


@examples(25)
@given(logits=logits_of(), data=st.data())
def test_choices(logits, data):
    check("argmax", logits)
    seeds = column(data, st.integers(-(2**63), 2**63 - 1), len(logits), torch.int64).flatten()
    greedy = column(data, st.booleans(), len(logits), torch.bool).flatten()
    check("draw", logits, seeds, seeds.abs() % 9999, greedy)


SHARES = st.floats(0, 1, width=32) | st.sampled_from([1e-7, 0.9, 0.999, 0.9999999, 1.0, 0.0])


@examples(15)
@given(logits=logits_of(), data=st.data())
def test_min_p(logits, data):
    check("keep_min_p", logits, column(data, SHARES, len(logits), torch.float32))
