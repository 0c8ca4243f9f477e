"""Output tokens per second of a table of engines, side by side in one run.

    python benchmarks/throughput.py processes
    python benchmarks/throughput.py adapters --peers vllm --python vllm=/opt/vllm/bin/python
    python benchmarks/throughput.py executors --ranks uniproc "tensor 2"
    python benchmarks/throughput.py replicas --engines 1 8
    python benchmarks/throughput.py processes --rounds 1 --tokens 4 --streams 1   # whether it runs

processes: an engine in the caller's process and one in a separate process; the demo model, and
    the scripted model, whose forward pass costs next to nothing.
adapters: decoding without LoRA adapters, and with 1, 8 and as many as streams, dealt out in turn,
    of rank 8 on all linear layers, with random weights; in Hardpoint and vLLM.
executors: one worker in the engine's process, and several ranks. First the scripted model, so that
    the executor remains: encoding, sending, waking up workers, their answers. Printed are then
    microseconds per token of each request: one step, but in a pipeline as many steps as it has
    stages, of fewer requests each. Then a random Llama in float32, and of rank 0 the share of
    collectives in its time, most of which it waits for other ranks. More ranks than cores take
    turns on them.
replicas: several engines whose devices sleep, so that their processors are free. Printed are the
    share of what as many engines alone would give, and the processor time of the program before
    them: per request, with one token, and per further token.

Each engine lives in a process of its own, and they take turns, round by round. Printed are medians
and, in parentheses, ratios to the first engine; of adapters, to the same engine without any.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

from engines import PEER_OPTIONS, opened, take_turns
from options import options_of, save, show_table
from scenarios import RANKS, SCENARIOS, Scenario

DEFAULTS: dict[str, dict[str, Any]] = {
    "processes": {"streams": [1, 32], "tokens": 64, "rounds": 3},
    "adapters": {"streams": [32], "tokens": 64, "rounds": 3},
    "executors": {"streams": [1, 32], "tokens": 64, "rounds": 5},
    "replicas": {"streams": [8], "tokens": 100, "rounds": 5},
}
Speeds = dict[str, dict[str, float]]
"""Tokens per second by load and engine."""


def measure(scenario: Scenario, options: argparse.Namespace) -> tuple[Speeds, Speeds]:
    """Return medians: tokens per second, and processor seconds of the frontend."""
    pythons = dict(pair.split("=", 1) for pair in options.python or ())
    speeds, seconds = Speeds(), Speeds()
    with opened(scenario.peers, scenario.folder, pythons) as engines:
        for name, load in scenario.loads.items():
            answers = take_turns(engines, load.rounds(f"{scenario.name}, {name}", options.rounds))
            medians = {
                figure: {
                    engine: statistics.median(answer[figure] for answer in listed)
                    for engine, listed in answers.items()
                }
                for figure in ("seconds", "cpu")
            }
            speeds[name] = {e: load.generated / taken for e, taken in medians["seconds"].items()}
            seconds[name] = medians["cpu"]
    return speeds, seconds


def show(scenario: Scenario, speeds: Speeds) -> None:
    """Print the table of a scenario."""
    names = list(next(iter(speeds.values())))
    first = next(iter(speeds.values()))
    rows = []
    for load, by_engine in speeds.items():
        bases = first if scenario.is_by_load else dict.fromkeys(names, by_engine[names[0]])
        cells = []
        for name, speed in by_engine.items():
            if scenario.is_by_token:
                taken = 1e6 * scenario.loads[load].count / speed
                cells.append(f"{taken:.0f} ({bases[name] / speed:.1f}x)")
            else:
                cells.append(f"{speed:.0f} ({speed / bases[name]:.2f}x)")
        rows.append([load, *cells])
    unit = "us per token of each request" if scenario.is_by_token else "output tokens per second"
    show_table(f"{scenario.name}: {unit}", ("load", *names), rows)


def main() -> None:
    """Parse arguments and run."""
    options = options_of(
        __doc__,
        scenarios=SCENARIOS,
        streams=(list[int], "requests at once; of replicas, of each engine"),
        tokens=(int, "output tokens per request"),
        rounds=(int, "counted rounds"),
        ranks=(RANKS, "of executors"),
        hidden=(512, "hidden size of the Llama of executors"),
        layers=(8, "its layers"),
        engines=([1, 2, 4, 8], "of replicas"),
        milliseconds=(40.0, "of a step of replicas"),
        **PEER_OPTIONS,
    )
    for name, value in DEFAULTS[options.scenario].items():
        setattr(options, name, getattr(options, name) or value)
    print(f"{len(os.sched_getaffinity(0))} cores")
    result: dict[str, Any] = {}
    for scenario in SCENARIOS[options.scenario](options):
        speeds, seconds = measure(scenario, options)
        show(scenario, speeds)
        result[scenario.name] = speeds
        if scenario.more is not None:
            result[f"{scenario.name}: more"] = scenario.more(speeds, seconds)
    save(options.json, result)


if __name__ == "__main__":
    main()
