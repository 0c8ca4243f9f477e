"""Measures the cost of a step with several workers, next to one in this process, in one run.

    python benchmarks/executors.py [--rounds 5] [--json result.json]

Two tables. Steps: microseconds per step of the scripted model, whose forward pass costs next to
nothing, so that the executor remains: encoding, sending, waking up workers, their answers. A real
shape: output tokens per second of a random Llama, and which share of a step of rank 0 is spent in
collectives, which is mostly waiting for the other ranks.

More ranks than cores take turns on them: the line above the tables has their number.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from engines import parser_of, save
from tables import show_table

from hardpoint import LLM, SamplingParams
from hardpoint.plugins import Wrapper
from hardpoint.plugins.parallel import Communicator
from hardpoint.testing import scripted_config, write_scripted_model

RANKS = {
    "uniproc": (1, 1),
    "tensor 2": (2, 1),
    "tensor 4": (4, 1),
    "pipeline 2": (1, 2),
    "pipeline 4": (1, 4),
}
LOADS = (1, 32)
PARTS = ("steps", "shape")
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 257,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "eos_token_id": 256,
}
_TIMES = "HARDPOINT_BENCHMARK_TIMES"


class Timed(Wrapper[Communicator], Communicator):
    """Adds up the time of collectives, and writes it to a file when it is closed."""

    contract = 1
    devices = ("cpu", "cuda")

    class Options(Wrapper.Options):
        """Wraps the communicator that is measured."""

        wraps: str = "shared_memory"

    def __init__(self, context: Any) -> None:
        """Start at zero."""
        super().__init__(context)
        self._seconds, self._calls = 0.0, 0

    def _timed(self, method: str, *args: Any) -> Any:
        began = time.perf_counter()
        result = getattr(self.wrapped, method)(*args)
        self._seconds += time.perf_counter() - began
        self._calls += 1
        return result

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Time it."""
        return self._timed("all_reduce", x)  # type: ignore[no-any-return]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Time it."""
        return self._timed("all_gather", x)  # type: ignore[no-any-return]

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Time it."""
        return self._timed("broadcast", x, source)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Write the sums of rank 0."""
        if self.rank == 0 and (path := os.environ.get(_TIMES)):
            Path(path).write_text(json.dumps([self._seconds, self._calls]))
        super().close()


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, rounds=5, peers=False)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per request")
    parser.add_argument("--ranks", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the Llama")
    parser.add_argument("--layers", type=int, default=8, help="of the Llama")
    arguments = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores; ranks that are more take turns on them")
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "steps" in arguments.parts:
            scripted = scripted_config(write_scripted_model(Path(folder) / "scripted"))
            report["steps"] = _steps(scripted, arguments.ranks, arguments)
            _show_steps(report["steps"])
        if "shape" in arguments.parts:
            llama = _random_llama(Path(folder) / "llama", arguments)
            report["shape"] = _shape(llama, arguments.ranks, arguments, Path(folder) / "times")
            _show_shape(report["shape"])
    save(arguments.json, report)


def _random_llama(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write a model with random weights; return its configuration."""
    write_scripted_model(folder)
    sizes = {"hidden_size": arguments.hidden, "intermediate_size": 3 * arguments.hidden}
    config = {**_LLAMA, **sizes, "num_hidden_layers": arguments.layers}
    (folder / "config.json").write_text(json.dumps(config))
    return {"model": str(folder), "load": {"use": "dummy"}, "dtype": "float32", "device": "cpu"}


def _with_ranks(config: dict[str, Any], name: str) -> dict[str, Any]:
    tensor, pipeline = RANKS[name]
    used = "multiproc" if tensor * pipeline > 1 else "uniproc"
    parallel = {"tensor": tensor, "pipeline": pipeline}
    return {**config, "max_model_len": 256, "executor": {"use": used}, "parallel": parallel}


@contextmanager
def _engines(config: dict[str, Any], names: list[str]) -> Iterator[dict[str, LLM]]:
    """Open an engine per number of ranks."""
    with ExitStack() as stack:
        engines = {}
        for name in names:
            engines[name] = LLM(config=_with_ranks(config, name))
            stack.callback(engines[name].close)
        yield engines


def _prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 250) for _ in range(32)] for _ in range(count)]


def _seconds(
    engines: dict[str, LLM], count: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return the median seconds of a round by engine, in turns; the first round warms up."""
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for index in range(arguments.rounds + 1):
        prompts = _prompts(count, index)
        for name, engine in engines.items():
            began = time.perf_counter()
            engine.generate(prompts, params)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def _steps(
    config: dict[str, Any], names: list[str], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return microseconds per token of each request, by load and ranks.

    That is one step, but of a pipeline as many steps as it has stages, of fewer requests each.
    """
    result = {}
    with _engines(config, names) as engines:
        for count in LOADS:
            found = _seconds(engines, count, arguments)
            result[str(count)] = {n: s / arguments.tokens * 1e6 for n, s in found.items()}
    return result


def _shape(
    config: dict[str, Any], names: list[str], arguments: argparse.Namespace, times: Path
) -> dict[str, dict[str, dict[str, float]]]:
    """Return tokens per second of a Llama by load and ranks, and the share of collectives."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    with _engines(config, names) as engines:
        for count in LOADS:
            found = _seconds(engines, count, arguments)
            rates = {n: {"tokens": count * arguments.tokens / s} for n, s in found.items()}
            result[str(count)] = rates
    for name in names:
        if RANKS[name][0] > 1:
            for count in LOADS:
                result[str(count)][name] |= _collectives(config, name, count, arguments, times)
    return result


def _collectives(
    config: dict[str, Any], name: str, count: int, arguments: argparse.Namespace, times: Path
) -> dict[str, float]:
    """Return the share of collectives in the time of rank 0, and microseconds per collective."""
    os.environ[_TIMES] = str(times)
    settings = _with_ranks(config, name)
    settings["parallel"]["communicator"] = f"{__name__}:Timed"
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    try:
        with LLM(config=settings) as llm:
            began = time.perf_counter()
            for index in range(arguments.rounds):
                llm.generate(_prompts(count, index), params)
            whole = time.perf_counter() - began
        seconds, calls = json.loads(times.read_text())
    finally:
        del os.environ[_TIMES]
    return {"share": seconds / whole, "microseconds": seconds / calls * 1e6}


def _show_steps(times: dict[str, dict[str, float]]) -> None:
    rows = []
    for count, found in times.items():
        base = found.get("uniproc", min(found.values()))
        rows.append([count, *(f"{value:.0f} ({value / base:.1f}x)" for value in found.values())])
    title = "Scripted model: microseconds per token of each request"
    show_table(title, ("requests", *next(iter(times.values()))), rows)


def _show_shape(rates: dict[str, dict[str, dict[str, float]]]) -> None:
    rows = []
    for count, found in rates.items():
        base = found.get("uniproc", next(iter(found.values())))["tokens"]
        rows.append([count, *(_rate(rate, base) for rate in found.values())])
    title = "Random Llama: tokens/s (next to uniproc), share of collectives, time of each"
    show_table(title, ("requests", *next(iter(rates.values()))), rows)


def _rate(found: dict[str, float], base: float) -> str:
    text = f"{found['tokens']:.0f} ({found['tokens'] / base:.2f}x)"
    if "share" in found:
        text += f"\n{found['share']:.0%}, {found['microseconds']:.0f} us"
    return text


if __name__ == "__main__":
    # Workers import what they run by its name, which `__main__` is not.
    import executors

    executors.main()
