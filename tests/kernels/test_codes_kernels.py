"""Products with low-bit codes equal their twin, and a row's result is the same in any batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.code_matrices import (
    BF16,
    FLOAT,
    Form,
    Product,
    available,
    forms,
    in_threads,
    random_codes,
)
from support.searching import examples

from hardpoint.builtin_plugins.ops.native_cpu import NativeOps
from hardpoint.kernels import cpu
from hardpoint.kernels.twins import AffineMatrix, dequantize, linear_codes
from hardpoint.plugins import OpsContext, quantization


@pytest.fixture(scope="module", params=available())
def library(request) -> cpu.Library:
    """The kernels of each instruction set."""
    return cpu.load(request.param)


def gather(library, packed, ids, depth, dtype):
    out = torch.empty(len(ids), depth, dtype=dtype)
    run = library.function("gather_codes", dtype)
    run(packed.data_ptr(), ids.data_ptr(), len(ids), out.data_ptr())
    return out


@examples(40)
@given(
    parts=st.lists(forms, min_size=1, max_size=3),
    depth=st.sampled_from([1, 31, 32, 50, 160, 257, 576, 1100]),
    rows=st.integers(1, 12) | st.sampled_from([64, 65, 70]),
    dtype=st.sampled_from([BF16, FLOAT]),
    biased=st.booleans(),
    gap=st.sampled_from([0, 1, 40]),
    seed=st.integers(0, 2**31),
)
def test_any_form(library, parts, depth, rows, dtype, biased, gap, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = [random_codes(form, depth, generator) for form in parts]
    columns = sum(form.rows for form in parts)
    bias = torch.randn(columns, generator=generator).to(dtype) if biased else None
    x = torch.randn(rows, depth + gap, generator=generator).to(dtype)[:, :depth]
    product = Product(library, matrix, bias, dtype)

    y = product(x)
    expected = linear_codes(x, matrix, bias)
    weight = torch.cat([dequantize(part) for part in matrix])
    size = x.float().abs() @ weight.abs().T  # rounding errors grow with it
    # Offsets and codes cancel: their parts may be larger than the weights.
    largest = x.float().abs().sum(1, keepdim=True) * 1e-4 * (1 + weight.abs().max())
    error = (y.float() - expected).abs()
    assert (error <= 1e-5 * size + largest + expected.abs() * 2**-8).all()

    single = torch.cat([product(row) for row in x.split(1)[:12]])
    assert torch.equal(single, y[: len(single)])
    assert torch.equal(product(x[-2:]), y[-2:])
    for threads in (1, 3):
        assert torch.equal(in_threads(threads, lambda: product(x)), y)
    ids = torch.randint(0, columns, (20,), generator=generator)
    gathered = gather(library, product.packed, ids, depth, dtype)
    assert torch.equal(gathered, weight[ids].to(dtype))


@pytest.mark.parametrize("values", ["codes", "centred", "table"])
@pytest.mark.parametrize("group", [16, 32, 64, 96, 160, 2048])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_a_row_has_the_same_bits_in_a_batch_of_any_size(library, bits, group, values):
    """The batches end inside a tile of 16 rows, after it, and in another block of rows."""
    generator = torch.Generator().manual_seed(bits * group)
    offsets = None if values == "centred" else torch.float32
    parts = [
        random_codes(Form(rows, bits, group, scales, offsets, values), 544, generator)
        for rows, scales in ((100, torch.float16), (33, torch.int8))
    ]
    x = torch.randn(150, 544, generator=generator)
    x[:, ::7] *= 1e-38  # below the normal numbers, as are their products
    x[5] *= 1e-38
    product = Product(library, parts, None, BF16, FLOAT)
    x = x.to(BF16)
    y = product(x)
    for count in (1, 2, 3, 15, 16, 17, 31, 64, 129):
        assert torch.equal(product(x[:count]), y[:count]), count
        assert torch.equal(product(x[-count:]), y[-count:]), count


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 40])
@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_small_numbers_come_out_exactly(library, bits, dtype, rows):
    """Sums of whole numbers that float32 holds have one right result."""
    generator = torch.Generator().manual_seed(bits)
    parts = [
        random_codes(Form(rows_of, bits, group, torch.float16, offsets, values), 200, generator)
        for rows_of, group, offsets, values in (
            (40, 32, torch.float16, "codes"),
            (17, 16, None, "centred"),
            (112, 200, torch.float32, "table"),
        )
    ]
    x = torch.randint(-4, 5, (rows, 200), generator=generator).to(dtype)
    bias = torch.randint(-9, 9, (169,), generator=generator).to(dtype)
    expected = linear_codes(x, parts, bias)
    assert torch.equal(Product(library, parts, bias, dtype)(x), expected.to(dtype))
    if dtype is BF16:
        assert torch.equal(Product(library, parts, bias, dtype, FLOAT)(x), expected)


def test_scales_of_16_bits_are_read_as_they_are(library):
    """Subnormal, largest, infinite and NaN scales equal torch's."""
    bits = torch.tensor([0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00], dtype=torch.int16)
    scales = torch.cat([bits, bits | -0x8000]).view(torch.float16).unsqueeze(1)
    codes = torch.ones(16, 32, dtype=torch.uint8)
    part = AffineMatrix(codes, 4, 32, scales)
    x = torch.zeros(1, 32)
    x[0, 5] = 1
    y = Product(library, [part], None, FLOAT)(x)
    torch.testing.assert_close(y[0], scales[:, 0].float(), rtol=0, atol=0, equal_nan=True)
    gathered = gather(library, cpu.pack_codes(library, [part]), torch.arange(16), 32, FLOAT)
    expected = scales.float().expand(16, 32)
    torch.testing.assert_close(gathered, expected, rtol=0, atol=0, equal_nan=True)


def test_a_wrong_product_with_codes_is_noticed(library, monkeypatch):
    pack = cpu.pack_codes

    def pack_wrongly(library, parts):
        packed = pack(library, parts)
        packed[-1024:] = 0
        return packed

    monkeypatch.setattr(cpu, "pack_codes", pack_wrongly)
    cpu.load.cache_clear()
    try:
        with pytest.raises(cpu.KernelsUnavailableError, match="a known product came out wrong"):
            cpu.load(library.path)
    finally:
        cpu.load.cache_clear()


@pytest.mark.parametrize("name", ["linear_codes", "gather_codes"])
def test_products_are_recorded(library, name):
    generator = torch.Generator().manual_seed(3)
    part = random_codes(Form(40, 4, 32, torch.float16, None, "centred"), 64, generator)
    packed = cpu.pack_codes(library, [part])
    x, ids = torch.randn(3, 64, generator=generator), torch.tensor([3, 39, 0])
    out = torch.zeros(3, 40 if name == "linear_codes" else 64)
    run = library.function(name, FLOAT)
    pointers = {
        "linear_codes": (x.data_ptr(), 64, packed.data_ptr(), None, out.data_ptr(), 40, 3, 40, 64),
        "gather_codes": (packed.data_ptr(), ids.data_ptr(), 3, out.data_ptr()),
    }
    with library.record() as recording:
        library.run(run, *pointers[name])
    expected = out.clone()
    out.zero_()
    calls = recording.words()
    library.function("replay", None)(calls.ctypes.data, len(calls))
    assert expected.any()
    assert torch.equal(out, expected)


WORDS = 11  # of a segment, before its values: rows, bits, group, codes, scales, offsets, is_affine


def is_packed(library, packed, rows, depth):
    return bool(library.function("check_codes", None)(packed.data_ptr(), len(packed), rows, depth))


@settings(max_examples=20, deadline=None)
@given(parts=st.lists(forms, min_size=1, max_size=3), depth=st.integers(1, 300))
def test_packed_codes_have_a_valid_header(library, parts, depth):
    generator = torch.Generator().manual_seed(depth)
    packed = cpu.pack_codes(library, [random_codes(form, depth, generator) for form in parts])
    rows = sum(form.rows for form in parts)
    assert is_packed(library, packed, rows, depth)
    assert not is_packed(library, packed, rows, depth + 1)
    assert not is_packed(library, packed[:-1], rows, depth)


def test_damaged_headers_are_noticed(library):
    generator = torch.Generator().manual_seed(4)
    stored = [
        Form(33, 4, 32, torch.float16, torch.int8, "table"),
        Form(31, 8, 64, torch.float32, None, "codes"),
    ]
    whole = cpu.pack_codes(library, [random_codes(form, 256, generator) for form in stored])
    fields = [*range(4), *(start + i for start in (8, 40) for i in range(WORDS))]
    for field in fields:
        for change in (-1, 1, 2, 64, 1 << 40, 1 << 62, -(1 << 62)):
            if (field, change) == (15, 1):  # int8 becomes uint8, of the same size
                continue
            packed = whole.clone()
            packed.view(torch.int64)[field] += change
            assert not is_packed(library, packed, 64, 256), (field, change)
    packed = whole.clone()
    packed.view(torch.int16)[(8 + WORDS) * 4 + 17] += 1  # repeats the second value
    assert not is_packed(library, packed, 64, 256)
    for size in (0, 32, 64, 320, 576):
        assert not is_packed(library, whole[:size].clone(), 64, 256)
    assert is_packed(library, whole.clone(), 64, 256)


def test_operations_refuse_packed_codes_with_a_damaged_header(library, monkeypatch):
    monkeypatch.setenv(cpu.VARIABLE, library.path)
    ops = NativeOps(OpsContext(name="native", options=None, device=torch.device("cpu"), dtype=BF16))
    generator = torch.Generator().manual_seed(5)
    part = random_codes(Form(64, 4, 32, torch.float16, None, "codes"), 32, generator)
    codes = quantization.AffineCodes(part.codes, 4, 32, part.scales)
    enter, leave = ops.pack_codes([codes]), ops.pack_codes([codes.rows(0, 32)])
    good, damaged = ops.pack_codes([codes]), ops.pack_codes([codes])
    damaged.view(torch.int64)[8 + 3] = 1 << 40  # where the codes start
    for call in (
        lambda: ops.linear(damaged, (64, 32)),
        lambda: ops.embedding(damaged, (64, 32)),
        lambda: ops.linear(good, (64, 64)),
        lambda: ops.linear(good[:64], (64, 32)),
        lambda: ops.experts([enter, damaged], [leave, leave], (32, 32)),
    ):
        with pytest.raises(ValueError, match=r"expected packed codes of a matrix \[64, "):
            call()
    ops.experts([enter], [leave], (32, 32))


def test_tables_of_any_stride_are_packed(library, monkeypatch):
    monkeypatch.setenv(cpu.VARIABLE, library.path)
    ops = NativeOps(
        OpsContext(name="native", options=None, device=torch.device("cpu"), dtype=FLOAT)
    )
    generator = torch.Generator().manual_seed(6)
    part = random_codes(Form(16, 4, 32, torch.float16, None, "codes"), 64, generator)
    table = torch.arange(32.0)[::2]
    codes = quantization.AffineCodes(part.codes, 4, 32, part.scales, values=table)
    x = torch.eye(64)
    assert torch.equal(ops.linear(ops.pack_codes([codes]), (16, 64))(x), codes.dequantize().T)


@pytest.mark.parametrize("activations", ["none", "int8"])
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_no_rows_give_no_rows(library, monkeypatch, dtype, activations):
    monkeypatch.setenv(cpu.VARIABLE, library.path)
    context = OpsContext(name="n", options=None, device=torch.device("cpu"), dtype=dtype)
    ops = NativeOps(dataclasses.replace(context, activations=activations))
    part = random_codes(Form(16, 4, 32, torch.float16, None, "codes"), 64, torch.Generator())
    codes = quantization.AffineCodes(part.codes, 4, 32, part.scales)
    for packed in (ops.pack(torch.ones(16, 64, dtype=dtype)), ops.pack_codes([codes])):
        product = ops.linear(packed, (16, 64))
        assert product(torch.empty(0, 64, dtype=dtype)).shape == (0, 16)
        assert product(torch.ones(1, 64, dtype=dtype)).shape == (1, 16)


def test_codes_without_columns_are_refused(library, monkeypatch):
    assert cpu.codes_size(library, [(16, 4, 32, 1, 0)], 0) == 320  # the header
    monkeypatch.setenv(cpu.VARIABLE, library.path)
    ops = NativeOps(OpsContext(name="n", options=None, device=torch.device("cpu"), dtype=BF16))
    codes, scales = torch.zeros(16, 0, dtype=torch.uint8), torch.zeros(16, 0).half()
    with pytest.raises(ValueError, match=r"codes of at least 1 column, got \[16, 0\]"):
        ops.pack_codes([quantization.AffineCodes(codes, 4, 32, scales)])
