"""One stream next to busy processes: tokens per second, and the share of the undisturbed speed.

    python benchmarks/neighbours.py [--python vllm=/opt/vllm/bin/python]
    python benchmarks/neighbours.py --busy 0 1 --rounds 5 --json result.json

The neighbours are endless loops in Python, each in a process of its own. Engines stay up and take
turns, round by round; printed are medians. Measured is Hardpoint in the process that reads the
stream, Hardpoint's AsyncLLM, whose engine has a process of its own, and vLLM's AsyncLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from engines import Engine, add_arguments, choose, exported
from rich.console import Console
from rich.table import Table
from streams import ClosedLoop

PROGRAM = str(Path(__file__).with_name("streams.py"))
MODES = {
    "hardpoint": {"Hardpoint, in-process": "in-process", "Hardpoint, AsyncLLM": "async"},
    "vllm": {"vLLM, AsyncLLM": "async"},
}


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run busy processes during the body."""
    program = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(program) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Return the median speed by engine and number of neighbours."""
    engines = {
        title: Engine(name, python, folder, PROGRAM, mode)
        for name, python in choose(options, tuple(MODES)).items()
        for title, mode in MODES[name].items()
    }
    speeds = {title: {str(busy): [0.0] * 0 for busy in options.busy} for title in engines}
    for number in range(options.rounds):
        for busy in options.busy:
            load = ClosedLoop(1, 1, 32, options.tokens, f"{busy}, {number}", options.seconds)
            with neighbours(busy):
                for title, engine in engines.items():
                    speed = engine.ask(dataclasses.asdict(load))["speed"]
                    speeds[title][str(busy)].append(speed)
    for engine in engines.values():
        engine.stop()
    return {
        title: {busy: statistics.median(values) for busy, values in found.items()}
        for title, found in speeds.items()
    }


def show(result: dict[str, dict[str, float]], rounds: int) -> None:
    """Print the table."""
    table = Table(
        title=f"one stream next to busy processes, tokens per second; medians of {rounds}"
    )
    table.add_column("engine")
    counts = list(next(iter(result.values())))
    for busy in counts:
        table.add_column(f"{busy} busy", justify="right")
    for title, found in result.items():
        alone = found[counts[0]]
        cells = [f"{speed:.1f} ({speed / alone:.0%})" for speed in found.values()]
        table.add_row(title, *cells)
    Console(width=100).print(table)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="of a measurement, at most")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a measurement, at most")
    parser.add_argument("--json", type=Path, help="also write the result here")
    add_arguments(parser)
    options = parser.parse_args()
    with exported(options.folder) as folder:
        result = compare(options, folder)
    show(result, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
