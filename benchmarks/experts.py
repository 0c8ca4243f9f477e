"""Measure the experts of a layer: the kernel, and the operations' default on both products.

    python benchmarks/experts.py [--threads 2] [--hidden 1024 --width 3584 --count 8 --per-token 2]

Prints microseconds per call of a layer, by rows (1 is a decode step of one request).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch

from hardpoint.plugins import Ops
from hardpoint.testing import load_ops

ROWS = (1, 2, 8, 32, 128, 512)
Apply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--per-token", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    shapes = (2 * options.width, options.hidden), (options.hidden, options.width)
    matrices = [
        [torch.randn(shape, dtype=dtype) / 30 for _ in range(options.count)] for shape in shapes
    ]
    layers: dict[str, Apply] = {}
    for name in ("torch", "native_cpu"):
        ops = load_ops(dtype, use=name)
        packed = [[ops.pack(matrix) for matrix in side] for side in matrices]
        shape = options.hidden, options.width
        layers[f"default, {name}"] = Ops.experts(ops, packed[0], packed[1], shape)
        if name == "native_cpu":
            layers["kernel"] = ops.experts(packed[0], packed[1], shape)
    print(f"{'rows':>5}" + "".join(f"{name:>22}" for name in layers))
    with torch.inference_mode():
        for rows in ROWS:
            x = torch.randn(rows, options.hidden).to(dtype)
            draws = [torch.randperm(options.count)[: options.per_token] for _ in range(rows)]
            inputs = x, torch.stack(draws), torch.rand(rows, options.per_token)
            times = [measure(functools.partial(apply, *inputs)) for apply in layers.values()]
            print(f"{rows:>5}" + "".join(f"{1e6 * seconds:>22.0f}" for seconds in times))


def measure(run: Callable[[], object]) -> float:
    """Return the median time of a call, in seconds."""
    for _ in range(3):
        run()
    times = []
    end = time.perf_counter() + 1.0
    while len(times) < 5 or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
