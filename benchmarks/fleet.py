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
from options import options_of, save, show_table
from plots import draw_fleets

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


def show(results: list[dict[str, Any]]) -> None:
    """Print the figures as a table."""
    rows = []
    for result in results:
        ttft, tpot = result["ttft"], result["tpot"]
        has_choice = result["engines"] > 1
        rows.append([
            f"{result['engines']} {result['balancer']}",
            result["finished"],
            f"{result['reuse']:.1%}",
            f"{1e3 * ttft['p50']:.0f}, {1e3 * ttft['p99']:.0f} ms",
            f"{1e3 * tpot['p50']:.1f}, {1e3 * tpot['p99']:.1f} ms",
            f"{result['goodput_share']:.1%}",
            f"{result['imbalance']:.2f}",
            f"{result['load_variation']:.2f}",
            f"{result['decisions']['p50']:.1f}" if has_choice else "-",
            f"{result['virtual_seconds']:.0f}",
            f"{result['real_seconds']:.0f}",
        ])  # fmt: skip
    heads = ("engines", "requests", "reuse", "TTFT p50, p99", "TPOT p50, p99", "within SLO")
    heads += ("max/mean", "variation", "us/decision", "virtual s", "real s")
    show_table("simulated fleets", heads, rows, width=160)


def main() -> None:
    """Parse arguments and run."""
    options = options_of(
        __doc__,
        balancers=(list(BALANCERS), "names or FQCNs"),
        engines=[1, 4, 64, 1000],
        load=("hot", ", ".join(LOADS)),
        rate=(PER_ENGINE, "per engine and second"),
        requests=(int, "default: 2000 per engine, at most 100000"),
        blocks=(4096, "of 16 tokens, of each cache"),
        trace=(Path, "a file of Mooncake's form, instead of --load"),
        bailian=(False, "--trace is of Bailian's form"),
        processes=(2, "runs at the same time"),
        earlier=(list[Path], "files of --json to add"),
        plot=(Path, "also draw them, as SVG"),
    )
    cases = [(name, size) for size in options.engines for name in options.balancers]
    with ProcessPoolExecutor(
        options.processes, get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        running = [pool.submit(run, options, *case) for case in cases]
        results = [
            result for file in options.earlier or () for result in json.loads(file.read_text())
        ]
        results += [future.result() for future in running]
    show(results)
    save(options.json, results)
    if options.plot:
        options.plot.write_text(draw_fleets(results))


if __name__ == "__main__":
    main()
