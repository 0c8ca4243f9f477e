"""Random matrices of low-bit codes, and their products by the kernels."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st

from hardpoint.kernels import cpu
from hardpoint.kernels.twins import AffineMatrix

BF16, FLOAT = torch.bfloat16, torch.float32
NESTED = (torch.int8, torch.uint8)


def available() -> list[str]:
    """Return the instruction sets that this machine can run."""
    plain = cpu.load("plain")
    return [path for path in cpu.PATHS if plain.supports(path)]


@dataclasses.dataclass(frozen=True)
class Form:
    """How a random part of a matrix is stored."""

    rows: int
    bits: int
    group: int
    scales: torch.dtype
    offsets: torch.dtype | None
    values: str


stored = st.sampled_from([torch.float16, torch.float16, torch.float32, *NESTED])
forms = st.builds(
    Form,
    rows=st.sampled_from([1, 5, 16, 33, 96, 120]),
    bits=st.sampled_from([4, 5, 6, 8]),
    group=st.sampled_from([16, 32, 64, 96, 128, 160, 2048]),
    scales=stored,
    offsets=st.none() | stored,
    values=st.sampled_from(["codes", "centred", "table"]),
)


def random_integers(shape, low, high, generator):
    return torch.randint(low, high, shape, generator=generator)


def random_factors(rows, columns, group, dtype, generator):
    """Return factors, and the outer ones that they need; small numbers of few digits."""
    shape = (rows, -(-columns // group))
    if dtype not in NESTED:
        return (random_integers(shape, -8, 9, generator) / 4).to(dtype), None
    low = 0 if dtype is torch.uint8 else -128
    inner = random_integers(shape, low, low + 256, generator).to(dtype)
    outer = random_integers((rows, -(-columns // 256)), -4, 5, generator) / 128
    return inner, outer.to(torch.float16)


def random_codes(form: Form, columns: int, generator: torch.Generator) -> AffineMatrix:
    low, high, dtype = (-128, 128, torch.int8) if form.bits == 8 else (0, 2**form.bits, torch.uint8)
    codes = random_integers((form.rows, columns), low, high, generator).to(dtype)
    scales, outer_scales = random_factors(form.rows, columns, form.group, form.scales, generator)
    offsets, outer_offsets = None, None
    if form.offsets is not None:
        offsets, outer_offsets = random_factors(
            form.rows, columns, form.group, form.offsets, generator
        )
    values = None
    if form.values != "codes" and form.bits < 8:
        values = torch.arange(2.0**form.bits) - 2 ** (form.bits - 1)
        if form.values == "table":
            values = values[torch.randperm(2**form.bits, generator=generator)] / 8
    return AffineMatrix(
        codes, form.bits, form.group, scales, offsets, outer_scales, outer_offsets, values
    )


class Product:
    """x -> x W^T + b by a library's kernels."""

    def __init__(self, library, parts, bias, dtype, out_dtype=None, kernel="codes") -> None:
        self.packed = cpu.pack_codes(library, parts)
        self.bias, self.out_dtype = bias, out_dtype or dtype
        self.columns = sum(len(part.codes) for part in parts)
        self.depth = parts[0].codes.shape[1]
        name = f"linear_{kernel}" if self.out_dtype == dtype else f"logits_{kernel}"
        self.run = library.function(name, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.full((len(x), self.columns + 3), 7, dtype=self.out_dtype)
        self.run(
            x.data_ptr(), x.stride(0), self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(), y.data_ptr(), y.stride(0),
            len(x), self.columns, self.depth,
        )  # fmt: skip
        assert (y[:, self.columns :] == 7).all(), "wrote beyond the columns"
        return y[:, : self.columns]


def in_threads(count, run):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return run()
    finally:
        torch.set_num_threads(before)
