"""Offline throughput of Hardpoint and of the installed peers, side by side in one run.

    python benchmarks/offline.py                          # all loads, all installed peers
    python benchmarks/offline.py --loads mixed shared --peers vllm --rounds 3 --json result.json
    python benchmarks/offline.py --python vllm=/opt/vllm/bin/python
    python benchmarks/offline.py --loads short --rounds 1 --peers   # whether it runs

Each engine loads the same bf16 weights in its own process (llama.cpp and hardpoint-gguf: the GGUF
file, in 4 bits; hardpoint-int8 quantizes the bf16 weights; with `-rounded`, activations have 8 bits
in products), and may live in an environment of its own: `--python` names its interpreter. The
processes stay up and take turns: load by load, round by round. Printed are medians of output tokens
per second (prefill: prompt tokens per second), how many times as fast Hardpoint is, and the share
of the bound that the machine sets, which is measured in the same run (benchmarks/bounds.py explains
how).

No engine makes text. Prefix caching is on where there is any; every prompt is random, so that
prompts share nothing with other loads and rounds, and with each other only in the load `shared`.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from bounds import Machine, ModelSize, bound_seconds, measure
from engines import PEER_OPTIONS, PEERS, choose, exported, opened, take_turns
from loads import LOADS, Load
from options import options_of, save, show_table

Speeds = dict[str, dict[str, list[float]]]
"""Tokens per second of each round, by load and engine."""


def compare(pythons: dict[str, str], loads: list[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Measure the machine and the engines."""
    size = ModelSize.read(folder / "checkpoint")
    machine = measure(size)
    speeds: Speeds = {}
    with opened({name: PEERS[name] for name in pythons}, folder, pythons) as engines:
        for name in loads:
            answers = take_turns(engines, LOADS[name].rounds(name, rounds))
            speeds[name] = {
                engine: [LOADS[name].tokens / answer["seconds"] for answer in listed]
                for engine, listed in answers.items()
            }
            medians = (f"{e} {statistics.median(s):.0f}" for e, s in speeds[name].items())
            print(f"{name}: {', '.join(medians)} tokens per second", flush=True)
        about = {e.name: {**e.about, "start_seconds": e.start_seconds} for e in engines.values()}
    machine = machine.better(measure(size))
    return {
        "rounds": rounds,
        "cores": len(os.sched_getaffinity(0)),
        "machine": {"read": machine.read, "gemm": machine.gemm},
        "bounds": {name: _bound(machine, size, LOADS[name]) for name in loads},
        "engines": about,
        "tokens_per_second": {e: {load: speeds[load][e] for load in loads} for e in about},
        "ratios": {load: _ratios(listed) for load, listed in speeds.items()},
    }


def _bound(machine: Machine, size: ModelSize, load: Load) -> float:
    return load.tokens / bound_seconds(machine, size, load.lengths(), load.shared)


def _ratios(speeds: dict[str, list[float]]) -> dict[str, float]:
    """Return Hardpoint's speed over each peer's: medians of the ratios of the rounds.

    Peers that read the GGUF file are compared with Hardpoint on it, if that runs. Hardpoint with
    other weights is compared with Hardpoint in bf16, the other way round.
    """
    ratios = dict[str, float]()
    for name, listed in speeds.items():
        is_own = name.startswith("hardpoint-")
        has_gguf = PEERS[name].gguf and "hardpoint-gguf" in speeds
        base = "hardpoint-gguf" if has_gguf and not is_own else "hardpoint"
        if name != base:
            pairs = zip(speeds[base], listed, strict=True)
            ratios[name] = statistics.median(
                other / speed if is_own else speed / other for speed, other in pairs
            )
    return ratios


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    rows = []
    for load, bound in result["bounds"].items():
        cells = [f"{load}: {LOADS[load]}", f"{bound:.0f}"]
        for engine, speeds in result["tokens_per_second"].items():
            speed = statistics.median(speeds[load])
            ratio = result["ratios"][load].get(engine)
            times = "" if ratio is None else f"({ratio:.2f}x) "
            share = "" if PEERS[engine].low_bit else f"{speed / bound:.0%}"
            cells.append(f"{speed:.0f} {times}{share}".rstrip())
        rows.append(cells)
    title = (
        f"tokens per second (Hardpoint is this many times as fast; with other weights, times as "
        f"fast as in bf16) share of the bound of bf16; {result['cores']} cores, medians of "
        f"{result['rounds']}"
    )
    show_table(title, ("load", "bound", *result["engines"]), rows)
    print(f"bounds: {Machine(**result['machine'])}")


def main() -> None:
    """Parse arguments and run."""
    loads = [name for name in LOADS if name != "short"]
    arguments = options_of(__doc__, rounds=3, loads=(loads, ", ".join(LOADS)), **PEER_OPTIONS)
    pythons = choose(arguments)
    with exported(arguments.folder) as folder:
        result = compare(pythons, arguments.loads, arguments.rounds, folder)
    show(result)
    save(arguments.json, result)


if __name__ == "__main__":
    main()
