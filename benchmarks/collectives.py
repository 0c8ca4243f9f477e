"""Time what the ranks of one host exchange: shared memory compared with gloo.

    python benchmarks/collectives.py --ranks 2
    python benchmarks/collectives.py --count 5      # whether it runs

Prints the median and the 99th percentile of each call in microseconds.
"""

from __future__ import annotations

import argparse
import ast
import functools
import socket
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.multiprocessing as multiprocessing

from hardpoint.builtin_plugins.communicators.shared_memory import SharedMemoryCommunicator
from hardpoint.builtin_plugins.communicators.torch import TorchCommunicator
from hardpoint.plugins.parallel import Communicator, CommunicatorContext, Placement

SHAPES = ((1, 576), (32, 576), (512, 576), (32, 4096))


def percentiles(times: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile, in microseconds."""
    ordered = sorted(times)
    return statistics.median(ordered) * 1e6, ordered[int(len(ordered) * 0.99)] * 1e6


def connect(cls: type[Communicator], rank: int, ranks: int, folder: str) -> Communicator:
    """Return the communicator of a rank."""
    return cls(
        CommunicatorContext(
            name=cls.__name__,
            options=cls.Options(),
            group=cls.__name__,
            rank=rank,
            size=ranks,
            device=torch.device("cpu"),
            placement=Placement(hosts=("",) * ranks, folder=folder),
            timeout_seconds=30.0,
        )
    )


def time_calls(call: Callable[[], object], count: int) -> list[float]:
    """Return how long each call took, after some that are not counted."""
    times = []
    for _ in range(count + count // 5):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times[count // 5 :]


def run_rank(rank: int, ranks: int, folder: str, count: int, report: socket.socket) -> None:
    """Time the collectives; rank 0 prints them."""
    torch.set_num_threads(1)
    results = []
    for cls in (SharedMemoryCommunicator, TorchCommunicator):
        group = connect(cls, rank, ranks, folder)
        for shape in SHAPES:
            x = torch.ones(shape, dtype=torch.bfloat16)
            call = functools.partial(group.all_reduce, x)
            results.append(percentiles(time_calls(call, count)))
        group.close()
    if rank == 0:
        report.sendall(repr(results).encode())


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--count", type=int, default=1000, help="calls of each kind")
    arguments = parser.parse_args()
    ranks, count = arguments.ranks, arguments.count
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(target=run_rank, args=(rank, ranks, folder, count, theirs))
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        results = ast.literal_eval(ours.recv(1 << 16).decode())
        for child in children:
            child.join()
    print(f"{ranks} ranks: microseconds, p50 and p99")
    print(f"{'':28}{'shared memory':>18}{'gloo':>18}{'ratio':>8}")
    pairs = zip(results[: len(SHAPES)], results[len(SHAPES) :], strict=True)
    for (rows, columns), (shared, gloo) in zip(SHAPES, pairs, strict=True):
        name = f"all_reduce {rows}x{columns} bf16"
        figures = "".join(f"{median:9.1f}{worst:9.1f}" for median, worst in (shared, gloo))
        print(f"{name:28}{figures}{gloo[0] / shared[0]:8.1f}")


if __name__ == "__main__":
    main()
