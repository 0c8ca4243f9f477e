"""Speed of matrix products by rows, bf16 and low-bit codes side by side.

    python benchmarks/products.py [--shapes 576x576 2048x2048] [--rows 1 16 32] [--threads 1 2]
    HARDPOINT_KERNELS=avx2 python benchmarks/products.py      # on another instruction set

Printed are GFLOP per second and, of codes, how many times as fast as bf16 they are: the best of
some rounds, in which the formats take turns. As in a model, a matrix is read after others have
been: there are as many copies as fill `--memory` megabytes of bf16, fewer where rows are many.
The last column of one row is the share of the rate at which torch reads memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bounds import read_rate
from rich.console import Console
from rich.table import Table

from hardpoint.plugins import Ops
from hardpoint.plugins.quantization import AffineCodes
from hardpoint.testing import load_ops

SHAPES = ("576x576", "576x1536", "1536x576", "576x49152", "2048x2048", "2048x5632")
_MOST_WORK = 2e9  # multiplications of a round, where there are several copies


@dataclass(frozen=True)
class Format:
    """How weights are stored.

    Attributes:
        bits: number of bits of a code; 16 is bf16.
        group: columns that share a scale.
        offsets: whether groups have offsets.
    """

    bits: int = 16
    group: int = 32
    offsets: bool = False

    def pack(self, ops: Ops, rows: int, columns: int) -> torch.Tensor:
        """Return a packed matrix of random weights."""
        if self.bits == 16:
            return ops.pack(torch.randn(rows, columns, dtype=torch.bfloat16))
        low, dtype = (-128, torch.int8) if self.bits == 8 else (0, torch.uint8)
        codes = torch.randint(low, low + 2**self.bits, (rows, columns), dtype=dtype)
        factors = torch.rand(2, rows, -(-columns // self.group)).half() / 100
        values = None if self.offsets or self.bits == 8 else torch.arange(-8.0, 8.0)
        offsets = factors[1] if self.offsets else None
        return ops.pack_codes(
            [AffineCodes(codes, self.bits, self.group, factors[0], offsets, values=values)]
        )

    def num_bytes(self, weights: int) -> float:
        """Return the bytes of so many weights."""
        factors = 0 if self.bits == 16 else 16 * (1 + self.offsets) / self.group
        return weights * (self.bits + factors) / 8


FORMATS = {
    "bf16": Format(),
    "int8": Format(8, 32, True),
    "Q8_0": Format(8),
    "Q4_1, int4": Format(4, 32, True),
    "Q4_0": Format(4),
    "4 bits of 128": Format(4, 128, True),
}


def measure(
    ops: Ops, shape: tuple[int, int], rows: int, options: argparse.Namespace
) -> dict[str, float]:
    """Return the seconds of a product by format."""
    columns, depth = shape
    weights = columns * depth
    wanted = min(options.memory * 2**20 / 2, _MOST_WORK / rows) / weights
    copies = max(1, round(wanted))
    x = torch.randn(rows, depth).bfloat16()
    passes: dict[str, Callable[[], object]] = {}
    kept = []  # the matrices, which what is recorded refers to by address
    for name in options.formats:
        packed = [FORMATS[name].pack(ops, columns, depth) for _ in range(copies)]
        products = [ops.linear(matrix, shape) for matrix in packed]
        kept.append(packed)
        recorded = ops.record(lambda products=products: [product(x) for product in products][-1])
        assert recorded is not None
        passes[name] = recorded
    return {name: seconds / copies for name, seconds in best(passes, options.seconds).items()}


def best(passes: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the least seconds of each function; they run in turns for `seconds` each."""
    least = dict.fromkeys(passes, float("inf"))
    end = time.perf_counter() + seconds * len(passes)
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for name, run in passes.items():
            start = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - start)
        rounds += 1
    return least


def show(
    ops: Ops, shape: tuple[int, int], read_rates: dict[int, float], options: argparse.Namespace
) -> None:
    """Measure the products of a shape, and print them."""
    columns, depth = shape
    table = Table(title=f"{depth} x {columns}, {ops.describe()}: GFLOP/s (times bf16; of reads)")
    table.add_column("rows", justify="right")
    table.add_column("threads", justify="right")
    for name in options.formats:
        table.add_column(name, justify="right")
    for rows in options.rows:
        for threads in options.threads:
            torch.set_num_threads(threads)
            read = read_rates[threads]
            cells = []
            found = measure(ops, shape, rows, options)
            for name, seconds in found.items():
                cell = f"{2e-9 * rows * columns * depth / seconds:.0f}"
                if "bf16" in found and name != "bf16":
                    cell += f" ({found['bf16'] / seconds:.2f})"
                if rows == 1:
                    rate = FORMATS[name].num_bytes(columns * depth) / seconds
                    cell += f" {rate / read:.0%}"
                cells.append(cell)
            table.add_row(str(rows), str(threads), *cells)
    Console(width=120).print(table)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="depth x columns")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 512, 2048])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--memory", type=float, default=96, help="megabytes of weights in bf16")
    parser.add_argument("--seconds", type=float, default=0.15, help="of a cell of the table")
    options = parser.parse_args()
    ops = load_ops(torch.bfloat16, use="native_cpu")
    with torch.inference_mode():
        read_rates = {}
        for threads in options.threads:
            torch.set_num_threads(threads)
            read_rates[threads] = read_rate()
        print({threads: f"reads {rate / 1e9:.1f} GB/s" for threads, rate in read_rates.items()})
        for shape in options.shapes:
            depth, columns = map(int, shape.split("x"))
            show(ops, (columns, depth), read_rates, options)


if __name__ == "__main__":
    main()
