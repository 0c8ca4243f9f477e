"""Serving: AsyncLLM of Hardpoint and of vLLM, closed loop, side by side in one run.

    python benchmarks/serving.py [--python vllm=/opt/vllm/bin/python]
    python benchmarks/serving.py --server --peers
    python benchmarks/serving.py --streams 1 16 --requests 4 --rounds 3 --json result.json
    python benchmarks/serving.py --streams 16 64 --steps 0 50 100 200 --plot steps.svg

Each stream sends a request of 128 tokens, reads the 64 tokens of its answer one by one, with text,
and sends the next request. All engines stay up and take turns, round by round. Printed are output
tokens per second, p50 and p99 of the time to the first token and of the time between two outputs,
and the greatest of these, in milliseconds: medians of the rounds, and others' over Hardpoint's
AsyncLLM; and microseconds of CPU per output token of the process of the frontend: the one with the
AsyncLLM and its callers, or that of the server. `--server` runs `hardpoint serve`, too, whose
clients are in another process: what it uses in addition to AsyncLLM is what HTTP costs. A second
load, of 8 tokens out, shows how much of that is once per request.

`--steps` runs an AsyncLLM per value of `scheduler.step_milliseconds`, and `--plot` draws the time
between the tokens of one of eight streams while a prompt of 1900 tokens is computed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from engines import Engine, add_arguments, choose, exported
from rich.console import Console
from rich.table import Table
from step_plot import draw
from streams import ClosedLoop, LongPrompt

PROGRAM = str(Path(__file__).with_name("streams.py"))
FIGURES = ("tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "ITL max", "CPU us/tok")
SERVER = "hardpoint serve"
COSTS = ("CPU us/request", "CPU us/further token")
SHORT = 8
"""Output tokens of the load that shows what a request costs."""
Figures = dict[str, float]


def figures(times: dict[str, Any]) -> Figures:
    """Return the figures of a closed loop."""
    first, gaps = sorted(times["first"]), sorted(times["gaps"])
    values = [times["tokens"] / times["seconds"]]
    values += [1e3 * percentile(x, p) for x in (first, gaps) for p in (0.5, 0.99)]
    values.append(1e3 * gaps[-1])
    values.append(1e6 * times["cpu"] / times["tokens"])
    return dict(zip(FIGURES, values, strict=True))


def costs(long: dict[str, Any], short: dict[str, Any]) -> tuple[float, float]:
    """Return the microseconds of CPU per request and per token of two loads of equal requests."""
    token = (long["cpu"] - short["cpu"]) / (long["tokens"] - short["tokens"])
    return 1e6 * (short["cpu"] - token * short["tokens"]) / len(short["first"]), 1e6 * token


def percentile(ascending: list[float], share: float) -> float:
    """Return the smallest value that is not below a share of the values."""
    return ascending[max(0, -int(-share * len(ascending) // 1) - 1)]


def open_engines(options: argparse.Namespace, folder: Path) -> dict[str, Engine]:
    """Return the engines by name, Hardpoint's AsyncLLM with its defaults first."""
    pythons = choose(options, ("hardpoint", "vllm"))
    python = pythons["hardpoint"]
    engines = {n: Engine(n, path, folder, PROGRAM, "async") for n, path in pythons.items()}
    for step in options.steps:
        engines[f"{step:g} ms"] = Engine("hardpoint", python, folder, PROGRAM, "async", f"{step:g}")
    if options.server:
        engines[SERVER] = Engine("hardpoint", python, folder, PROGRAM, "http")
    return engines


def compare(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Figures]]:
    """Return the figures by number of streams and engine."""
    engines = open_engines(options, folder)
    for name, engine in engines.items():
        print(f"{name} {engine.about['version']} {engine.about['settings']}", flush=True)
    for engine in engines.values():  # what an engine does once, it does here
        engine.ask(dataclasses.asdict(ClosedLoop(1, 1, 128, 64, "warm-up")))
    if options.plot:
        question = dataclasses.asdict(LongPrompt(8, 160, 1900, 1.0, "plot"))
        plotted = {name: engine.ask(question) for name, engine in engines.items()}
        options.plot.write_text(draw(plotted))
    result = {}
    for streams in options.streams:
        found: dict[str, list[Figures]] = {name: [] for name in engines}
        for number in range(options.rounds):
            load = ClosedLoop(streams, options.requests, 128, 64, f"{streams}, {number}")
            for name, engine in engines.items():
                times = engine.ask(dataclasses.asdict(load))
                found[name].append(figures(times))
                if options.server:
                    short = dataclasses.replace(load, output=SHORT, seed=f"{load.seed}, short")
                    pair = costs(times, engine.ask(dataclasses.asdict(short)))
                    found[name][-1] |= dict(zip(COSTS, pair, strict=True))
        result[str(streams)] = {
            name: {key: statistics.median(f[key] for f in rounds) for key in rounds[0]}
            for name, rounds in found.items()
        }
    for engine in engines.values():
        engine.stop()
    return result


def show(result: dict[str, dict[str, Figures]]) -> None:
    """Print the table, and what HTTP costs."""
    table = Table(title="128 in / 64 out, closed loop; times in milliseconds")
    table.add_column("streams", justify="right")
    table.add_column("engine")
    for name in FIGURES:
        table.add_column(name, justify="right")
    for streams, found in result.items():
        for engine, values in found.items():
            table.add_row(streams, engine, *(f"{values[name]:.1f}" for name in FIGURES))
        own, *others = found
        for other in others:
            ratios = (f"{found[other][name] / found[own][name]:.2f}" for name in FIGURES)
            table.add_row(streams, f"{other} / {own}", *ratios)
        table.add_section()
    console = Console(width=120)
    console.print(table)
    for streams, found in result.items():
        if SERVER in found:
            more = {n: found[SERVER][n] - found["hardpoint"][n] for n in (FIGURES[-1], *COSTS)}
            total, request, token = more.values()
            noun = "streams" if streams != "1" else "stream"
            print(
                f"{streams} {noun}: the server takes {total:.1f} us of CPU per token more: "
                f"{request:.0f} us per request and {token:.1f} us per token"
            )


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=3, help="of each stream, per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=float, nargs="*", default=[], help="values of scheduler.step_milliseconds"
    )
    parser.add_argument("--plot", type=Path, help="an SVG of the time between tokens")
    parser.add_argument("--server", action="store_true", help="`hardpoint serve`, too")
    parser.add_argument("--json", type=Path, help="also write the result here")
    add_arguments(parser)
    options = parser.parse_args()
    with exported(options.folder) as folder:
        result = compare(options, folder)
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
