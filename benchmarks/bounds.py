"""How fast the machine could run the demo model at most: its limits, and the bound of a load.

    python benchmarks/bounds.py

Measured are reads of memory by all cores, and matrix products of the model's sizes: by oneDNN with
packed weights where the processor has its instructions for the dtype, by torch otherwise. A step of
a load takes at least

    max(FLOP of its matrix products / FLOP per second, bytes of weights / bytes per second)
    + bytes of keys and values that it reads / bytes per second

and a load is bounded by the steps of an ideal schedule: all prompts, then one token per unfinished
request and step. What requests share is computed, and read, once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

_ROWS = (512, 2048)
_READ_BYTES = 1 << 29
_SECONDS = 0.4  # for which a call is repeated


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model of the Llama architecture."""

    layers: int
    linears: tuple[tuple[int, int], ...]  # (rows, columns) of the matrices of a layer
    head: tuple[int, int]  # (rows, columns) of the matrix that gives logits
    kv_bytes: int  # size of a token's keys and values, all layers

    @classmethod
    def read(cls, folder: Path) -> ModelSize:
        """Read the sizes from a checkpoint's config."""
        config = json.loads((folder / "config.json").read_text())
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size = config.get("head_dim") or hidden // heads
        layers, queries = config["num_hidden_layers"], heads * size
        attention = ((queries + 2 * kv_heads * size, hidden), (hidden, queries))
        linears = (*attention, (2 * inner, hidden), (hidden, inner))
        return cls(layers, linears, (config["vocab_size"], hidden), layers * 4 * kv_heads * size)

    @property
    def layer_weights(self) -> int:
        """The number of weights of all layers."""
        return self.layers * sum(rows * columns for rows, columns in self.linears)

    @property
    def head_weights(self) -> int:
        """The number of weights of the head."""
        return self.head[0] * self.head[1]


@dataclass(frozen=True)
class Machine:
    """The measured rates of a machine."""

    read: float  # bytes per second, all cores
    gemm: dict[str, float]  # FLOP per second by dtype

    def better(self, other: Machine) -> Machine:
        """Return the better of two measurements."""
        gemm = {dtype: max(rate, other.gemm[dtype]) for dtype, rate in self.gemm.items()}
        return Machine(max(self.read, other.read), gemm)

    def __str__(self) -> str:
        """Return a line for a table's title."""
        rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in self.gemm.items())
        return f"memory reads {self.read / 1e9:.1f} GB/s; matrix products {rates}"


def measure(size: ModelSize) -> Machine:
    """Measure this machine; takes some seconds."""
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    with torch.inference_mode():
        return Machine(read_rate(), {name: _gemm_rate(size, d) for name, d in dtypes.items()})


def read_rate() -> float:
    """Return the bytes per second that torch's threads read."""
    data = torch.ones(_READ_BYTES // 4)
    table, vector = data.view(-1, 8192), torch.ones(8192)
    ways: list[Callable[[], object]] = [data.sum, data.max, lambda: table @ vector]
    return max(_READ_BYTES / _best_seconds(way) for way in ways)


def _gemm_rate(size: ModelSize, dtype: torch.dtype) -> float:
    weights = [torch.rand(shape).to(dtype) - 0.5 for shape in size.linears]
    flop = 2 * sum(weight.numel() for weight in weights)
    rates = []
    for rows in _ROWS:
        layer = [
            (torch.rand(rows, weight.shape[1]).to(dtype) - 0.5, prepared(weight, rows))
            for weight in weights
        ]
        seconds = _best_seconds(lambda layer=layer: [multiply(x) for x, multiply in layer])
        rates.append(rows * flop / seconds)
    return max(rates)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed weights of a dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    is_bfloat16 = dtype == torch.bfloat16
    return not is_bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def prepared(weight: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that multiplies a number of rows by a weight, by the fastest library."""
    if not can_pack(weight.dtype):
        return lambda x: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: linear(x, packed, None, "none", [], "")


def _best_seconds(call: Callable[[], object]) -> float:
    call()
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds) < _SECONDS:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def bound_seconds(
    machine: Machine, size: ModelSize, lengths: list[tuple[int, int]], shared: int = 0
) -> float:
    """Return the least seconds of requests with (prompt, output) tokens, some of them shared."""
    num_prompt = shared + sum(prompt - shared for prompt, _ in lengths)
    seconds = _products(machine, size, num_prompt, len(lengths))
    for step in range(1, max(output for _, output in lengths)):
        # The token that a step computes attends to itself, which need not be read.
        contexts = [prompt - shared + step - 1 for prompt, output in lengths if output > step]
        seconds += _products(machine, size, len(contexts), len(contexts))
        seconds += (shared + sum(contexts)) * size.kv_bytes / machine.read
    return seconds


def _products(machine: Machine, size: ModelSize, tokens: int, rows: int) -> float:
    """Return the least seconds of the matrix products of a step with `rows` rows of logits.

    The fastest dtype counts: bf16 weights can be widened.
    """
    flop = 2 * (tokens * size.layer_weights + rows * size.head_weights)
    num_bytes = 2 * (size.layer_weights + size.head_weights)
    return max(flop / max(machine.gemm.values()), num_bytes / machine.read)


if __name__ == "__main__":
    from engines import exported

    with exported(None) as folder:
        print(measure(ModelSize.read(folder / "checkpoint")))
