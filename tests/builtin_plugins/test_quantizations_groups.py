"""int8 and int4, quantized from numbers: errors, and special cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builtins.quantized_checkpoints import build_scheme

from hardpoint.builtin_plugins.quantizations.groups import Int4, Int8
from hardpoint.plugins.quantization import AffineCodes

SCHEMES = [Int8, Int4]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(codes: AffineCodes) -> torch.Tensor:
    """Return the scale of each weight."""
    return codes.scales.float().repeat_interleave(codes.group, 1)[:, : codes.shape[1]]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 200),
    group=st.sampled_from([32, 64, 96]),
    size=st.sampled_from([1e-9, 1e-3, 1.0, 1e4, 1e9, 1e30]),
    seed=st.integers(0, 99),
)
def test_eight_bits_are_within_half_a_step(rows, columns, group, size, seed):
    weight = draw(rows, columns, seed=seed) * size
    before = weight.clone()
    codes = build_scheme(Int8, group_size=group).quantize(weight)
    assert torch.equal(weight, before)
    assert codes.shape == (rows, columns)
    assert codes.codes.dtype == torch.int8
    # Rounding to float16 moves the largest codes: by more where a scale is as small as it can be.
    # So it is in a group of few numbers, which may be nearly the same.
    slack = 1e-3 * weight.abs().max() * (0 < columns % group <= 4)
    assert ((codes.dequantize() - weight).abs() <= 1.6 * spread(codes) + slack).all()
    assert int(codes.codes.min()) >= -128


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 200),
    group=st.sampled_from([32, 64, 96]),
    size=st.sampled_from([1e-9, 1e-3, 1.0, 1e4, 1e9, 1e30]),
    shift=st.sampled_from([0, 1, -30]),
    seed=st.integers(0, 99),
)
def test_four_bits_are_at_least_as_good_as_rounding(rows, columns, group, size, shift, seed):
    weight = (draw(rows, columns, seed=seed) + shift) * size
    codes = build_scheme(Int4, group_size=group).quantize(weight)
    assert codes.shape == (rows, columns)
    assert codes.codes.dtype == torch.uint8
    assert int(codes.codes.max()) <= 15
    rounded = torch.cat([rounding(part) for part in weight.split(group, 1)], 1)
    error, plain = (((w - weight) / size).square().sum() for w in (codes.dequantize(), rounded))
    assert error <= plain * 1.02 + 1e-6 * ((weight / size) ** 2).sum()


def rounding(weight: torch.Tensor) -> torch.Tensor:
    """Return a group rounded to 16 steps from its smallest to its largest number."""
    low, high = weight.aminmax(dim=1, keepdim=True)
    step = (high - low) / 15
    return ((weight - low) / step).nan_to_num().round() * step + low


def test_four_bits_of_normal_numbers_have_less_error_than_rounding():
    weight = draw(512, 512)
    weights = build_scheme(Int4, group_size=32).quantize(weight).dequantize()
    plain = torch.cat([rounding(part) for part in weight.split(32, 1)], 1)
    assert (weights - weight).square().sum() < 0.85 * (plain - weight).square().sum()


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("size", [1.0, 1e-7, 3e5])
def test_parts_are_those_of_the_whole(kind, size):
    scheme = build_scheme(kind, group_size=32)
    weight = draw(70, 200) * size
    weight[3, :64] *= 1e-9  # scales that float16 does not hold, in a part of the matrix
    whole = scheme.quantize(weight).dequantize()
    for rows, columns in (((0, 3), (0, 200)), ((3, 70), (0, 200)), ((5, 9), (32, 96))):
        part = weight[slice(*rows), slice(*columns)]
        assert torch.equal(scheme.quantize(part).dequantize(), whole[slice(*rows), slice(*columns)])
    assert torch.equal(scheme.quantize(weight[:, 96:]).dequantize(), whole[:, 96:])


def test_a_matrix_of_many_rows_is_quantised_a_part_at_a_time(monkeypatch):
    from hardpoint.builtin_plugins.quantizations import groups

    weight = draw(50, 96)
    whole = build_scheme(Int4).quantize(weight)
    monkeypatch.setattr(groups, "_CHUNK", 7 * 96)
    parts = build_scheme(Int4).quantize(weight)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.dequantize(), parts.dequantize())


@pytest.mark.parametrize("kind", SCHEMES)
def test_zeros_are_zeros(kind):
    codes = build_scheme(kind).quantize(torch.zeros(4, 100))
    assert not codes.dequantize().any()
    assert codes.scales.dtype == torch.float16
    assert build_scheme(kind).quantize(torch.zeros(0, 64)).shape == (0, 64)


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("number", [1.0, -0.3, 1e-8, -7e4, 1e30, 2.0**-130])
def test_groups_of_one_number_are_that_number(kind, number):
    weight = torch.full((3, 70), number)
    weights = build_scheme(kind).quantize(weight).dequantize()
    assert torch.allclose(weights, weight, rtol=5e-3, atol=1e-36)


@pytest.mark.parametrize("kind", SCHEMES)
def test_float16_holds_scales_where_it_can(kind):
    scheme = build_scheme(kind)
    assert scheme.quantize(draw(4, 64)).scales.dtype == torch.float16
    assert scheme.quantize(draw(4, 64) * 1e-6).scales.dtype == torch.float32
    assert scheme.quantize(draw(4, 64) * 1e9).scales.dtype == torch.float32
    large = scheme.quantize(draw(4, 64) * 1e37)
    assert large.is_finite()
    assert large.dequantize().isfinite().all()
    with pytest.raises(ValueError, match=r"numbers above 1e\+38, which are too large"):
        scheme.quantize(torch.full((2, 64), -2e38))


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_large_number_leaves_other_groups_as_they_were(kind):
    scheme, weight = build_scheme(kind, group_size=32), draw(2, 96)
    before = scheme.quantize(weight).dequantize()
    weight[0, 40] = 3e7
    after = scheme.quantize(weight).dequantize()
    assert after[0, 40] == pytest.approx(3e7, rel=1e-2)
    assert torch.equal(after[0, :32], before[0, :32])
    assert torch.equal(after[1], before[1])


def test_bytes_in_memory():
    assert build_scheme(Int8, group_size=64).stored_bytes((10, 130)) == 10 * (130 + 3 * 4)
    assert build_scheme(Int4, group_size=32).stored_bytes((10, 130)) == 10 * (65 + 5 * 4)


@pytest.mark.parametrize("kind", SCHEMES)
def test_it_only_quantises(kind):
    scheme = build_scheme(kind)
    assert scheme.quantizes
    with pytest.raises(NotImplementedError, match="reads no checkpoints"):
        scheme.read(None)


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_a_weight_without_columns_is_refused(kind):
    with pytest.raises(ValueError, match=r"with at least 1 column, got \[3, 0\]"):
        build_scheme(kind).quantize(torch.zeros(3, 0))
