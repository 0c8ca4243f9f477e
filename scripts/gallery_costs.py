"""Write docs/gallery-costs.json: the cost of this repository's plugins on this machine.

scripts/gallery-costs               all of them, in some minutes; run it on a quiet machine
scripts/gallery-costs KIND/NAME...  some; the others keep their figures

Figures are those of `hardpoint plugins check`, rounded: microseconds in its run of the scripted
model with 8 requests. What a plugin's own methods took is metered per row and per step; of one
without a meter there is the time of a step with it, less that of a step without it, where that can
be told from the noise of measuring. scripts/reference makes columns of the gallery of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hardpoint.testing.checking.enabling import RUN_KINDS
from hardpoint.toolkit.processor import processor_facts

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "gallery-costs.json"
LEAST_SHARE = 0.05
"""A difference of a smaller share of a step is not told from noise."""
SECONDS = 300


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="KIND/NAME", help="plugins; all if none")
    chosen = parser.parse_args().names
    projects = [ROOT / "pyproject.toml", *sorted(ROOT.glob("examples/*/pyproject.toml"))]
    known = [name for file in projects for name in plugins_of(file)]
    if unknown := sorted(set(chosen).difference(known)):
        parser.error(f"{', '.join(unknown)}: no plugin of this repository")
    old = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() and chosen else {}
    costs: dict[str, dict[str, str]] = old.get("microseconds", {})
    with tempfile.TemporaryDirectory() as folder:
        install([file.parent for file in projects[1:]], folder)
        for name in chosen or known:
            if cost := rounded(checked(name, folder)):
                costs[name] = cost
            else:
                costs.pop(name, None)
            print(f"{name}: {cost or '-'}", flush=True)
    content = {"machine": machine(), "microseconds": dict(sorted(costs.items()))}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def plugins_of(file: Path) -> list[str]:
    """Return KIND/NAME of each plugin that a project offers, of the kinds that a check measures."""
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    groups = project.get("entry-points", {}).items()
    kinds = [(group.removeprefix("hardpoint."), entries) for group, entries in groups]
    return [f"{kind}/{name}" for kind, entries in kinds if kind in RUN_KINDS for name in entries]


def install(projects: list[Path], folder: str) -> None:
    """Install packages into a folder that is no environment."""
    options = ["-qq", "--no-deps", "--no-build-isolation", "--target", folder]
    with tempfile.TemporaryDirectory() as copies:  # the build writes beside what it builds
        made = [shutil.copytree(project, Path(copies) / project.name) for project in projects]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *made], check=True)


def checked(name: str, folder: str) -> dict[str, Any]:
    """Return the record of costs of a check with hardly any case for each rule."""
    command = [sys.executable, "-m", "hardpoint", "plugins", "check", name, "--json"]
    environment = {**os.environ, "PYTHONPATH": folder, "HARDPOINT_EXAMPLES": "0.01"}
    done = subprocess.run(
        [*command, "--seconds", str(SECONDS)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return next((record for record in records if record["record"] == "cost"), {})


def rounded(record: dict[str, Any]) -> dict[str, str]:
    """Return the text for a record; nothing if nothing was measured."""
    if (metered := record.get("metered")) is not None:
        return {"row": about(metered["us_per_row"]), "step": about(metered["us_per_step"])}
    without = record.get("us_per_step_without")
    if without is None:
        return {}
    least = LEAST_SHARE * without
    difference = record["us_per_step"] - without
    return {"step": about(difference) if difference >= least else f"< {about(least, up=True)}"}


def about(value: float, *, up: bool = False) -> str:
    """Return the nearest of 1, 2, 5, 10, ... to a number, or with `up` the next one above."""
    if value < 1:
        return "< 1"
    power = 10 ** math.floor(math.log10(value))
    steps = [step * power for step in (1, 2, 5, 10)]
    if up:
        return str(next(step for step in steps if step >= value))
    return str(min(steps, key=lambda step: abs(math.log(step / value))))


def machine() -> str:
    """Return the class of this machine: its processor, and how many of it."""
    name = processor_facts().get("model name", platform.machine())
    return f"{name}, {len(os.sched_getaffinity(0))} processors"


if __name__ == "__main__":
    sys.exit(main())
