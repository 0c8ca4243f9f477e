"""The cost or gain of a separate engine process (its start: `hardpoint bench startup`).

    python benchmarks/processes.py [--rounds 5] [--json result.json]

Measured are output tokens per second of 1 and of 32 requests of the demo model, in the caller's
process and in a separate one, in turns; and microseconds per step of the scripted model, whose
forward pass costs next to nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

MODES = {"in-process": True, "separate": False}
_CONSOLE = Console(width=110)


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    report = _separate(arguments)
    _show(report)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per request")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _separate(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return tokens per second, or microseconds per step, by load and mode."""
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scripted = scripted_config(write_scripted_model(Path(folder) / "scripted"))
        loads = {
            "1 request, tokens/s": ({"model": arguments.model}, 1),
            "32 requests, tokens/s": ({"model": arguments.model}, 32),
            "scripted, 32 requests, us/step": (scripted, 32),
        }
        for title, (config, count) in loads.items():
            engines = {
                mode: LLM(config={**config, "max_model_len": 512, "engine": {"in_process": inside}})
                for mode, inside in MODES.items()
            }
            try:
                seconds = _in_turn(engines, count, arguments.tokens, arguments.rounds)
            finally:
                for engine in engines.values():
                    engine.close()
            if title.endswith("us/step"):
                result[title] = {m: s / arguments.tokens * 1e6 for m, s in seconds.items()}
            else:
                result[title] = {m: count * arguments.tokens / s for m, s in seconds.items()}
    return result


def _in_turn(engines: dict[str, LLM], count: int, tokens: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of a round by engine; the first round warms up."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    times: dict[str, list[float]] = {mode: [] for mode in engines}
    for index in range(rounds + 1):
        rng = random.Random(index)
        prompts = [[rng.randrange(1, 250) for _ in range(32)] for _ in range(count)]
        for mode, engine in engines.items():
            start = time.perf_counter()
            engine.generate(prompts, params)
            times[mode].append(time.perf_counter() - start)
    return {mode: statistics.median(seconds[1:]) for mode, seconds in times.items()}


def _show(report: dict[str, dict[str, float]]) -> None:
    table = Table(title="An engine in this process, and in a separate one")
    for column in ("load", *MODES, "separate / in-process"):
        table.add_column(column, justify="left" if column == "load" else "right")
    for title, found in report.items():
        ratio = found["separate"] / found["in-process"]
        table.add_row(title, *(f"{found[mode]:.0f}" for mode in MODES), f"{ratio:.2f}")
    _CONSOLE.print(table)


if __name__ == "__main__":
    main()
