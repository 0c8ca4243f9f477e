"""Time collectives of the ranks of one host: shared memory compared with gloo.

    python benchmarks/collectives.py --ranks 2
    python benchmarks/collectives.py --count 5      # whether it runs

Prints the median and the 99th percentile of each call in microseconds.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
import torch.multiprocessing as multiprocessing
from options import options_of, save, show_table

from hardpoint.builtin_plugins.communicators.shared_memory import SharedMemoryCommunicator
from hardpoint.builtin_plugins.communicators.torch import TorchCommunicator
from hardpoint.plugins.parallel import Communicator, CommunicatorContext, Placement

SHAPES = ((1, 576), (32, 576), (512, 576), (32, 4096))
KINDS: dict[str, type[Communicator]] = {
    "shared memory": SharedMemoryCommunicator,
    "gloo": TorchCommunicator,
}


def run_rank(
    rank: int, ranks: int, folder: str, count: int, results: multiprocessing.Queue
) -> None:
    """Time the collectives and report p50 and p99 in microseconds from rank 0."""
    torch.set_num_threads(1)
    figures = {}
    for name, cls in KINDS.items():
        group = cls(
            CommunicatorContext(
                name=name,
                options=cls.Options(),
                group=cls.__name__,
                rank=rank,
                size=ranks,
                device=torch.device("cpu"),
                placement=Placement(hosts=("",) * ranks, folder=folder),
                timeout_seconds=30.0,
            )
        )
        for shape in SHAPES:
            x, times = torch.ones(shape, dtype=torch.bfloat16), []
            for _ in range(count + count // 5):
                began = time.perf_counter()
                group.all_reduce(x)
                times.append((time.perf_counter() - began) * 1e6)
            times = sorted(times[count // 5 :])  # the first ones warm up
            figures[name, shape] = statistics.median(times), times[int(len(times) * 0.99)]
        group.close()
    if rank == 0:
        results.put(figures)


def main() -> None:
    """Print the table."""
    options = options_of(__doc__, ranks=2, count=(1000, "calls of each kind"))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(
                target=run_rank, args=(rank, options.ranks, folder, options.count, results)
            )
            for rank in range(options.ranks)
        ]
        for child in children:
            child.start()
        figures = results.get()
        for child in children:
            child.join()
    rows = []
    for shape in SHAPES:
        pairs = [figures[name, shape] for name in KINDS]
        cells = [f"{median:.1f}, {worst:.1f}" for median, worst in pairs]
        (shared, _), (gloo, _) = pairs
        rows.append([f"all_reduce {shape[0]}x{shape[1]} bf16", *cells, f"{gloo / shared:.1f}"])
    title = f"{options.ranks} ranks: microseconds, p50 and p99"
    show_table(title, ("call", *KINDS, "ratio"), rows)
    save(options.json, rows)


if __name__ == "__main__":
    main()
