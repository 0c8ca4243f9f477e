"""Offline throughput of Hardpoint and of the installed peers, side by side in one run.

    python benchmarks/offline.py                      # all installed peers
    python benchmarks/offline.py --peers transformers --rounds 5 --json result.json

Each engine loads the same bf16 weights in its own process (llama.cpp: the GGUF file, in 4 bits).
The processes stay up and take turns: load by load, round by round. Printed are medians of output
tokens per second (prefill: prompt tokens per second) and the ratio to each peer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Load:
    """`count` prompts of `prompt` random tokens, each continued by `output` tokens, greedily."""

    count: int
    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        """The number of counted tokens: output tokens; prompt tokens if one token is generated."""
        return self.count * (self.prompt if self.output == 1 else self.output)

    def prompts(self, seed: int) -> list[list[int]]:
        """Return token ids that are valid in every engine."""
        rng = random.Random(seed)
        return [[rng.randrange(100, 40_000) for _ in range(self.prompt)] for _ in range(self.count)]


LOADS = {
    "single": Load(1, 32, 128),
    "batch": Load(32, 128, 128),
    "prefill": Load(16, 512, 1),
}
Runner = Callable[[Load, list[list[int]]], None]


def open_hardpoint(folder: Path) -> Runner:
    """Open Hardpoint with its defaults."""
    from hardpoint import LLM, SamplingParams

    llm = LLM(str(folder), dtype="bfloat16", max_model_len=2048, progress=False)

    def run(load: Load, prompts: list[list[int]]) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=load.output, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(prompts, params)
        assert all(len(o.outputs[0].token_ids) == load.output for o in outputs)

    return run


def open_transformers(folder: Path) -> Runner:
    """Open transformers; `generate` runs one static batch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run(load: Load, prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=load.output,
                max_new_tokens=load.output,
                pad_token_id=0,
            )
        assert result.shape[1] == load.prompt + load.output

    return run


def open_vllm(folder: Path) -> Runner:
    """Open vLLM with its defaults, but on every core: on a CPU it leaves one idle."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False)

    def run(load: Load, prompts: list[list[int]]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    return run


def open_llama_cpp(folder: Path) -> Runner:  # noqa: ARG001
    """Open llama.cpp with the 4-bit GGUF instead of `folder`; prompts run one by one."""
    from llama_cpp import Llama

    llama = Llama(str(gguf_path()), n_ctx=2048, n_threads=os.cpu_count(), verbose=False)

    def run(load: Load, prompts: list[list[int]]) -> None:
        for ids in prompts:
            llama.reset()
            generated = llama.generate(ids, temp=0.0)
            for _ in range(load.output):
                next(generated)

    return run


ENGINES: dict[str, tuple[str, Callable[[Path], Runner]]] = {
    "hardpoint": ("hardpoint", open_hardpoint),
    "transformers": ("transformers", open_transformers),
    "llama-cpp-python": ("llama_cpp", open_llama_cpp),
    "vllm": ("vllm", open_vllm),
}


def gguf_path() -> Path:
    """Return the demo model's file."""
    from hardpoint.core.engine.model_files import find_files

    return find_files("smollm2").path


def export(folder: Path) -> None:
    """Write the demo model as a bf16 checkpoint that every engine reads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = gguf_path()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


class Engine:
    """An engine in its own process."""

    def __init__(self, name: str, folder: Path) -> None:
        """Start the process and wait until the engine is ready."""
        start = time.perf_counter()
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name, "--folder", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read()
        self.start_seconds = time.perf_counter() - start

    def speed(self, load: str, seed: int) -> float:
        """Run a load once; return its tokens per second."""
        assert self._process.stdin is not None
        print(json.dumps([load, seed]), file=self._process.stdin, flush=True)
        return LOADS[load].tokens / self._read()

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _read(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("hardpoint-benchmark "):
                return float(line.split()[1])
        raise SystemExit(f"{self.name} ended early; run it separately with --serve {self.name}")


def serve(name: str, folder: Path) -> None:
    """Serve as the child process: open the engine, then run the loads from standard input."""
    run = ENGINES[name][1](folder)
    run(Load(2, 16, 4), Load(2, 16, 4).prompts(0))
    print("hardpoint-benchmark 0", flush=True)
    for line in sys.stdin:
        load, seed = json.loads(line)
        prompts = LOADS[load].prompts(seed)
        start = time.perf_counter()
        run(LOADS[load], prompts)
        print(f"hardpoint-benchmark {time.perf_counter() - start}", flush=True)


def measure(names: list[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Run every load in every engine, in turns."""
    engines = [Engine(name, folder) for name in names]
    speeds: dict[str, dict[str, list[float]]] = {n: {load: [] for load in LOADS} for n in names}
    for load in LOADS:
        for number in range(rounds + 1):
            for engine in engines:
                speed = engine.speed(load, number)
                if number > 0:  # the first round warms up
                    speeds[engine.name][load].append(speed)
    for engine in engines:
        engine.stop()
    return {
        "rounds": rounds,
        "cpus": os.cpu_count(),
        "start_seconds": {engine.name: round(engine.start_seconds, 1) for engine in engines},
        "tokens_per_second": speeds,
    }


def ratios(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return Hardpoint's speed over each peer's: medians of the ratios of the rounds."""
    speeds = result["tokens_per_second"]
    return {
        peer: {
            load: statistics.median(
                own / other
                for own, other in zip(speeds["hardpoint"][load], speeds[peer][load], strict=True)
            )
            for load in LOADS
        }
        for peer in speeds
        if peer != "hardpoint"
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title="tokens per second (Hardpoint is this many times as fast)")
    table.add_column("engine")
    table.add_column("start, s", justify="right")
    for name, load in LOADS.items():
        table.add_column(f"{name} {load.count} x {load.prompt}/{load.output}", justify="right")
    for engine, speeds in result["tokens_per_second"].items():
        cells = [f"{statistics.median(values):.0f}" for values in speeds.values()]
        if engine != "hardpoint":
            found = result["ratios"][engine].values()
            cells = [f"{cell} ({ratio:.2f}x)" for cell, ratio in zip(cells, found, strict=True)]
        table.add_row(engine, f"{result['start_seconds'][engine]:.1f}", *cells)
    Console(width=100).print(table)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", nargs="*", help="default: all installed peers")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds (default 3)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.folder)
        return
    installed = [n for n, (module, _) in ENGINES.items() if importlib.util.find_spec(module)]
    peers = arguments.peers if arguments.peers is not None else installed
    if missing := set(peers) - set(installed):
        raise SystemExit(f"not installed, or unknown: {', '.join(sorted(missing))}")
    names = ["hardpoint", *(name for name in peers if name != "hardpoint")]
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder))
        result = measure(names, arguments.rounds, Path(folder))
    result["ratios"] = ratios(result)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
