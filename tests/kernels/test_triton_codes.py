"""Triton's products with low-bit codes equal their twin; damaged packed codes are refused."""

from __future__ import annotations

import dataclasses
import itertools
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import nightly_but
from support.moving import move_memory
from support.triton import kernel_examples, triton_ops

pytest.importorskip("triton")

from hardpoint.kernels.triton import code_experts, code_tiles, launch, packed_codes
from hardpoint.kernels.triton import codes as kernels
from hardpoint.kernels.twins import AffineMatrix, dequantize, linear_codes
from hardpoint.plugins import quantization
from hardpoint.testing.ops.code_matrices import FORMS

DEVICE = torch.device("cpu" if launch.is_interpreted() else "cuda")
BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
NESTED = (torch.int8, torch.uint8)
EACH_WAY = [FORMS[0], FORMS[4], FORMS[6], FORMS[9]]
"""Codes of each number of bits: alone, with a table, with two levels of scales, with offsets."""
SOME_FORMS = nightly_but(FORMS, *EACH_WAY, name=lambda kind: kind.name)
ROUNDING = {FLOAT: 1e-5, HALF: 1e-3, BF16: 8e-3}  # the interpreter cuts bfloat16


@dataclasses.dataclass(frozen=True)
class Form:
    """How a random part of a matrix is stored."""

    rows: int
    bits: int
    group: int
    scales: torch.dtype
    offsets: torch.dtype | None
    has_values: bool


stored = st.sampled_from([HALF, HALF, FLOAT, *NESTED])
forms = st.builds(
    Form,
    rows=st.sampled_from([1, 5, 16, 33, 64, 70]),
    bits=st.sampled_from([4, 5, 6, 8]),
    group=st.sampled_from([16, 32, 64, 96, 128, 160, 2048]),
    scales=stored,
    offsets=st.none() | stored,
    has_values=st.booleans(),
)


def random_factors(
    form: Form, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return factors, and the outer ones that they need."""
    shape = (form.rows, -(-columns // form.group))
    if dtype not in NESTED:
        return torch.randn(shape, generator=generator).to(dtype), None
    low = 0 if dtype is torch.uint8 else -128
    inner = torch.randint(low, low + 256, shape, generator=generator).to(dtype)
    outer = torch.randn(form.rows, -(-columns // 256), generator=generator) / 128
    return inner, outer.half()


def random_codes(form: Form, columns: int, generator: torch.Generator) -> AffineMatrix:
    low, high, dtype = (-128, 128, torch.int8) if form.bits == 8 else (0, 2**form.bits, torch.uint8)
    codes = torch.randint(low, high, (form.rows, columns), generator=generator).to(dtype)
    scales, outer_scales = random_factors(form, columns, form.scales, generator)
    offsets, outer_offsets, values = None, None, None
    if form.offsets is not None:
        offsets, outer_offsets = random_factors(form, columns, form.offsets, generator)
    if form.has_values and form.bits < 8:
        values = torch.randn(2**form.bits, generator=generator).bfloat16().float()
    return AffineMatrix(
        codes, form.bits, form.group, scales, offsets, outer_scales, outer_offsets, values
    )


def drawn(kind, rows: int, columns: int) -> AffineMatrix:
    """Return a matrix of one of the forms that operations may get."""
    generator = torch.Generator().manual_seed(columns)
    matrix = kind.draw(rows, columns, generator)
    return AffineMatrix(**{f.name: getattr(matrix, f.name) for f in dataclasses.fields(matrix)})


def check_product(parts, x, bias, out_dtype) -> None:
    """Compare a product with its twin; x may have any strides between rows."""
    weight = torch.cat([dequantize(part) for part in parts])
    packed = kernels.pack(parts, DEVICE)
    given_bias = None if bias is None else bias.to(DEVICE)
    multiply = kernels.linear_codes(packed, tuple(weight.shape), given_bias, out_dtype)
    y = multiply(x.to(DEVICE)).cpu()
    assert y.dtype == out_dtype
    # Rounding errors grow with what is summed; those of offsets and codes may cancel out.
    largest = weight.abs().amax(1) + 1
    limit = ROUNDING[x.dtype] * (x.float().norm(dim=1)[:, None] * largest * 4 + 1e-3)
    expected = linear_codes(x, parts, bias)
    rounded = expected.abs() * ROUNDING[out_dtype]
    error = (y.float() - expected).abs()
    assert (error <= limit + rounded).all(), (error - limit - rounded).max()


@kernel_examples(5, 70)
@given(
    parts=st.lists(forms, min_size=1, max_size=3),
    columns=st.sampled_from([1, 31, 32, 50, 160, 257, 576, 1100]),
    rows=st.sampled_from([0, 1, 2, 7, 16, 17, 40]),
    dtype=st.sampled_from([FLOAT, BF16, HALF]),
    is_biased=st.booleans(),
    is_wide=st.booleans(),
    gap=st.sampled_from([0, 1, 40]),
    seed=st.integers(0, 2**31),
)
def test_any_form(parts, columns, rows, dtype, is_biased, is_wide, gap, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = [random_codes(form, columns, generator) for form in parts]
    count = sum(form.rows for form in parts)
    x = torch.randn(rows, columns + gap, generator=generator).to(dtype)[:, :columns]
    bias = torch.randn(count, generator=generator).to(dtype) if is_biased else None
    check_product(matrix, x, bias, FLOAT if is_wide else dtype)
    ids = torch.randint(count, (9,), generator=generator)
    gather = kernels.gather_codes(kernels.pack(matrix, DEVICE), (count, columns), FLOAT)
    expected = torch.cat([dequantize(part) for part in matrix])[ids]
    # A product is rounded before the offset is added, and both may cancel out.
    limit = 1e-6 * (1 + torch.cat([dequantize(part) for part in matrix]).abs().max())
    assert ((gather(ids.to(DEVICE)).cpu() - expected).abs() <= limit).all()


@pytest.mark.parametrize("kind", SOME_FORMS)
def test_small_numbers_come_out_exactly(kind):
    """Sums of whole numbers that float32 holds have one right result, at every place."""
    matrix = drawn(kind, 7, 200)
    scales = torch.ones_like(matrix.scales)
    outer = None if matrix.outer_scales is None else torch.ones_like(matrix.outer_scales)
    values = None if matrix.values is None else torch.arange(2.0**kind.bits).flip(0)
    offsets = None if matrix.offsets is None else (matrix.offsets * 0 + 3).to(matrix.offsets.dtype)
    whole = dataclasses.replace(
        matrix, scales=scales, outer_scales=outer, values=values, offsets=offsets,
        outer_offsets=None if matrix.outer_offsets is None else outer,
    )  # fmt: skip
    packed = kernels.pack([whole], DEVICE)
    gather = kernels.gather_codes(packed, (7, 200), FLOAT)
    assert torch.equal(gather(torch.arange(7, device=DEVICE)).cpu(), dequantize(whole))
    x = torch.randint(-4, 5, (3, 200), generator=torch.Generator().manual_seed(3)).float()
    multiply = kernels.linear_codes(packed, (7, 200), None, FLOAT)
    for rows in (x, x[:1]):
        assert torch.equal(multiply(rows.to(DEVICE)).cpu(), linear_codes(rows, [whole]))


def test_columns_are_divided_among_programs(monkeypatch):
    """Which sums are of few rows of W, added up in one order."""
    monkeypatch.setattr(code_tiles, "INTERPRETED", (SMALL, SMALL))
    part = drawn(FORMS[0], 5, 600)
    assert code_tiles.splits_of(SMALL, 5, -(-600 // (2 * 32))) == 2
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(19, 600, generator=generator)
    for bias in (None, torch.randn(5, generator=generator)):
        check_product([part], x, bias, FLOAT)


SMALL = code_tiles.Tile(16, 32, 2, 4, 1, 512)


def test_few_rows_keep_a_gpu_busy(monkeypatch):
    """With 108 to 304 multiprocessors; the partial sums stay small."""
    monkeypatch.setattr(code_tiles, "is_interpreted", lambda: False)
    for dtype, rows in itertools.product((BF16, FLOAT), (2, 16, 17, 64, 65, 128, 129, 4096)):
        for count in (1024, 4096, 14336, 128256):
            tile = code_tiles.product_tile(rows, count, dtype)
            splits = code_tiles.splits_of(tile, count, 4096 // 64 // tile.lines)
            programs = -(-rows // tile.x_rows) * -(-count // tile.rows) * splits
            assert programs >= 128 or rows > 128, (dtype, rows, count)
            assert splits == 1 or splits * rows * count * 4 <= 1 << 23, (dtype, rows, count)


@pytest.mark.parametrize("kind", SOME_FORMS)
def test_a_row_is_multiplied_with_the_same_matrix_alone_and_among_others(kind):
    """These rows read one number each of it; only the order of sums may be another."""
    packed = kernels.pack([drawn(kind, 37, 100)], DEVICE)
    multiply = kernels.linear_codes(packed, (37, 100), None, FLOAT)
    rows = torch.eye(100, device=DEVICE, dtype=BF16)[[0, 41, 99]]
    assert torch.equal(torch.cat([multiply(row[None]) for row in rows]), multiply(rows))


@pytest.mark.parametrize("tile", [SMALL, code_tiles.Tile(1, 16, 2, 4, 1)], ids=["many", "one"])
@pytest.mark.parametrize(
    "kind", nightly_but([FORMS[5], FORMS[8]], FORMS[8], name=lambda kind: kind.name)
)
def test_small_tiles_give_the_same(monkeypatch, kind, tile):
    """Tiles of GPUs: several programs, each with several steps, the last of them not whole."""
    monkeypatch.setattr(code_tiles, "INTERPRETED", (tile, tile))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1 if tile.x_rows == 1 else 19, 300, generator=generator)
    check_product([drawn(kind, 37, 300)], x, None, FLOAT)


def test_scales_of_16_bits_are_read_as_they_are():
    """Subnormal and largest scales equal torch's."""
    bits = torch.tensor([0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00], dtype=torch.int16)
    scales = torch.cat([bits, bits | -0x8000]).view(HALF).unsqueeze(1)
    part = AffineMatrix(torch.ones(14, 32, dtype=torch.uint8), 4, 32, scales)
    gather = kernels.gather_codes(kernels.pack([part], DEVICE), (14, 32), FLOAT)
    expected = scales.float().expand(14, 32)
    assert torch.equal(gather(torch.arange(14, device=DEVICE)).cpu(), expected)


def test_ids_that_are_no_rows_read_nothing():
    part = drawn(FORMS[0], 4, 40)
    gather = kernels.gather_codes(kernels.pack([part], DEVICE), (4, 40), FLOAT)
    ids = torch.tensor([-1, 3, 4, 1 << 40], device=DEVICE)
    assert torch.equal(gather(ids)[1].cpu(), dequantize(part)[3])
    assert gather(ids[:0]).shape == (0, 40)


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_packed_codes_take_no_more_bits_than_they_have(kind):
    matrix = drawn(kind, 64, 768)
    packed = kernels.pack([matrix], torch.device("cpu"))
    names = ("scales", "offsets", "outer_scales", "outer_offsets", "values")
    factors = [tensor for name in names if (tensor := getattr(matrix, name)) is not None]
    num_bytes = 64 * 768 * kind.bits // 8 + sum(tensor.nbytes for tensor in factors)
    assert num_bytes <= len(packed) <= num_bytes + 1024


def test_parts_of_a_form_become_one():
    first = drawn(FORMS[4], 5, 70)
    other, last = (
        dataclasses.replace(drawn(FORMS[4], rows, 70), values=first.values) for rows in (9, 3)
    )
    packed = kernels.pack([first, other, last], torch.device("cpu"))
    assert [part.form.rows for part in packed_codes.read(packed, (17, 70))] == [17]
    different = dataclasses.replace(other, values=first.values + 1)
    packed = kernels.pack([first, different, drawn(FORMS[2], 3, 70)], torch.device("cpu"))
    assert [part.form.rows for part in packed_codes.read(packed, (17, 70))] == [5, 9, 3]


def refused(packed, shape) -> bool:
    message = f"expected packed codes of a matrix {list(shape)}, got {packed.dtype}"
    try:
        packed_codes.read(packed, shape)
    except ValueError as error:
        return message in str(error)
    return False


def test_damaged_headers_are_refused():
    whole = kernels.pack([drawn(FORMS[3], 5, 70), drawn(FORMS[5], 6, 70)], torch.device("cpu"))
    assert not refused(whole, (11, 70))
    assert refused(whole, (11, 71))
    assert refused(whole, (12, 70))
    for at in range(6 + 2 * 6):
        for change in (-1, 1, 64, 1 << 31, 1 << 62):
            damaged = whole.clone()
            damaged.view(torch.int64)[at] += change
            assert refused(damaged, (11, 70)), (at, change)
    for size in (0, 7, 48, 100, len(whole) - 1):
        assert refused(whole[:size].clone(), (11, 70))
    longer = torch.cat([whole, whole[:128]])
    for other in (longer, longer[::2], whole.view(torch.int8), whole.view(1, -1)):
        assert refused(other, (11, 70))


def test_headers_with_a_right_checksum_are_checked_too():
    """No header makes a kernel read beyond the tensor."""
    good = packed_codes.Form(5, 4, 32, 1, 0, has_values=False)
    size = packed_codes.size_of([good], 70)
    packed = torch.zeros(size, dtype=torch.uint8)
    changes = [{}, {"bits": 8, "has_values": True}]
    changes += [{"bits": 3}, {"bits": 5}, {"group": 48}, {"group": 1 << 62}]
    changes += [{"scales": 5}, {"offsets": -1}, {"rows": 0}, {"rows": -5}]
    for change in changes:
        form = dataclasses.replace(good, **change)
        header = packed_codes.header_of([form], 70, size)
        packed[: header.nbytes] = torch.from_numpy(header.view("u1"))
        assert refused(packed, (form.rows, 70)) == (form != good), change


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_packed_codes_may_lie_at_any_address_and_cannot_be_written_to(tmp_path):
    part = drawn(FORMS[3], 5, 70)
    content = bytes(3) + kernels.pack([part], torch.device("cpu")).numpy().tobytes()
    (tmp_path / "cache").write_bytes(content)
    with open(tmp_path / "cache", "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    packed = torch.frombuffer(memory, dtype=torch.uint8)[3:]
    gather = kernels.gather_codes(packed.to(DEVICE), (5, 70), FLOAT)
    got = gather(torch.arange(5, device=DEVICE)).cpu()
    torch.testing.assert_close(got, dequantize(part), rtol=1e-6, atol=1e-6)


def test_operations_refuse_what_is_no_matrix_of_codes():
    ops = triton_ops(BF16)
    matrix = FORMS[2].draw(6, 40, torch.Generator().manual_seed(1))
    packed = ops.pack_codes([matrix])
    assert ops.code_bits == (4, 5, 6, 8)
    assert ops.layout == ""  # the weight cache would hold numbers a second time
    for call in (ops.linear, ops.embedding):
        with pytest.raises(ValueError, match=r"expected packed codes of a matrix \[6, 41\], got"):
            call(packed, (6, 41))
    empty = quantization.AffineCodes(
        torch.zeros(6, 0, dtype=torch.uint8), 4, 32, torch.zeros(6, 0).half()
    )
    with pytest.raises(ValueError, match=r"codes of at least 1 column, got \[6, 0\]"):
        ops.pack_codes([empty])


@kernel_examples(3, 15)
@given(
    kinds=st.lists(st.sampled_from(FORMS), min_size=2, max_size=2),
    rows=st.sampled_from([1, 3, 40]),
    per_row=st.sampled_from([1, 3]),
    dtype=st.sampled_from([FLOAT, BF16]),
    is_stacked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_experts_of_codes(kinds, rows, per_row, dtype, is_stacked, seed):
    """Experts are multiplied together, though chosen by none or elsewhere."""
    hidden, width, experts = 50, 35, 4
    generator = torch.Generator().manual_seed(seed)
    ops = triton_ops(dtype)
    packed, numbers = [], []
    for kind, columns, sizes in (
        (kinds[0], hidden, (width, width)),
        (kinds[1], width, (hidden - 9, 9)),
    ):
        second = FORMS[2] if is_stacked else kind
        parts = [
            [k.draw(n, columns, generator) for k, n in zip((kind, second), sizes, strict=True)]
            for _ in range(experts)
        ]
        packed.append([ops.pack_codes(part) for part in parts])
        dense = [torch.cat([codes.dequantize() for codes in part]) for part in parts]
        numbers.append([matrix.to(DEVICE) for matrix in dense])
    x = torch.randn(rows, hidden + 3, generator=generator).to(DEVICE, dtype)[:, :hidden]
    chosen = torch.stack([torch.randperm(6, generator=generator)[:per_row] for _ in range(rows)])
    chosen = (chosen - 1).to(DEVICE)  # -1 and 4 are no experts
    weights = torch.rand(rows, per_row, generator=generator).to(DEVICE)
    y = ops.experts(packed[0], packed[1], (hidden, width))(x, chosen, weights)
    expected = torch.zeros(rows, hidden, device=DEVICE)
    scale = torch.zeros(rows, 1, device=DEVICE)
    for row in range(rows):
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            if 0 <= expert < experts:
                gate, up = (x[row].float() @ numbers[0][expert].T).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                expected[row] += weight * (numbers[1][expert] @ inner)
                scale[row] += gate.norm() * up.norm() * numbers[1][expert].norm()
    assert y.dtype == dtype
    assert ((y.float() - expected).abs() <= ROUNDING[dtype] * (scale + 1e-3)).all()


@pytest.mark.nightly
def test_results_of_experts_lie_at_aligned_addresses(monkeypatch):
    """Where columns are computed in parts."""
    ops = triton_ops(FLOAT)
    generator, hidden, pairs, widths = torch.Generator().manual_seed(3), 1100, 2, []
    packed = (
        [ops.pack_codes([FORMS[2].draw(*size, generator)])] * 2
        for size in ((32, hidden), (hidden, 16))
    )
    run = ops.experts(*packed, (hidden, 16))
    x = torch.randn(pairs, hidden, generator=generator).to(DEVICE)
    arguments = (
        x,
        torch.zeros(pairs, 1, dtype=torch.int64, device=DEVICE),
        torch.ones_like(x[:, :1]),
    )
    expected = run(*arguments)
    monkeypatch.setattr(code_experts, "_BUFFER", 4 * pairs * 1030)
    add_up = code_experts.sum_pairs
    monkeypatch.setattr(
        code_experts,
        "sum_pairs",
        lambda *tensors: (widths.append(tensors[0].stride(0)), add_up(*tensors)),
    )
    assert torch.equal(run(*arguments), expected)
    assert widths == [1024, 76]


def test_experts_of_different_forms_are_multiplied_one_by_one():
    generator = torch.Generator().manual_seed(4)
    ops = triton_ops(FLOAT)
    gate_up = [kind.draw(32, 16, generator) for kind in FORMS[:2]]
    down = [kind.draw(16, 16, generator) for kind in FORMS[:2]]
    packed = ([ops.pack_codes([codes]) for codes in side] for side in (gate_up, down))
    dense = (
        [ops.pack(codes.dequantize().to(DEVICE)) for codes in side] for side in (gate_up, down)
    )
    x = torch.randn(2, 16, generator=generator).to(DEVICE)
    chosen = torch.tensor([[0, 1], [1, 0]], device=DEVICE)
    weights = torch.rand(2, 2, generator=generator).to(DEVICE)
    got, expected = (ops.experts(*side, (16, 16))(x, chosen, weights) for side in (packed, dense))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_experts_of_codes_whose_memory_moved():
    generator = torch.Generator().manual_seed(4)
    ops = triton_ops(FLOAT)
    gate_up = [ops.pack_codes([FORMS[0].draw(32, 16, generator)]).clone() for _ in range(2)]
    down = [ops.pack_codes([FORMS[0].draw(16, 16, generator)]).clone() for _ in range(2)]
    run = ops.experts(gate_up, down, (16, 16))
    x = torch.randn(2, 16, generator=generator).to(DEVICE)
    chosen = torch.tensor([[0, 1], [1, 0]], device=DEVICE)
    weights = torch.rand(2, 2, generator=generator).to(DEVICE)
    expected = run(x, chosen, weights)
    move_memory([*gate_up, *down])
    assert torch.equal(run(x, chosen, weights), expected)
