"""Time what the ranks of one host exchange: shared memory compared with gloo.

    python benchmarks/collectives.py --ranks 2

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
from hardpoint.kernels.shared_memory import BroadcastRing
from hardpoint.plugins.parallel import Communicator, CommunicatorContext, Placement

SHAPES = ((1, 576), (32, 576), (512, 576), (32, 4096))
MESSAGES = (1_000, 8_500, 26_000)


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


def read_messages(descriptor: int, reader: int, answers: socket.socket) -> None:
    """Answer each message of a ring, and of the socket once the ring is done."""
    ring = BroadcastRing.open(descriptor, reader)
    while ring.read():
        answers.sendall(b"1")
    ring.close()
    while size := int.from_bytes(receive(answers, 4), "little"):
        receive(answers, size)
        answers.sendall(b"1")


def receive(source: socket.socket, size: int) -> bytes:
    """Return so many bytes."""
    data = bytearray()
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise EOFError("the other end is closed")
        data += part
    return bytes(data)


class Readers:
    """Processes that answer messages, through a ring or through sockets."""

    def __init__(self, count: int) -> None:
        """Start them."""
        context = multiprocessing.get_context("fork")
        self._ring = BroadcastRing.create(1 << 20, count)
        self._pairs = [socket.socketpair() for _ in range(count)]
        self._children = [
            context.Process(target=read_messages, args=(self._ring.fileno(), reader, theirs))
            for reader, (_, theirs) in enumerate(self._pairs)
        ]
        for child in self._children:
            child.start()

    def by_ring(self, data: bytes) -> None:
        """Send a message through the ring."""
        self._ring.write(data)
        self._receive_answers()

    def by_sockets(self, data: bytes) -> None:
        """Send a message through a socket each."""
        for ours, _ in self._pairs:
            ours.sendall(len(data).to_bytes(4, "little") + data)
        self._receive_answers()

    def end_ring(self) -> None:
        """Switch them from the ring to the sockets."""
        self._ring.write(b"")

    def close(self) -> None:
        """End them."""
        for ours, _ in self._pairs:
            ours.sendall(bytes(4))
        for child in self._children:
            child.join()
        self._ring.close()

    def _receive_answers(self) -> None:
        for ours, _ in self._pairs:
            receive(ours, 1)


def time_messages(readers: int, count: int) -> list[list[tuple[float, float]]]:
    """Return how long each message takes by the ring and by sockets, answers included."""
    processes, messages = Readers(readers), [bytes(size) for size in MESSAGES]
    results = []
    for send in (processes.by_ring, processes.by_sockets):
        results.append(
            [
                percentiles(time_calls(functools.partial(send, message), count))
                for message in messages
            ]
        )
        if send == processes.by_ring:
            processes.end_ring()
    processes.close()
    return [list(pair) for pair in zip(*results, strict=True)]


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
    rows = [
        (f"all_reduce {rows}x{columns} bf16", shared, gloo)
        for (rows, columns), shared, gloo in zip(
            SHAPES, results[: len(SHAPES)], results[len(SHAPES) :], strict=True
        )
    ]
    rows += [
        (f"plan of {size} bytes", *both)
        for size, both in zip(MESSAGES, time_messages(ranks, count), strict=True)
    ]
    print(f"{ranks} ranks: microseconds, p50 and p99; plans include the readers' answers")
    print(f"{'':28}{'shared memory':>18}{'gloo or sockets':>18}{'ratio':>8}")
    for what, shared, other in rows:
        figures = "".join(f"{median:9.1f}{worst:9.1f}" for median, worst in (shared, other))
        print(f"{what:28}{figures}{other[0] / shared[0]:8.1f}")


if __name__ == "__main__":
    main()
