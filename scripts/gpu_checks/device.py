"""The features that only a GPU has, behind one interface with a fake for dry runs on a CPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

INTERPRETER = "TRITON_INTERPRET"
_MEASURED_SECONDS = 0.3
_GRAPH_SECONDS = 0.05

# Bytes per second of memory, and dense FLOP per second of bf16 matrix products, of data sheets.
DATA_SHEETS = {
    "NVIDIA H200": (4.8e12, 989e12),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),
    "NVIDIA H100 PCIe": (2.0e12, 756e12),
    "NVIDIA A100-SXM4-80GB": (2.039e12, 312e12),
    "NVIDIA L4": (0.3e12, 121e12),
}


AIMED = ("NVIDIA H100", "NVIDIA H200")
"""How the names of the GPUs begin for which there are aims."""


class Device(Protocol):
    """A device to check.

    Attributes:
        name: as torch names it.
        is_fake: whether it stands in for a GPU.
    """

    name: str
    is_fake: bool

    def describe(self) -> dict[str, Any]:
        """Return its name, memory, driver and compute capability."""

    def wait(self) -> None:
        """Wait until all work is done."""

    def trim(self) -> None:
        """Wait until all work is done, and empty the caches of torch."""

    def free_bytes(self) -> int:
        """Return the free memory, caches of torch emptied."""

    def room(self) -> int:
        """Return the bytes that models may take."""

    def counted_syncs(self) -> contextlib.AbstractContextManager[list[str]]:
        """Give a list that gets a line for each time that the body waits for the device."""

    def copy_rate(self) -> float:
        """Return bytes per second that a copy reads and writes."""

    def product_rate(self) -> float:
        """Return FLOP per second of a large matrix product in bf16."""

    def graph_seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the average seconds of calls that a CUDA graph repeats."""


class Gpu:
    """The first GPU."""

    name = "cuda"
    is_fake = False

    def describe(self) -> dict[str, Any]:
        """Return its name, memory, driver and compute capability."""
        properties = torch.cuda.get_device_properties(0)
        return {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "driver": _driver(),
        }

    def wait(self) -> None:
        """Wait until all work is done."""
        torch.cuda.synchronize()

    def trim(self) -> None:
        """Wait until all work is done, and empty the caches of torch."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Return the free memory, caches of torch emptied."""
        self.trim()
        return int(torch.cuda.mem_get_info()[0])

    def room(self) -> int:
        """Return the bytes that models may take, the free ones."""
        return self.free_bytes()

    @contextlib.contextmanager
    def counted_syncs(self) -> Iterator[list[str]]:
        """Give a list that gets a line for each time that the body waits for the device."""
        places: list[str] = []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode("default")
        places += [
            f"{warning.filename}:{warning.lineno}"
            for warning in seen
            if "synchronizing CUDA operation" in str(warning.message)
        ]

    def copy_rate(self) -> float:
        """Return bytes per second that a copy reads and writes."""
        source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.numel() / self._seconds(lambda: target.copy_(source))

    def product_rate(self) -> float:
        """Return FLOP per second of a large matrix product in bf16."""
        size = 8192
        left = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
        return 2 * size**3 / self._seconds(lambda: left @ left)

    def graph_seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the average seconds of calls that a CUDA graph repeats."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries get their memory before the capture
            for call in calls:
                call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        return self._seconds(graph.replay, _GRAPH_SECONDS) / len(calls)

    def _seconds(self, call: Callable[[], object], measured: float = _MEASURED_SECONDS) -> float:
        """Return the least seconds of a call, of events on the device."""
        for _ in range(3):
            call()
        best, end = float("inf"), time.perf_counter() + measured
        while time.perf_counter() < end:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            events[0].record()
            call()
            events[1].record()
            events[1].synchronize()
            best = min(best, events[0].elapsed_time(events[1]) / 1e3)
        return best


class Fake:
    """A CPU that stands in for a GPU in a dry run; its memory and speed are made up."""

    name = "cpu"
    is_fake = True

    def __init__(self) -> None:
        """Begin with made-up free memory."""
        self._free = 0

    def describe(self) -> dict[str, Any]:
        """Return that there is no GPU."""
        return {
            "gpu": None,
            "memory_gib": None,
            "compute_capability": None,
            "multiprocessors": None,
            "driver": None,
        }

    def wait(self) -> None:
        """Return: a CPU is done."""

    def trim(self) -> None:
        """Do nothing."""

    def free_bytes(self) -> int:
        """Return much, then nothing, then much again, as if an engine opened, slept and woke up."""
        self._free = (1 << 40) - self._free
        return self._free

    def room(self) -> int:
        """Return much."""
        return 1 << 40

    @contextlib.contextmanager
    def counted_syncs(self) -> Iterator[list[str]]:
        """Give a list with one line, as if the tokens were fetched."""
        places: list[str] = []
        yield places
        places.append("fake:1")

    def copy_rate(self) -> float:
        """Return 1."""
        return 1.0

    def product_rate(self) -> float:
        """Return 1."""
        return 1.0

    def graph_seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Run the calls; return 1."""
        for call in calls:
            call()
        return 1.0


def num_processes(device: Device, at_most: int) -> int:
    """Return how many processes run at once; most of their time is CPU time."""
    return 1 if device.is_fake else min(at_most, len(os.sched_getaffinity(0)))


def open_device(*, is_dry: bool) -> Device:
    """Return the GPU, or the fake of a dry run.

    Raises:
        RuntimeError: there is no GPU, or kernels would not run on it.
    """
    if is_dry:
        return Fake()
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} sees no GPU (torch.cuda.is_available() is "
            "False); --dry-run runs every part on the CPU, with tiny sizes"
        )
    import triton

    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            f"{INTERPRETER}=1 has the CPU interpret the kernels; unset it, or use --dry-run"
        )
    return Gpu()


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None where nvidia-smi does not report it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
