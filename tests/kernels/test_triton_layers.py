"""Kernels of layers in Triton equal their twins, over sizes, strides and dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.triton import kernel_device, kernel_examples

from hardpoint.kernels import twins
from hardpoint.kernels.triton import layers

DEVICE = kernel_device()
EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.002}

any_dtype = st.sampled_from(DTYPES)
any_size = st.integers(1, 300) | st.integers(1000, 5000)
any_rows = st.integers(0, 19)
seeds = st.integers(0, 2**31)


def draw(seed, *shape, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def check(result, expected, dtype):
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@kernel_examples(15, 150)
@given(any_rows, any_size, any_dtype, st.booleans(), st.integers(0, 3), seeds)
@example(2, 8193, torch.bfloat16, True, 1, 0)
@example(1, 65536, torch.float32, True, 0, 0)
def test_norms_of_rows(rows, size, dtype, wide_weight, gap, seed):
    wide = draw(seed, rows, size + gap, dtype=dtype)
    weight = draw(seed + 1, size, dtype=torch.float32 if wide_weight else dtype)
    x = wide[:, :size]
    copy = wide.clone()
    check(layers.rms_norm(x, weight, EPS), twins.rms_norm(x, weight, EPS), dtype)
    assert torch.equal(wide, copy)

    delta = draw(seed + 2, rows, size + 2, dtype=dtype)[:, 2:]
    total, kept_delta = x + delta, delta.clone()
    result = layers.add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(x, total)
    assert torch.equal(wide[:, size:], copy[:, size:])
    assert torch.equal(delta, kept_delta)
    check(result, twins.rms_norm(x, weight, EPS), dtype)


@kernel_examples(10, 150)
@given(st.integers(0, 7), st.integers(1, 5), st.integers(1, 300), any_dtype, seeds)
def test_norms_of_heads(rows, heads, size, dtype, seed):
    wide = draw(seed, rows, heads + 2, size + 1, dtype=dtype)
    weight = draw(seed + 1, size, dtype=dtype)
    x = wide[:, 1 : 1 + heads, :size]
    result = layers.rms_norm(x, weight, EPS)
    check(result, twins.rms_norm(x, weight, EPS), dtype)
    for row in range(rows):
        assert torch.equal(layers.rms_norm(x[row : row + 1], weight, EPS)[0], result[row])


def test_norms_of_extreme_rows():
    x = torch.tensor([[0.0] * 8, [1e-30] * 8, [1e18] + [0] * 7], dtype=torch.bfloat16)
    x = x.to(DEVICE)
    weight = torch.ones(8, dtype=torch.bfloat16, device=DEVICE)
    result = layers.rms_norm(x, weight, EPS)
    assert torch.equal(result[0], x[0])
    assert result.isfinite().all()


@kernel_examples(15, 150)
@given(
    st.integers(0, 5),
    st.integers(1, 40),
    st.integers(1, 130),
    st.integers(0, 5),
    any_dtype,
    seeds,
)
def test_rotations(rows, heads, half, more, dtype, seed):
    wide = draw(seed, rows, heads + 2, 2 * half + more, dtype=dtype)
    before = wide.clone()
    angles = draw(seed + 1, rows, 2 * half, dtype=torch.float32)
    layers.rotate(wide[:, 1 : 1 + heads, : 2 * half], angles)
    expected = before.clone()
    mine = before[:, 1 : 1 + heads, : 2 * half]
    expected[:, 1 : 1 + heads, : 2 * half] = twins.rotated(mine, angles)
    check(wide, expected, dtype)
    wide[:, 1 : 1 + heads, : 2 * half] = mine
    assert torch.equal(wide, before)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@kernel_examples(15, 150)
@given(
    rows=st.integers(0, 5),
    size=any_size,
    gap=st.integers(0, 3),
    dtype=any_dtype,
    scale=st.sampled_from([1.0, 10.0, 1000.0]),
    seed=seeds,
)
def test_gates(activation, rows, size, gap, dtype, scale, seed):
    x = draw(seed, rows, 2 * size + gap, dtype=torch.float32)
    x[:, :size] *= scale
    x = x.to(dtype)[:, : 2 * size]
    copy = x.clone()
    result = getattr(layers, f"{activation}_and_mul")(x)
    expected = twins.gated(x, activation)
    limit = TOLERANCES[dtype]
    torch.testing.assert_close(result, expected, rtol=limit, atol=limit * 1e-3)
    assert torch.equal(x, copy)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates_do_not_overflow(activation):
    large = torch.finfo(torch.bfloat16).max
    gate = torch.tensor([-large, -1e20, -100, -88, 88, 100, 1e20, large])
    x = torch.cat((gate, torch.ones(8))).to(DEVICE, torch.bfloat16).unsqueeze(0)
    result = getattr(layers, f"{activation}_and_mul")(x)
    assert torch.equal(result[0, 4:], x[0, 4:8])
    assert result[0, :4].abs().max() < 1e-30


@kernel_examples(15, 150)
@given(st.integers(0, 5), any_size, st.integers(0, 3), any_dtype, st.floats(-3, 3), seeds)
def test_scales_and_sums(rows, size, gap, dtype, factor, seed):
    wide = draw(seed, rows, size + gap, dtype=dtype)
    expected = wide.clone()
    expected[:, :size] *= factor
    layers.scale(wide[:, :size], factor)
    assert torch.equal(wide, expected)

    delta = draw(seed + 1, rows, size + 1, dtype=dtype)[:, 1:]
    expected, copy = wide.clone(), delta.clone()
    expected[:, :size] += delta
    layers.add(wide[:, :size], delta)
    assert torch.equal(wide, expected)
    assert torch.equal(delta, copy)
