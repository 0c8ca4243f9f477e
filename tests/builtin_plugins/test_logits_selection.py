"""The fast paths on the CPU return the same bits as the plain ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.builtin_plugins.ops.torch import largest, mask_below


def logits_of(seed: int, rows: int, vocab: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 5
    if kind == "ties":
        logits = logits.round()
    for value in {"holes": (-math.inf, 0.0, -0.0), "broken": (math.nan, math.inf)}.get(kind, ()):
        logits[torch.rand(rows, vocab, generator=generator) < 0.1] = value
    if kind == "nothing left":
        logits[0] = -math.inf
    return logits


KINDS = st.sampled_from(["plain", "ties", "holes", "broken", "nothing left"])
SHAPES = {
    "seed": st.integers(0, 2**32),
    "rows": st.integers(1, 5),
    "vocab": st.integers(1, 2500),
    "kind": KINDS,
}


@given(**SHAPES, share=st.floats(0, 1))
def test_the_largest_are_those_of_topk(seed, rows, vocab, kind, share):
    logits = logits_of(seed, rows, vocab, kind)
    count = max(1, int(share**3 * vocab))  # mostly few, so that the coarse search runs
    torch.testing.assert_close(
        largest(logits, count), logits.topk(count).values, rtol=0, atol=0, equal_nan=True
    )


@given(
    **SHAPES,
    off=st.integers(0, 5),
    bound=st.one_of(
        st.none(), st.floats(width=32), st.sampled_from([0.0, -0.0, 1e-45, math.inf, -math.inf])
    ),
)
def test_what_is_under_the_bound_is_dropped_and_nothing_else(seed, rows, vocab, kind, off, bound):
    logits = logits_of(seed, rows, vocab, kind)
    bounds = logits[:, :1].clone() if bound is None else torch.full((rows, 1), bound)
    best = logits.amax(-1, keepdim=True)
    is_off = torch.arange(rows).unsqueeze(1) == off
    is_masked = (logits < bounds) & best.isfinite() & ~is_off
    expected = logits.masked_fill(is_masked, -math.inf)
    mask_below(logits, bounds, is_off, best)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("vocab", [64, 1000])
def test_logits_that_do_not_lie_in_one_piece(vocab):
    logits = logits_of(1, vocab, 3, "plain").t()
    assert torch.equal(largest(logits, 2), logits.topk(2).values)
    bounds = logits.mean(1, keepdim=True)
    expected = logits.masked_fill(logits < bounds, -math.inf)
    mask_below(logits, bounds, bounds.isnan(), logits.amax(-1, keepdim=True))
    assert torch.equal(logits, expected)
