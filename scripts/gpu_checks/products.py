"""Products of 1 to 16 rows on a GPU: against float32, and their speed next to torch's library.

    scripts/gpu-check --only products
    scripts/gpu-check --only products --dry-run    # on a CPU: compares, and measures nothing

The shapes are those of a decode step of Llama-3-8B. A product reads copies of its matrix in turn,
together larger than the caches of a GPU, in a CUDA graph, so that the host takes no time. By the
bytes of the matrix, its time is a bandwidth: a share of what the data sheet lists, where that is
known, and else of a copy's. A step is each product as often as the model has it.

Printed are also the entries of kernels/triton/measured_products.py for the GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.builtin_plugins.ops.triton import TritonOps
from hardpoint.plugins import OpsContext
from hardpoint.plugins.quantization import AffineCodes

from .device import AIMED, DATA_SHEETS, Device
from .models import Sizes
from .recorder import Check, Recorder

ROWS = (1, 2, 4, 8, 16)
AIM_DENSE, AIM_QUANTIZED = 0.75, 0.85
FASTER = 1.02
"""How many times as fast as the library a product has to be for an entry."""

_DTYPE = torch.bfloat16
_BITS, _GROUP = (8, 4), 128
_COPIED_BYTES = 512 << 20
_MOST_COPIES = 64
_REPEATS = 5
_DRAWN = 128  # rows of random codes, which are repeated


@dataclass(frozen=True)
class Product:
    """A matrix of a model.

    Attributes:
        name: name of the figures.
        shape: its rows and columns.
        count: how many of them a step multiplies by.
    """

    name: str
    shape: tuple[int, int]
    count: int


@dataclass(frozen=True)
class Timing:
    """Time of a product.

    Attributes:
        num_bytes: bytes of the matrix.
        seconds: seconds of one product.
        library_seconds: the same of torch's library; None without.
    """

    num_bytes: int
    seconds: float
    library_seconds: float | None = None


Timings = Mapping[tuple[Product, int], Timing]
"""By product and number of rows."""


def check_products(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Compare and measure the products with unquantized weights, and measure those with others."""
    products = products_of(sizes.llama)
    bandwidth, has_aims = _bandwidth(device)
    timings: dict[tuple[Product, int], Timing] = {}
    for product in products:
        rows, columns = product.shape
        with recorder.check(f"{product.name}, bf16, {rows}x{columns}") as check:
            check.fake("speeds")
            timings |= _dense(product, device, check)
            add_figures(check, [product], timings, bandwidth)
    with recorder.check("products of a step, bf16") as check:
        check.fake("speeds")
        add_figures(check, products, timings, bandwidth)
        name = "products of a step of 1 row, bf16, share of the bandwidth"
        check.aim(name, "1_rows_bandwidth", AIM_DENSE, is_judged=has_aims)
        check.facts["entries"] = [] if device.is_fake else entries(timings)
        lines = check.facts["entries"] or ["none"]
        check.set_detail(f"entries of {device.describe()['gpu']}: {' '.join(lines)}")
    for bits in _BITS:
        with recorder.check(f"products of a step, W{bits}A16") as check:
            check.fake("speeds")
            quantized = [product for product in products if product.count > 1]
            measured = _quantized(bits, quantized, device)
            add_figures(check, quantized, measured, bandwidth)
            for count in (ROWS[0], ROWS[-1]):
                name = f"products of a step of {count} rows, W{bits}A16, share of the bandwidth"
                figure = f"{count}_rows_bandwidth"
                check.aim(name, figure, AIM_QUANTIZED, is_judged=has_aims)


def products_of(fields: Mapping[str, Any]) -> list[Product]:
    """Return the matrices of a decode step, by the fields of a config.json.

    The layers' are packed as a model packs them: queries, keys and values, and gate and up.
    """
    hidden, width, layers = (
        fields[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads, kv_heads = (fields[name] for name in ("num_attention_heads", "num_key_value_heads"))
    size = fields["head_dim"]
    return [
        Product("qkv", ((heads + 2 * kv_heads) * size, hidden), layers),
        Product("o", (hidden, heads * size), layers),
        Product("gate_up", (2 * width, hidden), layers),
        Product("down", (hidden, width), layers),
        Product("output", (fields["vocab_size"], hidden), 1),
    ]


def entries(timings: Timings) -> list[str]:
    """Return the lines of the table: products that were faster, and ones of similar sizes."""
    lines = []
    for product in dict.fromkeys(product for product, _ in timings):
        limits = [_around(size) for size in product.shape]
        for least, most in _faster_rows(product, timings):
            lines.append(
                f'ProductClass("bfloat16", ({least}, {most}), {limits[0]}, {limits[1]}),'
                f"  # {product.name}"
            )
    return lines


def _faster_rows(product: Product, timings: Timings) -> list[tuple[int, int]]:
    """Return ranges of numbers of rows; a measured number stands for the ones before it."""
    ranges: list[tuple[int, int]] = []
    for before, count in itertools.pairwise((0, *ROWS)):
        timing = timings[product, count]
        if (timing.library_seconds or 0.0) < FASTER * timing.seconds:
            continue
        if ranges and ranges[-1][1] == before:
            ranges[-1] = (ranges[-1][0], count)
        else:
            ranges.append((before + 1, count))
    return ranges


def _around(size: int) -> tuple[int, int]:
    return size * 3 // 4, size * 4 // 3


def _bandwidth(device: Device) -> tuple[float, bool]:
    """Return the bytes per second of a share of 1, and whether the aims are for the GPU."""
    name = device.describe()["gpu"]
    if name in DATA_SHEETS:
        return DATA_SHEETS[name][0], name.startswith(AIMED)
    return device.copy_rate(), False


def _ops(device: Device, choice: str) -> TritonOps:
    options = TritonOps.Options(few_row_products=choice)  # type: ignore[arg-type]
    place = torch.device(device.name)
    return TritonOps(OpsContext(name="triton", options=options, device=place, dtype=_DTYPE))


def _dense(product: Product, device: Device, check: Check) -> dict[tuple[Product, int], Timing]:
    """Compare and measure a product with unquantized weights."""
    generator = torch.Generator(device.name).manual_seed(sum(product.shape))
    draw = functools.partial(torch.randn, dtype=_DTYPE, device=device.name, generator=generator)
    weight, x = draw(product.shape), draw((ROWS[-1], product.shape[1]))
    always, never = _ops(device, "always"), _ops(device, "never")
    repeats = 1 if device.is_fake else _REPEATS
    compare(x, weight, always.linear(weight, product.shape), repeats, check)
    copies = _copies(weight, device)
    multiply = [always.linear(copy, product.shape) for copy in copies]
    library = [never.linear(copy, product.shape) for copy in copies]
    return {
        (product, count): Timing(
            weight.nbytes,
            _seconds(device, multiply, x[:count]),
            _seconds(device, library, x[:count]),
        )
        for count in ROWS
    }


def _quantized(
    bits: int, products: Sequence[Product], device: Device
) -> dict[tuple[Product, int], Timing]:
    """Measure products with quantized weights, in groups that share a scale."""
    ops, timings = _ops(device, "measured"), {}
    generator = torch.Generator().manual_seed(bits)
    for product in products:
        rows, columns = product.shape
        low, high, dtype = (-127, 128, torch.int8) if bits == 8 else (0, 16, torch.uint8)
        codes = torch.randint(low, high, (_DRAWN, columns), dtype=dtype, generator=generator)
        codes = codes.repeat(-(-rows // _DRAWN), 1)[:rows]
        scales = torch.rand((rows, -(-columns // _GROUP)), generator=generator).half()
        packed = ops.pack_codes([AffineCodes(codes, bits, _GROUP, scales)])
        multiply = [ops.linear(copy, product.shape) for copy in _copies(packed, device)]
        x = torch.randn((ROWS[-1], columns), generator=generator).to(packed.device, _DTYPE)
        for count in ROWS:
            seconds = _seconds(device, multiply, x[:count])
            timings[product, count] = Timing(packed.nbytes, seconds)
    return timings


def compare(
    x: torch.Tensor,
    weight: torch.Tensor,
    multiply: Callable[[torch.Tensor], torch.Tensor],
    repeats: int,
    check: Check,
) -> None:
    """Compare each number of rows with float32, other numbers of rows, and further launches."""
    expected = x.float() @ weight.float().T
    limit = 1e-5 * x.float().norm(dim=1)[:, None] * weight.float().norm(dim=1)
    limit += expected.abs() / 2**8
    most = multiply(x)
    for count in ROWS:
        y = multiply(x[:count])
        is_near = bool(((y.float() - expected[:count]).abs() <= limit[:count]).all())
        check.expect(is_near, f"{count} rows: differs from the product in float32")
        check.expect(
            count == 1 or torch.equal(y, most[:count]), f"{count} rows: differs from {len(x)} rows"
        )
        for _ in range(repeats):
            check.expect(torch.equal(multiply(x[:count]), y), f"{count} rows: launches differ")


def _copies(matrix: torch.Tensor, device: Device) -> list[torch.Tensor]:
    """Return the matrix and copies of it, which no cache holds."""
    wanted = 1 if device.is_fake else -(-_COPIED_BYTES // matrix.nbytes)
    return [matrix, *(matrix.clone() for _ in range(min(wanted, _MOST_COPIES) - 1))]


def _seconds(
    device: Device, products: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor
) -> float:
    return device.graph_seconds([functools.partial(multiply, x) for multiply in products])


def add_figures(
    check: Check, products: Sequence[Product], timings: Timings, bandwidth: float
) -> None:
    """Add the bandwidth of products, its share, and how many times as fast as the library."""
    for count in ROWS:
        num_bytes = seconds = library = 0.0
        for product in products:
            timing = timings[product, count]
            num_bytes += product.count * timing.num_bytes
            seconds += product.count * timing.seconds
            library += product.count * (timing.library_seconds or 0.0)
        rate = num_bytes / seconds
        figures = {"tb_per_s": rate / 1e12, "bandwidth": rate / bandwidth}
        if library:
            figures["times_library"] = library / seconds
        check.measured(**{f"{count}_rows_{name}": value for name, value in figures.items()})
