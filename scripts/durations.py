"""Print how long the tests took, by folder and file, from the record of scripts/test.

scripts/durations            seconds by folder and file of the last whole run
scripts/durations FILE ...   of that run: .venv-test/durations-last.json, durations-all.json; of
                             several records as one run: of a test that ran again, the last outcome
scripts/durations --slowest N   the N slowest tests
scripts/durations --budgets  prints the table of budgets as this run would have it
scripts/durations --check    compares the folders with `tool.hardpoint.test-seconds` of
                             pyproject.toml; prints those above, and exits with 1 if there are any
                             (scripts/test prints them as a warning and does not fail)
scripts/durations --check --minutes   also exits with 1 if the run took longer than `gate-minutes`
scripts/durations --summary --checks SECONDS --log FILE   the closing lines of scripts/test

A slower machine is slower for all folders. So the budgets are scaled by the seconds of all tests to
those of all budgets: a folder is above if it takes more than its part. The examples of pages are
left out there: which of them run depends on the pages that a branch changes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / ".venv-test" / "durations.json"
PAGES = "tests/test_docs.py::test_examples_run["
FACTOR, SECONDS = 1.5, 10.0
"""Tolerance of a folder: times its scaled budget, plus seconds. Durations vary from run to run."""


def main() -> int:
    """Print the tables or the folders above their budgets; return the exit code."""
    options = parsed_options()
    record = merged(options.files)
    files: Counter[str] = Counter()
    for test, seconds in record["tests"].items():
        if not (test.startswith(PAGES) and (options.check or options.budgets)):
            files[test.partition("::")[0]] += seconds
    folders: Counter[str] = Counter()
    for file, seconds in files.items():
        folders[str(Path(file).parent)] += seconds
    if options.summary:
        print_summary(record, folders, options)
    elif options.check:
        return check(folders, record["wall"] / 60 if options.minutes else 0.0)
    elif options.budgets:
        for folder, seconds in sorted(folders.items()):
            print(f'"{folder}" = {max(1, round(seconds))}')
    elif options.slowest:
        print_table(Counter(record["tests"]), options.slowest)
    else:
        print_table(files)
        print()
        print_table(folders)
        print(f"{folders.total():8.1f}  all tests; {record['wall']:.0f} s from start to end")
    return 0


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=[DURATIONS])
    parser.add_argument("--check", action="store_true", help="compare with the budgets")
    parser.add_argument("--minutes", action="store_true", help="with --check: of the run, too")
    parser.add_argument("--budgets", action="store_true", help="print them as of this run")
    parser.add_argument("--slowest", type=int, metavar="N", help="print the N slowest tests")
    parser.add_argument("--summary", action="store_true", help="print the closing lines of a run")
    parser.add_argument("--checks", type=float, default=0.0, help="seconds of the static checks")
    parser.add_argument("--log", default="", help="file with the output of the tests")
    return parser.parse_args()


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Return the record of runs one after the other: seconds, and outcomes and seconds by test."""
    wall, tests, outcomes = 0.0, Counter[str](), dict[str, str]()
    for file in files:
        record = json.loads(file.read_text(encoding="utf-8"))
        wall += record["wall"]
        tests.update(record["tests"])
        outcomes |= record["outcomes"]
    return {"wall": wall, "tests": tests, "outcomes": outcomes}


def limits() -> dict[str, Any]:
    """Return the table `tool.hardpoint` of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    table: dict[str, Any] = project["tool"]["hardpoint"]
    return table


def print_table(seconds: Counter[str], most: int | None = None) -> None:
    """Print seconds by name, most first; names of less than a second are left out."""
    for name, value in seconds.most_common(most):
        if value >= 1 or most:
            print(f"{value:8.1f}  {name}")


def print_summary(
    record: dict[str, Any], folders: Counter[str], options: argparse.Namespace
) -> None:
    """Print the closing lines of a run, and a warning if it took too long."""
    outcomes = Counter(record["outcomes"].values())
    minutes = (options.checks + record["wall"]) / 60
    print(f"tests run: {outcomes['passed'] + outcomes['failed']}, failed: {outcomes['failed']}")
    if count := outcomes["not collected"]:
        print(f"test files that cannot be collected: {count}")
    print(f"tests skipped: {outcomes['skipped']}")
    print(f"checks: {options.checks:.0f} s")
    print(f"tests: {record['wall']:.0f} s, {folders.total():.0f} s in all processes")
    for slowest, seconds in folders.most_common(1):
        print(f"slowest folder: {slowest}, {seconds:.0f} s")
    print(f"log: {options.log}")
    limit = limits()["sizes"]["gate-minutes"]
    if [file.resolve() for file in options.files] == [DURATIONS] and minutes > limit:
        print(f"warning: checks and tests took {minutes:.1f} minutes; the limit is {limit}")


def check(folders: Counter[str], minutes: float) -> int:
    """Print the folders above their budgets, and a run above its limit; return 1 for any."""
    budgets: dict[str, float] = limits()["test-seconds"]
    scale = folders.total() / sum(budgets.values())
    above = {
        folder: (seconds, allowed)
        for folder, seconds in folders.items()
        if seconds > (allowed := FACTOR * scale * budgets.get(folder, 0.0) + SECONDS)
    }
    for folder, (seconds, allowed) in above.items():
        print(f"{folder}: {seconds:.0f} s; {allowed:.0f} s is its part of {folders.total():.0f} s")
    if above:
        print("Make its tests shorter, or raise its budget in tool.hardpoint.test-seconds.")
    limit = limits()["sizes"]["gate-minutes"]
    if minutes > limit:
        print(f"the tests took {minutes:.1f} minutes; the limit is {limit}")
    return 1 if above or minutes > limit else 0


if __name__ == "__main__":
    sys.exit(main())
