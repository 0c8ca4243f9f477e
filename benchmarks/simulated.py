"""Simulated requests next to measured ones: three loads under four policies, on a real model.

    python benchmarks/simulated.py --runs 3 --json simulated.json
    python benchmarks/simulated.py --loads chat --policies fcfs fair --requests 20

Each request is sent at its time to an AsyncLLM with an engine process, whether or not those before
it have ended, and the same requests are simulated with the cost of a calibration. Each turn
calibrates the model and then runs each policy once, because the speed of a machine may change. The
spread is that of the runs, (greatest - smallest) / median; the error is that of the median of the
simulations against the median of the runs. The load of the machine is printed, because other
programs make steps slower than during the calibration.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from options import options_of, save, show_table

from hardpoint import AsyncLLM, SamplingParams
from hardpoint.plugins import EngineConfig
from hardpoint.simulation import Lengths, SimulatedRequest, SyntheticLoad, simulate
from hardpoint.simulation.runs import SimulatedLoad
from hardpoint.typed import convert

POLICIES = ("fcfs", "priority", "fair", "shortest_first")

LOADS = {
    # Short prompts with a beginning that others share, as many as the engine can just answer.
    "chat": SyntheticLoad(
        requests=60,
        rate=4.0,
        prompt=Lengths(median=48, sigma=0.5),
        output=Lengths(median=24, sigma=0.5),
        hot_prefixes=4,
        hot_tokens=64,
        tenants=4,
        tenant_zipf=2.0,
        priorities=3,
    ),
    # Long prompts of many lengths, more than it can answer for a while.
    "documents": SyntheticLoad(
        requests=40,
        rate=3.0,
        prompt=Lengths(median=160, sigma=0.9),
        output=Lengths(median=12, sigma=0.4),
        tenants=3,
        priorities=3,
        seed=1,
    ),
    # Long answers, which run side by side.
    "answers": SyntheticLoad(
        requests=40,
        rate=2.5,
        prompt=Lengths(median=24, sigma=0.4),
        output=Lengths(median=80, sigma=0.5),
        tenants=3,
        priorities=3,
        seed=2,
    ),
}
TIMES = ("ttft", "tpot", "e2e")
GOALS = {"p50": 0.05, "p95": 0.10}
MAX_NUM_SEQS, MAX_MODEL_LEN, NUM_BLOCKS = 8, 4096, 2048
Figures = dict[str, float]
"""Seconds by time and statistic, such as `ttft.p50`."""


def calibrated(file: Path, options: argparse.Namespace) -> Path:
    """Calibrate the model as the runs configure it."""
    command = [sys.executable, "-m", "hardpoint", "calibrate", options.model]
    command += ["--output", str(file), "--seconds", str(options.seconds)]
    for setting in (
        f"executor.threads={options.threads}",
        f"scheduler.max_num_seqs={MAX_NUM_SEQS}",
        f"max_model_len={MAX_MODEL_LEN}",
        f"kv_cache.num_blocks={NUM_BLOCKS}",
    ):
        command += ["--set", setting]
    subprocess.run(command, check=True)
    return file


def config_of(policy: str) -> dict[str, Any]:
    """Return the configuration of real and simulated engines."""
    limits = {"max_num_seqs": MAX_NUM_SEQS, "step_milliseconds": 150.0}
    return {
        "scheduler": {"policy": policy, **limits},
        "kv_cache": {"num_blocks": NUM_BLOCKS},
        "max_model_len": MAX_MODEL_LEN,
        "stats": {"sinks": []},
    }


async def warm_up(llm: AsyncLLM, number: int) -> None:
    """Run a request that is longer than the requests with smaller numbers."""
    params = SamplingParams(max_tokens=12 * number, ignore_eos=True, temperature=0.0)
    async for _ in llm.generate({"prompt_token_ids": [50 + number] * (8 + 8 * number)}, params):
        pass


async def send(
    llm: AsyncLLM, start: float, request: SimulatedRequest, *, has_priority: bool
) -> tuple[float, float, float]:
    """Send a request at its time; return its time to the first token, TPOT, and time to the end."""
    ids = [  # equal segments are equal tokens
        token
        for segment in request.prompt
        for token in random.Random(segment.id).choices(range(256), k=segment.length)
    ]
    params = SamplingParams(max_tokens=request.output.length, ignore_eos=True, temperature=0.0)
    more = {"tags": dict(request.tags), "priority": request.priority if has_priority else 0}
    await asyncio.sleep(start + request.at - time.perf_counter())
    sent, first = time.perf_counter(), 0.0
    async for _ in llm.generate({"prompt_token_ids": ids}, params, **more):
        first = first or time.perf_counter()
    last = time.perf_counter()
    further = request.output.length - 1
    return first - sent, (last - first) / further if further else np.nan, last - sent


async def measure(
    policy: str, requests: list[SimulatedRequest], options: argparse.Namespace
) -> Figures:
    """Return the figures of a real run."""
    config = {**config_of(policy), "executor": {"threads": options.threads}}
    llm = AsyncLLM(options.model, config=config)
    try:
        # Twelve steps of each size, for the first ones take longer: the engine records them.
        for _ in range(2):
            await asyncio.gather(*(warm_up(llm, number + 1) for number in range(MAX_NUM_SEQS)))
        start, has_priority = time.perf_counter() + 0.5, policy == "priority"
        times = await asyncio.gather(
            *(send(llm, start, request, has_priority=has_priority) for request in requests)
        )
    finally:
        await llm.aclose()
    percentiles = {}
    for name, values in zip(TIMES, zip(*times, strict=True), strict=True):
        for percent in (50, 95):
            percentiles[f"{name}.p{percent}"] = float(np.nanpercentile(values, percent))
        percentiles[f"{name}.mean"] = float(np.nanmean(values))
    return percentiles


def simulated(load: SyntheticLoad, cost: Path, policies: list[str]) -> dict[str, Figures]:
    """Return the figures of simulations, by policy."""
    variants = {policy: convert(config_of(policy), EngineConfig, path="") for policy in policies}
    return {
        record["variant"]: {
            f"{name}.{key}": record["report"][name][key]
            for name in TIMES
            for key in ("p50", "p95", "mean")
        }
        for record in simulate(variants, SimulatedLoad(synthetic=load), cost=cost)
        if record["record"] == "result"
    }


def medians(runs: list[Figures]) -> Figures:
    """Return the median of each figure."""
    return {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}


def compare(
    load: str, simulations: list[dict[str, Figures]], runs: dict[str, list[Figures]]
) -> list[dict[str, Any]]:
    """Print and return measured and simulated figures, and the order of the policies."""
    measured = {policy: medians(listed) for policy, listed in runs.items()}
    predicted = {
        policy: medians([simulation[policy] for simulation in simulations]) for policy in runs
    }
    results: list[dict[str, Any]] = []
    for policy, listed in runs.items():
        for figure in (f"{name}.{key}" for name in TIMES for key in GOALS):
            values, median = [run[figure] for run in listed], measured[policy][figure]
            spread = (max(values) - min(values)) / median
            error = predicted[policy][figure] / median - 1
            goal = max(GOALS[figure.rpartition(".")[2]], spread if len(values) > 1 else 0.0)
            result = {"load": load, "policy": policy, "figure": figure, "measured": median}
            result |= {"spread": spread, "simulated": predicted[policy][figure], "error": error}
            results.append(result | {"within": abs(error) <= goal})
    rows = []
    for r in results:
        times = (f"{1e3 * r[key]:.1f}" for key in ("measured", "simulated"))
        shares = f"{r['spread']:.1%}", f"{r['error']:+.1%}"
        rows.append(
            [f"{r['policy']} {r['figure']}", *times, *shares, "" if r["within"] else "outside"]
        )
    heads = ("policy, figure", "measured, ms", "simulated, ms", "spread", "error", "")
    show_table(load, heads, rows)
    for figure in ("ttft.mean", "e2e.mean"):
        orders = [
            sorted(runs, key=lambda p: medians_by_policy[p][figure])
            for medians_by_policy in (measured, predicted)
        ]
        texts = [", ".join(order) for order in orders]
        agree = "agree" if texts[0] == texts[1] else "differ"
        print(f"{load} by {figure}: measured {texts[0]}; simulated {texts[1]}: {agree}")
        ranking = {"load": load, "ranking": figure, "measured": orders[0], "simulated": orders[1]}
        results.append(ranking)
    return results


def main() -> None:
    """Parse arguments and run."""
    options = options_of(
        __doc__,
        seconds=(40.0, "of each calibration"),
        model="smollm2",
        loads=LOADS,
        policies=list(POLICIES),
        runs=3,
        requests=(int, "of each load, instead of its own number"),
        threads=(1, "of the engine, as calibrated"),
    )
    results = []
    for name in options.loads:
        load = LOADS[name]
        load = msgspec.structs.replace(load, requests=options.requests or load.requests)
        simulations = []
        runs: dict[str, list[Figures]] = {policy: [] for policy in options.policies}
        for number in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                cost = calibrated(Path(folder, "cost.json"), options)
                simulations.append(simulated(load, cost, options.policies))
            for policy in options.policies:
                result = asyncio.run(measure(policy, list(load.generate()), options))
                runs[policy].append(result)
                print(
                    f"run {number + 1} of {name}, {policy}: TTFT p50 {result['ttft.p50']:.3f} s; "
                    f"load of the machine {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
        results += compare(name, simulations, runs)
    save(options.json, results)


if __name__ == "__main__":
    main()
