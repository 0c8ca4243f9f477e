"""Parts of weights that ranks need, also several parts of one weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import AffineCodes, QuantizedMatrix

WEIGHT = torch.arange(48.0).reshape(8, 6)
CUTS = [
    (Cut(0, 2, 5), [2, 3, 4]),
    (Cut(0, 1, 3, ((4, 4), (5, 8))), [1, 2, 5, 6, 7]),
    (Cut(1, 0, 1, ((3, 5),)), [0, 3, 4]),
]


@pytest.mark.parametrize(("cut", "expected"), CUTS)
def test_the_parts_of_a_weight_follow_each_other(cut: Cut, expected: list[int]) -> None:
    part = WEIGHT.index_select(cut.dim, torch.tensor(expected))
    assert torch.equal(cut.of(WEIGHT), part)
    assert np.array_equal(cut.of(WEIGHT.numpy()), part.numpy())
    assert cut.shape(WEIGHT.shape) == tuple(part.shape)
    assert all(not part.more and part.dim == cut.dim for part in cut.parts)


@pytest.mark.parametrize(
    ("cut", "fits"),
    [
        (Cut(0, 0, 8, ((0, 8),)), True),
        (Cut(1, 0, 2, ((5, 7),)), False),
        (Cut(0, 0, 2, ((5, 4),)), False),
        (Cut(0, 0, 2, ((-1, 4),)), False),
        (Cut(2, 0, 1), False),
        (Cut(-1, 0, 1), False),
    ],
)
def test_a_cut_is_inside_of_its_weight(cut: Cut, fits: bool) -> None:
    assert cut.fits(WEIGHT.shape) is fits


def codes(**fields) -> AffineCodes:
    """Return random codes [12, 512] of 4 bits, in groups of 32 columns."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (12, 512), generator=generator, dtype=torch.uint8)
    fields = {"group": 32, "scales": torch.rand(12, 16, generator=generator)} | fields
    return AffineCodes(codes=numbers, bits=4, **fields)


OUTER = torch.rand(12, 2, generator=torch.Generator().manual_seed(1)).half()
INNER = torch.arange(12 * 16, dtype=torch.uint8).view(12, 16)
VARIANTS = {
    "scales": {},
    "outer scales": {
        "scales": INNER,
        "offsets": INNER.flip(0),
        "outer_scales": OUTER,
        "outer_offsets": -OUTER.flip(0),
        "values": torch.arange(16.0) - 8,
    },
    "rows": {"group": 512, "scales": torch.arange(12.0)[:, None] + 1},
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_of_codes_are_joined(dim: int, variant: str) -> None:
    matrix = codes(**VARIANTS[variant])
    bounds = [(1, 3), (3, 4), (9, 12)] if dim == 0 else [(256, 512), (0, 256)]
    cut = Cut(dim, *bounds[0], tuple(bounds[1:]))
    parts = [(matrix.rows if dim == 0 else matrix.columns)(*bound) for bound in bounds]
    joined = parts[0].joined(parts, dim)
    assert joined.shape == cut.shape(matrix.shape)
    assert torch.equal(joined.dequantize(), cut.of(matrix.dequantize()))


class Sixths(QuantizedMatrix):
    """Counts sixths."""

    shape = (8, 6)
    alignment = 1

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def rows(self, start, stop):
        return Sixths(self.codes[start:stop])

    def columns(self, start, stop):
        return Sixths(self.codes[:, start:stop])

    def dequantize(self):
        return self.codes / 6


def test_parts_of_other_matrices_are_dequantised() -> None:
    matrix = Sixths(WEIGHT)
    parts = [matrix.rows(0, 2), matrix.rows(5, 8)]
    joined = parts[0].joined(parts, 0)
    assert torch.equal(joined.dequantize(), Cut(0, 0, 2, ((5, 8),)).of(WEIGHT) / 6)
