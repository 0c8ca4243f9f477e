"""Balancers compared on simulated fleets: reuse, latency, imbalance, and the time of a decision.

    python benchmarks/fleet.py --engines 1 4 64 --json fleet.json
    python benchmarks/fleet.py --engines 1000 --requests 20000 --earlier fleet.json --plot fleet.svg
    python benchmarks/fleet.py --load mooncake --engines 4 --requests 12031 --blocks 16384
    python benchmarks/fleet.py --trace conversation_trace.jsonl --engines 8 --blocks 16384
    python benchmarks/fleet.py --load plain --engines 64 --balancers two_choices --requests 100000

Schedulers, KV caches, eviction, balancers and the reports of engines are the real ones, on a
virtual clock (`hardpoint.simulation`); the time of a step is that of STEP_COST. All figures but
the times of decisions and of the run are the same in every run.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
from plots import draw_fleets
from rich.console import Console
from rich.table import Table

from hardpoint.plugins import StepCost
from hardpoint.simulation import (
    Fleet,
    Lengths,
    Objective,
    SimulatedRequest,
    SyntheticLoad,
    read_bailian,
    read_mooncake,
)

BALANCERS = ("least_cost", "two_choices", "round_robin")
STEP_COST = StepCost(
    step=6.0,
    single_query=0.02,
    context_token=0.00004,
    prompt=0.1,
    prompt_token=0.035,
    prompt_pair=1.3e-6,
    is_trained=True,
)
"""About what a model of 8 billion parameters in bfloat16 takes on a GPU with 3.35 TB/s."""

PER_ENGINE = 8.0
"""Requests per second and engine of the load `hot`."""

LOADS = {
    # A third of the prompt is a text of its own; the hot prefixes do not fit one engine's cache.
    "hot": SyntheticLoad(
        prompt=Lengths(median=512, sigma=0.7),
        output=Lengths(median=64, sigma=0.6),
        hot_prefixes=256,
        hot_tokens=2048,
        zipf=1.0,
        turns=2.0,
        think_seconds=5.0,
    ),
    "plain": SyntheticLoad(prompt=Lengths(median=512), output=Lengths(median=64)),
    # The means of Mooncake's conversation trace: 12,035 tokens in, 343 out, 40 % reusable, 12,031
    # requests in an hour.
    "mooncake": SyntheticLoad(
        rate=3.34,
        prompt=Lengths(median=4380, sigma=1.0),
        output=Lengths(median=249, sigma=0.8),
        hot_prefixes=1,
        hot_tokens=512,
        turns=1.57,
        think_seconds=60.0,
    ),
}


def requests_of(arguments: argparse.Namespace, num_engines: int) -> Iterable[SimulatedRequest]:
    """Return the requests of a run."""
    if arguments.trace:
        read = read_bailian if arguments.bailian else read_mooncake
        return read(arguments.trace)[: arguments.requests]
    load = LOADS[arguments.load]
    count = arguments.requests or min(2000 * num_engines, 100_000)
    rate = load.rate if arguments.load == "mooncake" else arguments.rate * num_engines
    return msgspec.structs.replace(load, requests=count, rate=rate).generate()


def run(arguments: argparse.Namespace, balancer: str, num_engines: int) -> dict[str, Any]:
    """Return the figures of a balancer and a number of engines."""
    fleet = Fleet(
        {
            "parallel": {"data": num_engines, "balancer": balancer},
            "kv_cache": {"num_blocks": arguments.blocks},
        },
        step_cost=STEP_COST,
        objective=Objective(ttft=1.0, tpot=0.05),
    )
    gc.freeze()  # thousands of caches, which no collection has to walk
    began = time.perf_counter()
    report = fleet.run(requests_of(arguments, num_engines))
    seconds = time.perf_counter() - began
    decisions = fleet.decision_times()
    fleet.close()
    figures: dict[str, Any] = msgspec.to_builtins(report)
    return {**figures, "real_seconds": seconds, "decisions": msgspec.to_builtins(decisions)}


def table(results: list[dict[str, Any]]) -> Table:
    """Return the figures as a table."""
    found = Table(title="simulated fleets", show_edge=False)
    for name in ("engines", "balancer", "requests", "reuse", "TTFT p50, p99", "TPOT p50, p99"):
        found.add_column(name, justify="left" if name == "balancer" else "right")
    for name in ("within SLO", "max/mean", "variation", "us/decision", "virtual s", "real s"):
        found.add_column(name, justify="right")
    for one in results:
        ttft, tpot = one["ttft"], one["tpot"]
        found.add_row(
            str(one["engines"]),
            one["balancer"],
            str(one["finished"]),
            f"{100 * one['reuse']:.1f} %",
            f"{1e3 * ttft['p50']:.0f}, {1e3 * ttft['p99']:.0f} ms",
            f"{1e3 * tpot['p50']:.1f}, {1e3 * tpot['p99']:.1f} ms",
            f"{100 * one['goodput_share']:.1f} %",
            f"{one['imbalance']:.2f}",
            f"{one['load_variation']:.2f}",
            f"{one['decisions']['p50']:.1f}" if one["engines"] > 1 else "-",
            f"{one['virtual_seconds']:.0f}",
            f"{one['real_seconds']:.0f}",
        )
    return found


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--balancers", nargs="*", default=list(BALANCERS), help="names or FQCNs")
    parser.add_argument("--engines", nargs="*", type=int, default=[1, 4, 64, 1000])
    parser.add_argument("--load", choices=LOADS, default="hot")
    parser.add_argument("--rate", type=float, default=PER_ENGINE, help="per engine and second")
    parser.add_argument("--requests", type=int, help="2000 per engine, at most 100000")
    parser.add_argument("--blocks", type=int, default=4096, help="of 16 tokens, of each cache")
    parser.add_argument("--trace", type=Path, help="a file of Mooncake's form, instead of --load")
    parser.add_argument("--bailian", action="store_true", help="--trace is of Bailian's form")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time")
    parser.add_argument(
        "--earlier", nargs="*", type=Path, default=[], help="files of --json to add"
    )
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--plot", type=Path, help="also draw them, as SVG")
    arguments = parser.parse_args()
    cases = [(name, size) for size in arguments.engines for name in arguments.balancers]
    with ProcessPoolExecutor(
        arguments.processes, get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        running = [pool.submit(run, arguments, *case) for case in cases]
        earlier = [one for file in arguments.earlier for one in json.loads(file.read_text())]
        results = earlier + [one.result() for one in running]
    Console(width=160).print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))
    if arguments.plot:
        arguments.plot.write_text(draw_fleets(results))


if __name__ == "__main__":
    main()
