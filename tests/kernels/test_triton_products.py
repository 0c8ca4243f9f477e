"""Triton's products of few rows equal torch's, in any division of their steps among programs."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.moving import move_memory
from support.triton import kernel_device, kernel_examples, triton_ops

pytest.importorskip("triton")

from hardpoint.kernels.triton import measured_products, products

DEVICE = torch.device(kernel_device())
BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {FLOAT: 1e-5, HALF: 1e-3, BF16: 8e-3}
SMALL = (
    products.FewRowTile(1, 8, 32, 4, 1, 2),
    products.FewRowTile(16, 16, 32, 4, 1, 2),
)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles, steps and programs."""
    use_tiles(monkeypatch, SMALL)


def use_tiles(monkeypatch, tiles):
    monkeypatch.setattr(products, "INTERPRETED", tiles)
    monkeypatch.setattr(products, "is_interpreted", lambda: True)


def draw(*shape, dtype=FLOAT, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def check(y, x, weight, bias):
    """Compare y with the product in float64, and errors with the size of the sums."""
    expected = x.double() @ weight.double().T
    scale = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    if bias is not None:
        expected += bias.double()
    limit = 1e-5 * scale + ROUNDING[y.dtype] * expected.abs() + 1e-6
    assert ((y.double() - expected).abs() <= limit).all()


@dataclasses.dataclass(frozen=True)
class Case:
    """A product, of rows that are parts of wider ones."""

    shape: tuple[int, int]
    x_rows: int
    gaps: tuple[int, int]
    dtype: torch.dtype
    out_dtype: torch.dtype
    is_biased: bool
    processors: int


sizes = st.integers(1, 130) | st.sampled_from([256, 300, 600])
dtypes = st.sampled_from([FLOAT, BF16, HALF])
cases = st.builds(
    Case,
    shape=st.tuples(st.integers(1, 90), sizes),
    x_rows=st.integers(1, 16),
    gaps=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dtype=dtypes,
    out_dtype=dtypes,
    is_biased=st.booleans(),
    processors=st.integers(1, 9),
)


@kernel_examples(12, 150)
@given(cases, st.booleans(), st.integers(0, 2**31))
def test_any_product(case, is_small, seed):
    (rows, columns), dtype = case.shape, case.dtype
    x = draw(case.x_rows, columns + case.gaps[0], dtype=dtype, seed=seed)[:, :columns]
    weight = draw(rows, columns + case.gaps[1], dtype=dtype, seed=seed + 1)[:, :columns]
    bias = draw(rows, dtype=dtype, seed=seed + 2) if case.is_biased else None
    with pytest.MonkeyPatch.context() as monkeypatch:
        if is_small:
            use_tiles(monkeypatch, SMALL)
        monkeypatch.setattr(products, "count_processors", lambda _: case.processors)
        y = products.FewRowProduct(weight, bias, case.out_dtype)(x)
    assert (y.dtype, y.shape) == (case.out_dtype, (case.x_rows, rows))
    check(y, x, weight, bias)


@pytest.mark.parametrize("x_rows", range(1, 17))
def test_each_number_of_rows(small_tiles, x_rows):
    x, weight, bias = draw(16, 72, dtype=BF16), draw(40, 72, dtype=BF16, seed=1), draw(40, seed=2)
    multiply = products.FewRowProduct(weight, bias, FLOAT)
    y = multiply(x[:x_rows])
    check(y, x[:x_rows], weight, bias)
    if x_rows > 1:
        assert torch.equal(y, multiply(x)[:x_rows])  # the number of rows changes no bit


@pytest.mark.parametrize("x_rows", [1, 3])
@pytest.mark.parametrize("processors", [1, 2, 3, 5, 7, 40])
def test_division_of_steps(small_tiles, monkeypatch, x_rows, processors):
    """Each step has one program; programs have equal numbers of them."""
    monkeypatch.setattr(products, "count_processors", lambda _: processors)
    x, weight = draw(x_rows, 100), draw(50, 100, seed=1)
    check(products.FewRowProduct(weight, None, FLOAT)(x), x, weight, None)
    for tile, columns in itertools.product(SMALL, (1, 32, 100, 700)):
        division = products.StepDivision.of_shape(tile, (50, columns), processors)
        steps = division.tiles * division.steps
        assert division.tiles == -(-50 // tile.rows)
        assert division.steps == -(-columns // tile.columns)
        assert division.programs <= processors * tile.programs
        assert (division.programs - 1) * division.program_steps < steps
        assert division.programs * division.program_steps >= steps


def in_order(monkeypatch, order):
    """Let the interpreter run the programs of a grid in another order; return its dimensions."""
    from triton.runtime import interpreter

    dimensions = []

    def reordered(*limits):
        if len(limits) > 1:  # of a kernel's loop
            return range(*limits)
        dimensions.append(order(list(range(*limits))))
        return dimensions[-1]

    monkeypatch.setitem(vars(interpreter), "range", reordered)
    return dimensions


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU has an order of its own")
@pytest.mark.parametrize("x_rows", [1, 5])
def test_results_do_not_depend_on_the_last_program(small_tiles, monkeypatch, x_rows):
    x, weight, bias = draw(x_rows, 300), draw(40, 300, seed=1), draw(40, seed=2)
    multiply = products.FewRowProduct(weight, bias, FLOAT)
    expected = multiply(x)
    check(expected, x, weight, bias)
    for order in (lambda n: n[::-1], lambda n: n[1::2] + n[::2], lambda n: n[3:] + n[:3]):
        with monkeypatch.context() as patch:
            grids = in_order(patch, order)
            assert torch.equal(multiply(x), expected)
        assert len(grids[0]) > 3
        assert grids[0] != sorted(grids[0])


@pytest.mark.parametrize("x_rows", [1, 2, 16])
def test_repeated_launches_give_the_same(small_tiles, x_rows):
    """Launches leave nothing behind: what programs count begins with 0 again."""
    x, weight = draw(x_rows, 200, dtype=BF16), draw(40, 200, dtype=BF16, seed=1)
    multiply = products.FewRowProduct(weight, None, FLOAT)
    first = multiply(x)
    for _ in range(3):
        assert torch.equal(multiply(x), first)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_that_are_not_finite_leave_others_alone(small_tiles):
    x, weight = draw(4, 90, dtype=BF16), draw(20, 90, dtype=BF16, seed=1)
    multiply = products.FewRowProduct(weight, None, BF16)
    expected = multiply(x)
    x[1], x[3, 7] = float("nan"), float("inf")
    y = multiply(x)
    assert torch.equal(y[[0, 2]], expected[[0, 2]])
    assert y[1].isnan().all()
    assert not y[3].isfinite().any()


def test_what_lies_beyond_rows_and_columns_is_not_read(small_tiles):
    """NaN in a wider x and a wider W changes nothing."""
    x, weight = draw(5, 40), draw(30, 40, seed=1)
    wide_x, wide = (torch.full((40, 60), float("nan"), device=DEVICE) for _ in range(2))
    wide_x[:5, :40], wide[:30, :40] = x, weight
    for count in (1, 5):
        y = products.FewRowProduct(wide[:30, :40], None, FLOAT)(wide_x[:count, :40])
        assert torch.equal(y, products.FewRowProduct(weight, None, FLOAT)(x[:count]))


def test_small_whole_numbers_come_out_exactly(small_tiles):
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-4, 5, (16, 150), generator=generator).to(DEVICE, BF16)
    weight = torch.randint(-4, 5, (33, 150), generator=generator).to(DEVICE, BF16)
    multiply = products.FewRowProduct(weight, None, FLOAT)
    for count in (1, 16):
        assert torch.equal(multiply(x[:count]), x[:count].float() @ weight.float().T)


def test_a_matrix_whose_memory_moved(small_tiles):
    x, weight = draw(3, 90), draw(20, 90, seed=1)
    multiply = products.FewRowProduct(weight, None, FLOAT)
    expected = multiply(x)
    move_memory([weight])
    assert torch.equal(multiply(x), expected)


@pytest.mark.parametrize("x_rows", [1, 4])
def test_replays_of_a_recording(small_tiles, x_rows):
    """A CUDA graph, on a GPU: each replay multiplies the x of its time."""
    ops, weight = triton_ops(BF16, few_row_products="always"), draw(40, 200, dtype=BF16)
    multiply, x = ops.linear(weight, (40, 200)), draw(x_rows, 200, dtype=BF16, seed=1)
    recorded = ops.record(lambda: multiply(x))
    for seed in range(2, 5):
        x.copy_(draw(x_rows, 200, dtype=BF16, seed=seed))
        assert torch.equal(recorded(), multiply(x))
        check(recorded(), x, weight, None)


@pytest.fixture
def counts(monkeypatch):
    """Collects the numbers of rows that the kernels of this package multiply."""
    calls, call = [], products.FewRowProduct.__call__
    monkeypatch.setattr(
        products.FewRowProduct, "__call__", lambda self, x: calls.append(len(x)) or call(self, x)
    )
    return calls


def test_which_products_run_in_the_kernels(counts, monkeypatch):
    rows, weight = draw(18, 30, dtype=BF16), draw(20, 30, dtype=BF16, seed=1)
    classes = [measured_products.ProductClass("bfloat16", (2, 4), (16, 32), (30, 30))]
    monkeypatch.setattr(measured_products, "FASTER", {"GPU": classes})
    for choice, name, expected in (
        ("never", "GPU", []),
        ("measured", "another GPU", []),
        ("measured", "GPU", [2, 3, 4]),
        ("always", "another GPU", [*range(1, 17)]),
    ):
        ops = triton_ops(BF16, few_row_products=choice)
        monkeypatch.setattr(ops, "_gpu", name)
        counts.clear()
        multiply = ops.linear(ops.pack(weight), (20, 30))
        for count in range(19):
            assert torch.allclose(
                multiply(rows[:count]).float(),
                torch.nn.functional.linear(rows[:count].float(), weight.float()),
                atol=0.1,
            )
        assert counts == expected, choice
        assert ops.linear(weight[:0], (0, 30))(rows[:2]).shape == (2, 0)
        assert ops.linear(weight[:, :0], (20, 0))(rows[:2, :0]).shape == (2, 20)
        transposed = ops.linear(rows.T, (30, 18))(rows[:1, :18])  # whose columns are contiguous
        assert transposed.shape == (1, 30)


@pytest.mark.parametrize(
    ("x_rows", "shape", "dtype", "expected"),
    [
        (1, (4096, 4096), BF16, True),
        (2, (4096, 4096), BF16, False),
        (1, (4095, 4096), BF16, False),
        (1, (6145, 4096), BF16, False),
        (1, (4096, 4097), BF16, False),
        (1, (4096, 4096), HALF, False),
    ],
)
def test_classes_of_the_table(x_rows, shape, dtype, expected):
    products_class = measured_products.ProductClass("bfloat16", (1, 1), (4096, 6144), (4096, 4096))
    table = {"NVIDIA H100 80GB HBM3": [products_class]}
    measured = measured_products.is_faster
    assert measured("NVIDIA H100 80GB HBM3", x_rows, shape, dtype, table) is expected
    assert not measured("NVIDIA H100 PCIe", x_rows, shape, dtype, table)


@pytest.mark.parametrize("processors", [108, 132, 304])
def test_programs_keep_a_gpu_busy(processors):
    """Of Llama-3-8B's products: all multiprocessors have a program, and the sums stay small."""
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
    for size, shape in itertools.product((2, 4), shapes):
        for tile in products.TILES[size]:
            division = products.StepDivision.of_shape(tile, shape, processors)
            busy = division.programs / (processors * tile.programs)
            assert busy > 0.8, (size, shape, tile)
            assert division.programs * 2 * tile.x_rows * tile.rows * 4 <= 5 << 20
