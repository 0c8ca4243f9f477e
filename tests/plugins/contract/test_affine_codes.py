"""`AffineCodes` are dequantized by the formula of their documentation, and cut, in any groups."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.plugins.quantization import AffineCodes, QuantizedMatrix


@st.composite
def matrices(draw) -> AffineCodes:
    bits, group = draw(st.sampled_from([4, 5, 6, 8])), draw(st.sampled_from([16, 32, 96, 512]))
    rows, columns = draw(st.integers(0, 300)), draw(st.integers(1, 700))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def factors(outer: bool) -> torch.Tensor:
        shape = (rows, -(-columns // group))
        if outer:
            return torch.randint(-128, 128, shape, generator=source, dtype=torch.int8)
        return torch.randn(shape, generator=source).half()

    def outer_factors(outer: bool) -> torch.Tensor | None:
        return torch.randn((rows, -(-columns // 256)), generator=source).half() if outer else None

    has_outer, has_offsets, outer_offsets = (draw(st.booleans()) for _ in "abc")
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=source).to(torch.uint8)
    table = torch.randn(1 << bits, generator=source).bfloat16().float()
    return AffineCodes(
        codes.view(torch.int8) if bits == 8 else codes,
        bits,
        group,
        factors(has_outer),
        factors(outer_offsets) if has_offsets else None,
        outer_factors(has_outer),
        outer_factors(has_offsets and outer_offsets),
        table if bits < 8 and draw(st.booleans()) else None,
    )


def spread(factors: torch.Tensor, outer: torch.Tensor | None, group: int, columns: int):
    """Return the factor of each number, as in the documentation."""
    k = torch.arange(columns)
    spread_factors = factors.float()[:, k // group]
    return spread_factors if outer is None else spread_factors * outer.float()[:, k // 256]


@settings(max_examples=60, deadline=None)
@given(matrix=matrices())
def test_any_codes_are_dequantized_by_the_formula(matrix) -> None:
    codes, columns = matrix.codes, matrix.shape[1]
    numbers = codes.float() if matrix.values is None else matrix.values[codes.long()]
    expected = numbers * spread(matrix.scales, matrix.outer_scales, matrix.group, columns)
    if matrix.offsets is not None:
        expected += spread(matrix.offsets, matrix.outer_offsets, matrix.group, columns)
    assert torch.equal(matrix.dequantize(), expected)


@settings(max_examples=60, deadline=None)
@given(matrix=matrices())
def test_any_codes_are_cut_at_their_alignment(matrix) -> None:
    numbers, (_, columns) = matrix.dequantize(), matrix.shape
    ends = [*range(0, columns, matrix.alignment), columns]
    for start, stop in itertools.pairwise(ends):
        assert torch.equal(matrix.columns(start, stop).dequantize(), numbers[:, start:stop])


def test_codes_whose_groups_do_not_divide_outer_ones_are_cut_where_both_end() -> None:
    outer = torch.ones(1, 4).half()
    scales = torch.arange(11, dtype=torch.uint8).view(1, 11)
    matrix = AffineCodes(torch.ones(1, 1024).byte(), 4, 96, scales, outer_scales=outer)
    assert matrix.alignment == 768 == math.lcm(96, 256)
    with pytest.raises(ValueError, match="256 to 1024 of 1024 cannot be cut from blocks of 768"):
        matrix.columns(256, 1024)
    last = matrix.columns(768, 1024)
    assert torch.equal(last.dequantize(), matrix.dequantize()[:, 768:])


def test_codes_that_multiply_themselves_are_refused_by_name() -> None:
    members = {"linear": lambda self, bias, out_dtype: None}
    with pytest.raises(TypeError, match=r"Own\.linear: .* derives from QuantizedMatrix"):
        type("Own", (AffineCodes,), members)
    derived = type("Derived", (AffineCodes,), {})
    assert fields(derived) == fields(AffineCodes)
    type("Free", (QuantizedMatrix,), members)


def test_contiguous_makes_the_table_contiguous_too() -> None:
    codes, table = torch.zeros(3, 32, dtype=torch.uint8), torch.arange(32.0)[::2]
    codes_copy = AffineCodes(codes, 4, 32, torch.ones(3, 1).half(), values=table).contiguous()
    assert codes_copy.values is not None
    assert codes_copy.values.is_contiguous()
    assert torch.equal(codes_copy.values, table)
