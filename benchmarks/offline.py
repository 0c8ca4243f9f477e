"""Offline throughput of Hardpoint and of the installed peers, side by side in one run.

    python benchmarks/offline.py                          # all loads, all installed peers
    python benchmarks/offline.py --loads mixed shared --peers vllm --rounds 3 --json result.json
    python benchmarks/offline.py --python vllm=/opt/vllm/bin/python

Each engine loads the same bf16 weights in its own process (llama.cpp and hardpoint-gguf: the GGUF
file, in 4 bits; hardpoint-int8 makes 8 bits of the bf16 weights), and may live in an environment of
its own: `--python` names its interpreter. The processes stay up and take turns: load by load, round
by round. Printed are medians of output tokens per second (prefill: prompt tokens per second), how
many times as fast Hardpoint is, and the share of the bound that the machine sets, which is measured
in the same run (benchmarks/bounds.py explains how).

No engine makes text. Prefix caching is on where there is any; every prompt is random, so that
prompts share nothing with other loads and rounds, and with each other only in the load `shared`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bounds import Machine, ModelSize, bound_seconds, measure
from engines import GGUF_ENGINES, Batch, Engine, add_arguments, choose, exported, question
from rich.console import Console
from rich.table import Table

_WARM_UP = 8  # requests of a load that warm up for it


@dataclass(frozen=True)
class Load:
    """`count` prompts of random tokens, asked for at once, each continued greedily.

    Attributes:
        prompt: the fewest and the most tokens of a prompt.
        output: the same of its continuation.
        shared: number of prompt tokens that all share.
    """

    count: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    shared: int = 0

    def lengths(self) -> list[tuple[int, int]]:
        """Return prompt and output tokens per request, the same in each round."""
        rng = random.Random(0)
        return [(rng.randint(*self.prompt), rng.randint(*self.output)) for _ in range(self.count)]

    def batch(self, seed: str, count: int | None = None) -> Batch:
        """Return the first `count` requests, with token ids that are valid in every engine."""
        rng = random.Random(seed)
        prefix = [rng.randrange(100, 40_000) for _ in range(self.shared)]
        lengths = self.lengths()[:count]
        prompts = [
            prefix + [rng.randrange(100, 40_000) for _ in range(length - self.shared)]
            for length, _ in lengths
        ]
        return Batch(prompts, [output for _, output in lengths], self.shared)

    @property
    def tokens(self) -> int:
        """The number of counted tokens: output tokens; prompt tokens if one token is generated."""
        counted = 0 if self.output == (1, 1) else 1
        return sum(pair[counted] for pair in self.lengths())

    def __str__(self) -> str:
        """Return the load as a table names it."""
        prompt, output = (_range(limits) for limits in (self.prompt, self.output))
        if self.shared:
            prompt = f"({self.shared} shared + {_range(_less(self.prompt, self.shared))})"
        return f"{self.count} x {prompt}/{output}"


def _range(limits: tuple[int, int]) -> str:
    return str(limits[0]) if limits[0] == limits[1] else f"{limits[0]}-{limits[1]}"


def _less(limits: tuple[int, int], number: int) -> tuple[int, int]:
    return limits[0] - number, limits[1] - number


LOADS = {
    "single": Load(1, (32, 32), (128, 128)),
    "batch": Load(32, (128, 128), (128, 128)),
    "prefill": Load(16, (512, 512), (1, 1)),
    "mixed": Load(128, (64, 512), (16, 256)),
    "shared": Load(64, (544, 544), (32, 32), shared=512),
}


def run_rounds(
    engines: list[Engine], loads: list[str], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Run every load in every engine, in turns; return tokens per second by engine and load."""
    speeds: dict[str, dict[str, list[float]]] = {e.name: {n: [] for n in loads} for e in engines}
    for name in loads:
        load = LOADS[name]
        for engine in engines:
            engine.ask(question(load.batch(f"{name}, first", _WARM_UP)))
        for number in range(rounds):
            batch = question(load.batch(f"{name}, {number}"))
            for engine in engines:
                speed = load.tokens / engine.ask(batch)
                speeds[engine.name][name].append(speed)
                print(f"{name}, round {number + 1}: {engine.name} {speed:.1f}", file=sys.stderr)
    return speeds


def compare(pythons: dict[str, str], loads: list[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Measure the machine and the engines."""
    size = ModelSize.read(folder / "checkpoint")
    machine = measure(size)
    engines = [Engine(name, python, folder) for name, python in pythons.items()]
    speeds = run_rounds(engines, loads, rounds)
    for engine in engines:
        engine.stop()
    machine = machine.better(measure(size))
    return {
        "rounds": rounds,
        "cores": len(os.sched_getaffinity(0)),
        "machine": {"read": machine.read, "gemm": machine.gemm},
        "bounds": {name: _bound(machine, size, LOADS[name]) for name in loads},
        "engines": {e.name: {**e.about, "start_seconds": e.start_seconds} for e in engines},
        "tokens_per_second": speeds,
        "ratios": _ratios(speeds),
    }


def _bound(machine: Machine, size: ModelSize, load: Load) -> float:
    return load.tokens / bound_seconds(machine, size, load.lengths(), load.shared)


def _ratios(speeds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Return Hardpoint's speed over each peer's: medians of the ratios of the rounds.

    Peers that read the GGUF file are compared with Hardpoint on it, if that runs. Hardpoint with
    other weights is compared with Hardpoint in bf16, the other way round.
    """
    ratios = dict[str, dict[str, float]]()
    for name, found in speeds.items():
        is_own = name.startswith("hardpoint-")
        base = "hardpoint"
        if name in GGUF_ENGINES and not is_own and "hardpoint-gguf" in speeds:
            base = "hardpoint-gguf"
        if name == base:
            continue
        ratios[name] = {
            load: statistics.median(
                other / own if is_own else own / other
                for own, other in zip(speeds[base][load], values, strict=True)
            )
            for load, values in found.items()
        }
    return ratios


def show(result: dict[str, Any]) -> None:
    """Print the table, and how each engine runs."""
    console = Console(width=120)
    machine = Machine(**result["machine"])
    table = Table(
        title=f"tokens per second (Hardpoint is this many times as fast; with other weights, times "
        f"as fast as in bf16) share of the bound of bf16; "
        f"{result['cores']} cores, medians of {result['rounds']}"
    )
    table.add_column("load", no_wrap=True)
    table.add_column("bound", justify="right")
    for name in result["tokens_per_second"]:
        table.add_column(name, justify="right")
    for load, bound in result["bounds"].items():
        cells = [f"{bound:.0f}"]
        for engine, speeds in result["tokens_per_second"].items():
            speed = statistics.median(speeds[load])
            ratio = "" if engine == "hardpoint" else f"({result['ratios'][engine][load]:.2f}x) "
            is_low_bit = engine in GGUF_ENGINES or engine == "hardpoint-int8"
            share = "" if is_low_bit else f"{speed / bound:.0%}"
            cells.append(f"{speed:.0f} {ratio}{share}".rstrip())
        table.add_row(f"{load}: {LOADS[load]}", *cells)
    console.print(table)
    console.print(f"bounds: {machine}", highlight=False)
    for name, about in result["engines"].items():
        console.print(
            f"{name} {about['version']}: {about['settings']}; "
            f"ready after {about['start_seconds']:.1f} s",
            highlight=False,
        )


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds (default 3)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    add_arguments(parser)
    arguments = parser.parse_args()
    pythons = choose(arguments)
    with exported(arguments.folder) as folder:
        result = compare(pythons, arguments.loads, arguments.rounds, folder)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
