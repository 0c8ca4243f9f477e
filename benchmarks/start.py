"""From an empty interpreter to the first token, by stage, and the peak memory of each process.

    python benchmarks/start.py [--model smollm2] [--rounds 3] [--json FILE]
    python benchmarks/start.py --load mixed      # the peak after this load of benchmarks/offline.py

The engine is in the caller's process, then in one of its own. Printed are medians of the rounds.
"of import torch" is all of it divided by the time of `python -c "import torch"` in the same run.
Peak memory is VmHWM, the most that was resident at once, of the caller and of the engine's process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from offline import LOADS
from rich.console import Console
from rich.table import Table

MODES = {"in-process": True, "separate": False}
STAGES = ("interpreter", "imports", "engine ready", "first token", "all together", "close")
_PROGRAM = """
import json, os, sys, time
started = time.time()
from hardpoint import LLM, SamplingParams
import hardpoint.llm
imported = time.time()
model, inside, load = json.load(sys.stdin)
config = {"engine": {"in_process": inside}, "max_model_len": 1024}
llm = LLM(model, config=config, dtype="bfloat16")
ready = time.time()
llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=1))
first = time.time()
if load:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
              for n in load["outputs"]]
    llm.generate(load["prompts"], params)

def peak(pid):
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

def children(pid):
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as found:
            for child in found.read().split():
                yield child
                yield from children(child)

peaks = [peak("self"), *(peak(pid) for pid in children(os.getpid()))]
before = time.time()
llm.close()
print(json.dumps([[started, imported, ready, first, time.time() - before], peaks]))
"""


def start(model: str, in_process: bool, load: dict[str, Any] | None) -> dict[str, float]:
    """Return the seconds of each stage, and the MB of each process's peak."""
    launched = time.time()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([model, in_process, load]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (started, imported, ready, first, close), peaks = json.loads(done.stdout.splitlines()[-1])
    seconds = (
        started - launched,
        imported - started,
        ready - imported,
        first - ready,
        first - launched,
        close,
    )
    found = dict(zip(STAGES, seconds, strict=True))
    found["peak of the caller, MB"] = peaks[0]
    if not in_process:
        # Helpers of multiprocessing are small; the engine is the largest.
        found["peak of the engine, MB"] = max(peaks[1:])
    return found


def import_torch() -> float:
    """Return the seconds of a process that imports torch and ends."""
    launched = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.time() - launched


def show(result: dict[str, dict[str, float]], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    for column in ("seconds", *MODES):
        table.add_column(column, justify="left" if column == "seconds" else "right")
    for name in result["separate"]:
        cells = (
            (f"{found[name]:.0f}" if name.endswith("MB") else f"{found[name]:.2f}")
            if name in found
            else "-"
            for found in result.values()
        )
        table.add_row(name, *cells)
    Console(width=100).print(table)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", choices=LOADS, help="run it before the peak is read")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    load = None
    if options.load:
        batch = LOADS[options.load].batch("start")
        load = {"prompts": batch.prompts, "outputs": batch.outputs}
    rounds = [
        {mode: start(options.model, inside, load) for mode, inside in MODES.items()}
        for _ in range(options.rounds)
    ]
    torch = statistics.median(import_torch() for _ in range(options.rounds))
    result = {
        mode: {name: statistics.median(r[mode][name] for r in rounds) for name in rounds[0][mode]}
        for mode in MODES
    }
    for found in result.values():
        found["of import torch"] = found["all together"] / torch
    after = f"; peaks after {LOADS[options.load]}" if options.load else ""
    show(result, f"to the first token of {options.model}, medians of {options.rounds}{after}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
