"""Serving: AsyncLLM of Hardpoint and of vLLM, closed loop, side by side in one run.

    python benchmarks/serving.py [--python vllm=/opt/vllm/bin/python]
    python benchmarks/serving.py --server --peers
    python benchmarks/serving.py --streams 1 16 --requests 4 --rounds 3 --json result.json
    python benchmarks/serving.py --streams 16 64 --steps 0 150
    python benchmarks/serving.py --streams 1 --requests 1 --rounds 1 --peers    # whether it runs

Each stream sends a request of 128 tokens, reads the 64 tokens of its answer one by one, with text,
and sends the next request. All engines stay up and take turns, round by round. Printed are output
tokens per second, p50 and p99 of the time to the first token and of the time between two outputs,
and the greatest of these, in milliseconds: medians of the rounds, and ratios to Hardpoint's
AsyncLLM; and microseconds of CPU per output token of the process of the frontend: the one with the
AsyncLLM and its callers, or that of the server.

`--server` also measures `hardpoint serve`, whose clients are in another process: the difference to
AsyncLLM is the cost of HTTP. A second load, of 8 tokens out, shows its share per request.
`--steps` runs an AsyncLLM per value of `scheduler.step_milliseconds`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

from engine_process import ClosedLoop
from engines import PEER_OPTIONS, Peer, choose, exported, opened
from options import options_of, save, show_table

STREAMS = {"hardpoint": Peer("hardpoint-async"), "vllm": Peer("vllm-async", module="vllm")}
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


def peers_of(options: argparse.Namespace, pythons: dict[str, str]) -> dict[str, Peer]:
    """Return the engines by name, Hardpoint's AsyncLLM with its defaults first."""
    peers = {name: STREAMS[name] for name in pythons}
    for step in options.steps or ():
        config = {"scheduler": {"step_milliseconds": step}}
        peers[f"{step:g} ms"] = Peer("hardpoint-async", {"config": config})
    if options.server:
        peers[SERVER] = Peer("hardpoint-server")
    return peers


def compare(options: argparse.Namespace, engines: dict[str, Any]) -> dict[str, dict[str, Figures]]:
    """Return the figures by number of streams and engine."""
    for engine in engines.values():  # what an engine does once, it does here
        engine.ask(ClosedLoop(1, 1, 128, 64, "warm-up"))
    result = {}
    for streams in options.streams:
        measured: dict[str, list[Figures]] = {name: [] for name in engines}
        for number in range(options.rounds):
            load = ClosedLoop(streams, options.requests, 128, 64, f"{streams}, {number}")
            for name, engine in engines.items():
                times = engine.ask(load)
                measured[name].append(figures(times))
                if options.server:
                    short = dataclasses.replace(load, output=SHORT, seed=f"{load.seed}, short")
                    pair = costs(times, engine.ask(short))
                    measured[name][-1] |= dict(zip(COSTS, pair, strict=True))
        result[str(streams)] = {
            name: {key: statistics.median(f[key] for f in rounds) for key in rounds[0]}
            for name, rounds in measured.items()
        }
    return result


def show(result: dict[str, dict[str, Figures]]) -> None:
    """Print the table, and the cost of HTTP."""
    rows = []
    for streams, by_engine in result.items():
        for engine, values in by_engine.items():
            rows.append([streams, engine, *(f"{values[name]:.1f}" for name in FIGURES)])
        reference, *others = by_engine
        for other in others:
            ratios = (by_engine[other][name] / by_engine[reference][name] for name in FIGURES)
            rows.append([streams, f"{other} / {reference}", *(f"{ratio:.2f}" for ratio in ratios)])
    title = "128 in / 64 out, closed loop; times in milliseconds"
    show_table(title, ("streams", "engine", *FIGURES), rows)
    for streams, by_engine in result.items():
        if SERVER in by_engine:
            server, own_figures = by_engine[SERVER], by_engine["hardpoint"]
            total, request, token = (server[n] - own_figures[n] for n in (FIGURES[-1], *COSTS))
            print(
                f"{streams} streams: the server takes {total:.1f} us of CPU per token more: "
                f"{request:.0f} us per request and {token:.1f} us per token"
            )


def main() -> None:
    """Parse arguments and run."""
    options = options_of(
        __doc__,
        rounds=3,
        streams=[1, 4, 16, 64],
        requests=(3, "of each stream, per round"),
        steps=(list[float], "values of scheduler.step_milliseconds"),
        server=(False, "`hardpoint serve`, too"),
        **PEER_OPTIONS,
    )
    pythons = choose(options, tuple(STREAMS))
    with (
        exported(options.folder) as folder,
        opened(peers_of(options, pythons), folder, pythons) as engines,
    ):
        result = compare(options, engines)
    show(result)
    save(options.json, result)


if __name__ == "__main__":
    main()
