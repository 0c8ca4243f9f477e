"""Products of low-bit codes with rounded activations equal their twin, alone and in any batch."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import given
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
from hardpoint.builtin_plugins.ops.torch import TorchOps
from hardpoint.kernels import cpu
from hardpoint.kernels.twins import (
    AffineMatrix,
    dequantize,
    largest_integer,
    linear_codes,
    linear_rounded,
)
from hardpoint.plugins import ModelError, OpsContext
from hardpoint.plugins.quantization import AffineCodes


@pytest.fixture(scope="module", params=available())
def library(request) -> cpu.Library:
    """The kernels of each instruction set."""
    return cpu.load(request.param)


@examples(40)
@given(
    parts=st.lists(forms, min_size=1, max_size=3),
    depth=st.sampled_from([1, 31, 32, 50, 160, 257, 576, 1100]),
    rows=st.integers(1, 12) | st.sampled_from([64, 65, 70]),
    kernel=st.tuples(st.sampled_from(["int8", "int16"]), st.sampled_from([BF16, FLOAT])),
    biased=st.booleans(),
    gap=st.sampled_from([0, 1, 40]),
    seed=st.integers(0, 2**31),
)
def test_any_form(library, parts, depth, rows, kernel, biased, gap, seed):
    activations, dtype = kernel
    generator = torch.Generator().manual_seed(seed)
    matrix = [random_codes(form, depth, generator) for form in parts]
    bias = None
    if biased:
        bias = torch.randn(sum(form.rows for form in parts), generator=generator).to(dtype)
    x = torch.randn(rows, depth + gap, generator=generator).to(dtype)[:, :depth]
    x[::3, : depth // 2] = 0  # whole blocks of zeros
    product = Product(library, matrix, bias, dtype, kernel=activations)

    y = product(x)
    expected = linear_rounded(x, matrix, bias, activations)
    weight = torch.cat([dequantize(part) for part in matrix])
    size = x.float().abs() @ weight.abs().T
    # Offsets and codes cancel: their parts may be larger than the weights.
    largest = x.float().abs().sum(1, keepdim=True) * 1e-4 * (1 + weight.abs().max())
    error = (y.float() - expected).abs()
    assert (error <= 1e-5 * size + largest + expected.abs() * 2**-8).all()

    single = torch.cat([product(row) for row in x.split(1)[:12]])
    assert torch.equal(single, y[: len(single)])
    for count in (2, 3, 5):
        assert torch.equal(product(x[-count:]), y[-count:])
    for threads in (1, 3):
        assert torch.equal(in_threads(threads, lambda: product(x)), y)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_largest_products_do_not_saturate(library, activations, bits, group, rows, sign):
    """The largest codes times the largest activations are summed exactly."""
    code, dtype = (-128, torch.int8) if bits == 8 else (2**bits - 1, torch.uint8)
    columns = 128  # that float32 sums exactly
    codes = torch.full((48, columns), code, dtype=dtype)
    part = AffineMatrix(codes, bits, group, torch.ones(48, columns // group))
    value = float(largest_integer(bits, activations) * sign)
    x = torch.full((rows, columns), value)
    y = Product(library, [part], None, FLOAT, kernel=activations)(x)
    assert torch.equal(y, torch.full((rows, 48), value * code * columns))


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 40])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_integers_come_out_exactly(library, activations, bits, rows):
    """Integers up to the limit are not rounded; float32 holds the sums of two blocks."""
    generator = torch.Generator().manual_seed(bits)
    parts = [
        random_codes(Form(rows_of, bits, group, torch.float16, offsets, values), 64, generator)
        for rows_of, group, offsets, values in (
            (40, 32, torch.float16, "codes"),
            (17, 16, None, "centred"),
            (112, 64, torch.float32, "codes"),
        )
    ]
    x = torch.randint(-4, 5, (rows, 64), generator=generator).float()
    x[:, ::32] = largest_integer(bits, activations)
    y = Product(library, parts, None, FLOAT, kernel=activations)(x)
    assert torch.equal(y, linear_codes(x, parts))


@pytest.mark.parametrize("group", [16, 32, 96, 2048])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_tiles_give_the_bits_of_vectors(activations, bits, group):
    """Sums of integers are exact: the paths and all sizes of batches have the same results."""
    paths = {"amx_bf16", "avx512_bf16"}
    if not paths <= set(available()):
        pytest.skip("the processor has no tiles")
    generator = torch.Generator().manual_seed(bits * group)
    offsets = torch.float16 if group == 32 else None
    parts = [
        random_codes(Form(rows, bits, group, torch.float16, offsets, "centred"), 544, generator)
        for rows in (100, 33)
    ]
    x = torch.randn(150, 544, generator=generator).to(BF16)
    results = []
    for path in sorted(paths):
        product = Product(cpu.load(path), parts, None, BF16, FLOAT, kernel=activations)
        results += [product(x)]
        for count in (1, 4, 5, 15, 16, 17, 31, 129):
            assert torch.equal(product(x[:count]), results[-1][:count]), (path, count)
    assert torch.equal(*results)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_special_activations(library, activations, bits):
    """Zeros and tiny numbers give zeros; what is not finite gives NaN in its row alone."""
    generator = torch.Generator().manual_seed(7)
    part = random_codes(Form(20, bits, 32, torch.float16, None, "codes"), 64, generator)
    x = torch.randn(6, 64, generator=generator)
    x[1] = 0
    x[2] = 1e-38
    x[3, 40] = torch.inf
    x[4, 3] = torch.nan
    y = Product(library, [part], None, FLOAT, kernel=activations)(x)
    assert torch.equal(y[1:3], torch.zeros(2, 20))
    assert y[3:5].isnan().all()
    assert y[[0, 5]].isfinite().all()


def test_operations_round_activations(library, monkeypatch):
    monkeypatch.setenv(cpu.VARIABLE, library.path)
    cpu.load.cache_clear()
    generator = torch.Generator().manual_seed(5)
    part = random_codes(Form(64, 4, 32, torch.float16, torch.float16, "codes"), 96, generator)
    codes = AffineCodes(part.codes, 4, 32, part.scales, part.offsets)
    x = torch.randn(3, 96, generator=generator).to(BF16)
    context = OpsContext(name="native_cpu", options=None, device=torch.device("cpu"), dtype=BF16)
    rounded = {
        name: functools.partial(linear_rounded, activations=name) for name in ("int8", "int16")
    }
    for activations, twin in {"none": linear_codes, **rounded}.items():
        ops = NativeOps(dataclasses.replace(context, activations=activations))
        packed = ops.pack_codes([codes])
        for out_dtype in (None, FLOAT):
            y = ops.linear(packed, (64, 96), out_dtype=out_dtype)(x)
            expected = twin(x, [part]).to(out_dtype or BF16)
            torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-4)
    cpu.load.cache_clear()


def test_operations_without_rounding_refuse_the_setting():
    context = OpsContext(
        name="torch", options=None, device=torch.device("cpu"), dtype=BF16, activations="int8"
    )
    with pytest.raises(ModelError, match="quantization.activations: the operations 'torch' sup"):
        TorchOps(context)
