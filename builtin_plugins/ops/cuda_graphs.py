"""Operations recorded as CUDA graphs, and a replacement for interpreted kernels."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

_SMALL_SIZES = (1, 2, 4)
_STEP, _LARGEST = 8, 256
_DRIVER_BYTES = 8 << 20  # that the driver keeps of a graph's kernels, about


def decode_sizes(max_num_seqs: int) -> Sequence[int]:
    """Return the sizes of recorded decode steps: 1, 2, 4, multiples of 8 up to 256, and the most.

    Args:
        max_num_seqs: the most sequences that a step has.
    """
    limit = min(max_num_seqs, _LARGEST)
    sizes = {size for size in (*_SMALL_SIZES, *range(_STEP, limit + 1, _STEP)) if size <= limit}
    return sorted(sizes | {limit})


class CudaGraph:
    """A CUDA graph, and the tensor with its result.

    Attributes:
        num_bytes: bytes of device memory that it takes, including what the driver may keep.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, result: torch.Tensor, num_bytes: int) -> None:
        self._graph = graph
        self._result = result
        self.num_bytes = num_bytes

    def __call__(self) -> torch.Tensor:
        """Replay the graph on the current stream; return its result."""
        self._graph.replay()
        return self._result


class CudaGraphs:
    """Records operations as CUDA graphs of one memory pool; one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # a handle of a type without a public name
        self._alive: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def record(self, run: Callable[[], torch.Tensor]) -> CudaGraph:
        """Run operations, then capture them.

        They run on the stream that captures, so that kernels are compiled and loaded and libraries
        have their workspaces before it does.

        Raises:
            RuntimeError: an operation cannot be captured, or memory is short.
        """
        cuda, device = torch.cuda, self._device
        with cuda.device(device):
            if self._stream is None:
                self._stream = cuda.Stream(device)  # type: ignore[no-untyped-call]
            if not self._alive:  # a pool ends with its last graph
                self._pool = cuda.graph_pool_handle()
            stream, current = self._stream, cuda.current_stream(device)
            stream.wait_stream(current)
            with cuda.stream(stream):
                run()
            current.wait_stream(stream)
            cuda.synchronize(device)
            cuda.empty_cache()  # as `graph` does, which would look like memory that it frees
            reserved = cuda.memory_reserved(device)
            graph = cuda.CUDAGraph()
            try:
                # Other threads may call CUDA in the meantime.
                with cuda.graph(
                    graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
                ):
                    result = run()
            except BaseException:
                self._end_capture()
                raise
            finally:
                cuda.set_stream(current)  # `graph` leaves its own where a capture fails
            # Not the free memory of the device: other processes take and release some as well.
            num_bytes = _DRIVER_BYTES + max(cuda.memory_reserved(device) - reserved, 0)
        recorded = CudaGraph(graph, result, num_bytes)
        self._alive.add(recorded)
        return recorded

    def _end_capture(self) -> None:
        # `graph` does not, and later allocations would stay in the pool.
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)  # without a public name
        device = self._device
        index = torch.cuda.current_device() if device.index is None else device.index
        if end is not None:
            with contextlib.suppress(Exception):  # it has ended
                end(index, self._pool)


class RepeatedRun:
    """Repeats operations by running Python, for devices without CUDA graphs.

    Attributes:
        num_bytes: bytes of the result.
    """

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run
        self._result = run()
        self.num_bytes = self._result.nbytes

    def __call__(self) -> torch.Tensor:
        """Run the operations; return their result, in the same tensor."""
        return self._result.copy_(self._run())
