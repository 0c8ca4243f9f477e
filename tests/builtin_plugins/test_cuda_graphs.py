"""CUDA graphs: sizes, and the order in which torch is called; of a fake, without a GPU."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from hardpoint.builtin_plugins.ops import cuda_graphs
from hardpoint.builtin_plugins.ops.cuda_graphs import CudaGraphs, RepeatedRun, decode_sizes


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (4, [1, 2, 4]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
        (1000, [1, 2, 4, *range(8, 257, 8)]),
    ],
)
def test_sizes_are_few_and_end_with_the_most(most, sizes):
    assert decode_sizes(most) == sizes


class Cuda:
    """Records its calls."""

    def __init__(self):
        self.calls, self.stream_now = [], "default"
        self.reserved = 0
        self.has_ended = False
        self.pools = itertools.count(1)

    def stream(self, stream):
        return self._during(f"stream {stream.name}", stream.name)

    def graph(self, graph, *, pool, stream, capture_error_mode):
        mode = f"capture in {pool} on {stream.name} ({capture_error_mode})"
        return self._during(mode, stream.name, keeps=True)

    @contextlib.contextmanager
    def _during(self, operation, name, *, keeps=False):
        self.calls.append(operation)
        before, self.stream_now = self.stream_now, name
        yield
        if keeps:  # as torch does, a failed capture leaves its stream
            self.reserved += 20
        self.stream_now = before

    def end_allocate(self, index, pool):
        self.calls.append(f"allocations leave {pool} of device {index}")
        if self.has_ended:
            raise RuntimeError("not currently recording to this pool")

    def set_stream(self, stream):
        self.stream_now = stream.name

    def current_stream(self, device):
        return self._stream(self.stream_now)

    def _stream(self, name):
        wait = self.calls.append
        return SimpleNamespace(
            name=name, wait_stream=lambda other: wait(f"{name} waits for {other.name}")
        )

    def namespace(self):
        return SimpleNamespace(
            device=lambda device: contextlib.nullcontext(),
            Stream=lambda device: self._stream("side"),
            graph_pool_handle=lambda: f"pool {next(self.pools)}",
            current_stream=self.current_stream,
            set_stream=self.set_stream,
            stream=self.stream,
            graph=self.graph,
            synchronize=lambda device: self.calls.append("synchronize"),
            empty_cache=lambda: None,
            current_device=lambda: 3,
            memory_reserved=lambda device: self.reserved,
            CUDAGraph=lambda: SimpleNamespace(replay=lambda: self.calls.append("replay")),
        )


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    hidden = SimpleNamespace(_cuda_endAllocateToPool=fake.end_allocate)
    torch_like = SimpleNamespace(cuda=fake.namespace(), _C=hidden)
    monkeypatch.setattr(cuda_graphs, "torch", torch_like)
    return fake


def test_operations_run_once_before_they_are_captured_on_the_same_stream(cuda):
    result = torch.zeros(2)

    def run():
        cuda.calls.append(f"run on {cuda.stream_now}")
        return result

    recorded = CudaGraphs(torch.device("cpu")).record(run)
    assert cuda.calls == [
        "side waits for default",
        "stream side",
        "run on side",
        "default waits for side",
        "synchronize",
        "capture in pool 1 on side (thread_local)",
        "run on side",
    ]
    # The driver keeps something that torch does not count; what else is free is others' as well.
    assert recorded.num_bytes == 20 + (8 << 20)
    assert recorded() is result
    assert cuda.calls[-1] == "replay"
    assert cuda.stream_now == "default"


def test_graphs_share_a_pool_while_one_of_them_is_there(cuda):
    graphs = CudaGraphs(torch.device("cpu"))
    first = graphs.record(lambda: torch.zeros(2))
    second = graphs.record(lambda: torch.zeros(2))
    del first
    third = graphs.record(lambda: torch.zeros(2))
    del second, third
    graphs.record(lambda: torch.zeros(2))
    pools = [call.split()[3] for call in cuda.calls if call.startswith("capture")]
    assert pools == ["1", "1", "1", "2"]


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_capture_that_fails_leaves_no_stream(cuda, has_ended):
    cuda.has_ended = has_ended
    runs = []

    def run():
        runs.append(1)
        if len(runs) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(2)

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphs(torch.device("cpu")).record(run)
    assert cuda.stream_now == "default"
    assert cuda.calls[-1] == "allocations leave pool 1 of device 3"


def test_repeated_python_gives_its_result_in_the_same_tensor():
    x = torch.ones(3)
    repeated = RepeatedRun(lambda: x * 2)
    first = repeated()
    x.fill_(5)
    assert repeated() is first
    assert first.tolist() == [10, 10, 10]
    assert repeated.num_bytes == 12
