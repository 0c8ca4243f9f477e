"""Simulated requests next to measured ones: three loads under four policies, on a real model.

    python benchmarks/simulated.py --runs 3 --json simulated.json
    python benchmarks/simulated.py --loads chat --policies fcfs fair --requests 20
    hardpoint calibrate --output cost.json --set executor.threads=1
    python benchmarks/simulated.py --cost cost.json --runs 1 --paced

Each request is sent at its time to an AsyncLLM with an engine process, whether or not those before
it have ended, and the same requests are simulated with the cost of a calibration. Each turn
calibrates the model and then runs each policy once, for the speed of a machine may change by the
minute; with --cost, a file is used instead. The spread is that of the runs, (greatest - smallest) /
median; the error is that of the median of the simulations against the median of the runs. The load
of the machine is printed, for neighbours make steps slower than when they were calibrated.

With --paced, the real engine runs the scripted model with the pace of the cost, which neighbours on
the machine hardly change: what is left is the error of scheduling, messages and clocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

from hardpoint import AsyncLLM, SamplingParams
from hardpoint.simulation import Lengths, Segment, SimulatedRequest, SyntheticLoad, simulate
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

FIGURES = ("ttft.p50", "ttft.p95", "tpot.p50", "tpot.p95", "e2e.p50", "e2e.p95")
GOALS = {"p50": 0.05, "p95": 0.10}


MAX_NUM_SEQS, MAX_MODEL_LEN, NUM_BLOCKS = 8, 4096, 2048


def calibrated(file: Path, arguments: argparse.Namespace) -> Path:
    """Calibrate the model as the runs configure it."""
    settings = {
        "executor.threads": arguments.threads,
        "scheduler.max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache.num_blocks": NUM_BLOCKS,
    }
    command = [sys.executable, "-m", "hardpoint", "calibrate", arguments.model]
    command += ["--output", str(file), "--seconds", str(arguments.seconds)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    subprocess.run(command, check=True)
    return file


def config_of(policy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of an engine."""
    config: dict[str, Any] = {
        "scheduler": {
            "policy": policy,
            "max_num_seqs": MAX_NUM_SEQS,
            "step_milliseconds": 150.0,
        },
        "kv_cache": {"num_blocks": NUM_BLOCKS},
        "max_model_len": MAX_MODEL_LEN,
        "executor": {"threads": arguments.threads},
        "stats": {"sinks": []},
    }
    if arguments.paced:
        config["executor"]["use"] = "hardpoint.simulation:PacedExecutor"
        config["plugin"] = {"paced_executor": {"cost": str(arguments.cost)}}
    return config


def text_of(segments: tuple[Segment, ...]) -> list[int]:
    """Return the tokens of a prompt; equal segments are equal tokens."""
    return [
        token
        for segment in segments
        for token in random.Random(segment.id).choices(range(256), k=segment.length)
    ]


async def warm_up(llm: AsyncLLM, number: int) -> None:
    """Run a request that is longer than those with smaller numbers."""
    params = SamplingParams(max_tokens=12 * number, ignore_eos=True, temperature=0.0)
    async for _ in llm.generate({"prompt_token_ids": [50 + number] * (8 + 8 * number)}, params):
        pass


async def measure(
    policy: str, requests: list[SimulatedRequest], arguments: argparse.Namespace
) -> dict[str, float]:
    """Return the figures of a real run."""
    times: list[tuple[float, float, float]] = []  # of each request: to the first token, TPOT, all

    async def send(llm: AsyncLLM, start: float, request: SimulatedRequest) -> None:
        prompt = {"prompt_token_ids": text_of(request.prompt)}
        params = SamplingParams(max_tokens=request.output.length, ignore_eos=True, temperature=0.0)
        await asyncio.sleep(start + request.at - time.perf_counter())
        priority = request.priority if policy == "priority" else 0
        sent, first = time.perf_counter(), 0.0
        async for _ in llm.generate(prompt, params, tags=dict(request.tags), priority=priority):
            first = first or time.perf_counter()
        last = time.perf_counter()
        further = request.output.length - 1
        times.append((first - sent, (last - first) / further if further else np.nan, last - sent))

    model = "scripted" if arguments.paced else arguments.model
    llm = AsyncLLM(model, config=config_of(policy, arguments))
    try:
        # Twelve steps of each size, for the first ones take longer: the engine records them.
        for _ in range(2):
            await asyncio.gather(*(warm_up(llm, number + 1) for number in range(MAX_NUM_SEQS)))
        start = time.perf_counter() + 0.5
        await asyncio.gather(*(send(llm, start, request) for request in requests))
    finally:
        await llm.aclose()
    found = {}
    for name, values in zip(("ttft", "tpot", "e2e"), zip(*times, strict=True), strict=True):
        for percent in (50, 95):
            found[f"{name}.p{percent}"] = float(np.nanpercentile(values, percent))
        found[f"{name}.mean"] = float(np.nanmean(values))
    return found


def simulated(
    load: SyntheticLoad, cost: Path, arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return the same figures of simulations, by policy."""
    from hardpoint.plugins import EngineConfig

    variants = {}
    for policy in arguments.policies:
        config = config_of(policy, arguments)
        del config["executor"]
        config.pop("plugin", None)
        variants[policy] = convert(config, EngineConfig, path="")
    found = {}
    for record in simulate(variants, SimulatedLoad(synthetic=load), cost=cost):
        if record["record"] == "result":
            report = record["report"]
            found[record["variant"]] = {
                f"{name}.{key}": report[name][key]
                for name in ("ttft", "tpot", "e2e")
                for key in ("p50", "p95", "mean")
            }
    return found


def compare(
    name: str,
    simulations: list[dict[str, dict[str, float]]],
    runs: dict[str, list[dict[str, float]]],
) -> list[dict[str, Any]]:
    """Print measured and simulated figures of a load; return them."""
    predicted = {
        policy: {
            figure: statistics.median(one[policy][figure] for one in simulations)
            for figure in simulations[0][policy]
        }
        for policy in runs
    }
    rows = []
    for policy, found in runs.items():
        for figure in FIGURES:
            values = [one[figure] for one in found]
            median = statistics.median(values)
            spread = (max(values) - min(values)) / median
            error = predicted[policy][figure] / median - 1
            goal = max(GOALS[figure.rpartition(".")[2]], spread if len(values) > 1 else 0.0)
            rows.append(
                {
                    "load": name,
                    "policy": policy,
                    "figure": figure,
                    "measured": median,
                    "spread": spread,
                    "simulated": predicted[policy][figure],
                    "error": error,
                    "within": abs(error) <= goal,
                }
            )
            print(
                f"{name:10} {policy:15} {figure:9} measured {1e3 * median:8.1f} ms, spread "
                f"{100 * spread:5.1f} %; simulated {1e3 * predicted[policy][figure]:8.1f} ms, "
                "error "
                f"{100 * error:+6.1f} %{'' if abs(error) <= goal else '  outside'}"
            )
    for figure in ("ttft.mean", "e2e.mean"):
        real = sorted(runs, key=lambda p: statistics.median(one[figure] for one in runs[p]))
        ranked = sorted(runs, key=lambda p: predicted[p][figure])
        agree = "agree" if real == ranked else "differ"
        print(
            f"{name:10} by {figure}: measured {', '.join(real)}; simulated {', '.join(ranked)}: "
            f"{agree}"
        )
        rows.append({"load": name, "ranking": figure, "measured": real, "simulated": ranked})
    return rows


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cost", type=Path, help="a file of `hardpoint calibrate`, for all turns")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each calibration")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, help="of each load, instead of its own number")
    parser.add_argument("--speed", type=float, default=1.0, help="of arrivals")
    parser.add_argument("--threads", type=int, default=1, help="of the engine, as calibrated")
    parser.add_argument(
        "--paced",
        action="store_true",
        help="measure the scripted model with the pace of the cost: the error of all but the cost",
    )
    parser.add_argument("--json", type=Path, help="also write all figures here")
    arguments = parser.parse_args()
    if arguments.paced and arguments.cost is None:
        parser.error("--paced: expected --cost FILE too, the pace of the scripted model")
    rows = []
    for name in arguments.loads:
        load = LOADS[name]
        load = msgspec.structs.replace(
            load,
            rate=load.rate * arguments.speed,
            requests=arguments.requests or load.requests,
        )
        simulations = []
        runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in arguments.policies}
        for number in range(arguments.runs):
            with tempfile.TemporaryDirectory() as folder:
                cost = arguments.cost or calibrated(Path(folder, "cost.json"), arguments)
                simulations.append(simulated(load, cost, arguments))
            for policy in arguments.policies:
                found = asyncio.run(measure(policy, list(load.generate()), arguments))
                runs[policy].append(found)
                print(
                    f"run {number + 1} of {name}, {policy}: TTFT p50 {found['ttft.p50']:.3f} s; "
                    f"load of the machine {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
        rows += compare(name, simulations, runs)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
