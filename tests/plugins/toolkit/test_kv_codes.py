"""Codes and scales of keys and values, on numbers with known codes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.toolkit.kv_codes import CODE_DTYPES, dequantize_heads, quantize_heads, rotate_heads


def codes_of(values: list[float], cache_dtype: str) -> tuple[list[float], float]:
    codes, scales = quantize_heads(torch.tensor([[values]]), cache_dtype)
    assert codes.dtype is CODE_DTYPES[cache_dtype]
    assert scales.dtype is torch.float32
    return codes.float().flatten().tolist(), scales.item()


def test_int8_rounds_to_the_nearest_ties_to_even() -> None:
    values = [127.0, -127.0, 0.5, 1.5, -2.5, 0.4, 0.0]
    assert codes_of(values, "int8") == ([127, -127, 0, 2, -2, 0, 0], 1.0)


def test_fp8_rounds_to_three_bits_and_drops_what_is_small() -> None:
    small = 2.0**-6
    values = [448.0, -440.0, 17.0, 19.0, -1.0625, small, -small * 0.999, 0.0]
    expected = [448, -448, 16, 20, -1.0, small, 0, 0]
    assert codes_of(values, "fp8") == (expected, 1.0)


@pytest.mark.parametrize("cache_dtype", CODE_DTYPES)
def test_each_head_has_its_scale(cache_dtype) -> None:
    x = torch.tensor([[[1.0, 2.0], [100.0, -200.0], [0.0, 0.0]], [[-0.5, 0.1], [3.0, 1.0], [7, 7]]])
    _, scales = quantize_heads(x, cache_dtype)
    limit = {"int8": 127, "fp8": 448}[cache_dtype]
    assert torch.equal(scales, torch.tensor([[2.0, 200, 0], [0.5, 3, 7]]) / limit)


@pytest.mark.parametrize("cache_dtype", CODE_DTYPES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_is_read_as_nan(cache_dtype, wrong) -> None:
    x = torch.ones(2, 2, 8)
    x[1, 0, 3] = wrong
    codes, scales = quantize_heads(x, cache_dtype)
    assert not codes[1, 0].float().any()
    read = dequantize_heads(codes, scales, torch.bfloat16)
    assert read.isnan().all(-1).tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("cache_dtype", CODE_DTYPES)
def test_a_head_of_tiny_numbers_is_zero(cache_dtype) -> None:
    x = torch.tensor([[[2.0**-101, -1e-44]], [[2.0**-100, 2.0**-100]]])
    read = dequantize_heads(*quantize_heads(x, cache_dtype), torch.float32)
    assert not read[0].any()
    assert (read[1] / x[1] - 1).abs().max() < 1e-6


@examples(50)
@given(
    cache_dtype=st.sampled_from(sorted(CODE_DTYPES)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    size=st.sampled_from([1e-3, 1.0, 1e4]),
    head_size=st.integers(1, 130),
)
def test_what_is_read_is_near_what_was_written(cache_dtype, dtype, size, head_size) -> None:
    x = (torch.randn(7, 3, head_size, generator=torch.Generator().manual_seed(1)) * size).to(dtype)
    x[2] = 0
    read = dequantize_heads(*quantize_heads(x, cache_dtype), torch.float32)
    largest = x.float().abs().amax(-1, keepdim=True)
    half_step = {"int8": largest / 254, "fp8": x.float().abs() / 16 + largest / 448 / 64}
    assert ((read - x.float()).abs() <= half_step[cache_dtype] * 1.001).all()
    again = dequantize_heads(*quantize_heads(read, cache_dtype), torch.float32)
    assert (again - read).abs().max() <= largest.max() * 1e-6


@pytest.mark.parametrize(("size", "n"), [(1, 1), (17, 1), (24, 8), (64, 64), (96, 32)])
def test_rotation_is_by_the_matrix_of_hadamard(size, n) -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    x = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(0))
    rotated = rotate_heads(x)
    expected = (x.unflatten(-1, (-1, n)) @ matrix / n**0.5).flatten(-2)
    assert (rotated - expected).abs().max() < 1e-5
    assert (rotate_heads(rotated) - x).abs().max() < 1e-5


def test_rotated_heads_are_nearer_if_few_elements_are_large() -> None:
    x = torch.randn(50, 1, 64, generator=torch.Generator().manual_seed(0))
    x[..., 3] *= 40
    plain = dequantize_heads(*quantize_heads(x, "int8"), torch.float32)
    rotated = rotate_heads(
        dequantize_heads(*quantize_heads(rotate_heads(x), "int8"), torch.float32)
    )
    assert (rotated - x).square().mean() < (plain - x).square().mean() / 2
