"""Print how large the parts of the package are: goal, limit, value now.

scripts/sizes           the table; its limits are `tool.hardpoint.sizes` of pyproject.toml
scripts/sizes --check   exits with 1 if a value is above its limit
scripts/sizes --walk    with the files and calls of a prompt of one token, which takes some seconds
                        and needs the package installed (benchmarks/walk.py)

A file or function over its limit that has a reason is a line of `tool.hardpoint.sizes.exceptions`:
its path, for a function "path:name", and the reason. Issues lower the limits; nothing raises them.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from syntax import statements

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / ".venv-test" / "durations.json"
"""What scripts/durations reads: seconds of the last whole run of the tests."""

FILE_LINES = {
    **dict.fromkeys(("src", "core", "host", "deployment"), 500),
    **dict.fromkeys(("plugins/contract", "plugins/toolkit", "plugins/typed"), 500),
    **dict.fromkeys(("plugins/testing", "builtin_plugins", "kernels"), 650),
    "builtin_plugins/step_parts": 500,
}
"""Most lines of a file, by folder of the package; the innermost counts."""
FUNCTION_LINES = 60
"""Most lines of a function outside kernels/."""


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        key: name of the limit in pyproject.toml.
        title: what is counted.
        goal: value that is aimed at.
        value: value now; None if it was not measured.
        parts: what the value consists of, for its reader.
    """

    key: str
    title: str
    goal: str
    value: float | None
    parts: list[str] = []


def main() -> int:
    """Print the table; return 1 if values must be checked and one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 above a limit")
    parser.add_argument("--walk", action="store_true", help="count a prompt's files and calls, too")
    options = parser.parse_args()
    gc.disable()  # each collection would visit the cached trees, which takes longer than the rest
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hardpoint"]["sizes"]
    exceptions: dict[str, str] = limits.pop("exceptions", {})
    rows = list(measured(exceptions))
    if options.walk:
        rows += walked()
    # Minutes are shown alone: they are those of this machine, and of the run before this one.
    checked = [row for row in rows if row.value is not None and row.key != "gate-minutes"]
    over = [row for row in checked if (row.value or 0) > limits[row.key]]
    print_table(rows, limits)
    stale = sorted(exceptions.keys() - {*long_files(), *long_functions()})
    for place in stale:
        print(f"exception without need, remove it: {place}")
    for row in over:
        print(f"{row.title}: {row.value:g}, the limit is {limits[row.key]:g}")
    return 1 if options.check and (over or stale) else 0


def measured(exceptions: dict[str, str]) -> Iterator[Row]:
    """Yield the rows that reading the source gives."""
    files = {name: lines for name, lines in long_files().items() if name not in exceptions}
    functions = {name: n for name, n in long_functions().items() if name not in exceptions}
    core, host = (sum(map(lines, sources(folder))) for folder in ("core", "host"))
    names = public_names("plugins/contract")
    yield Row("engine-lines", "lines of core and host", "30000", core + host)
    yield Row("core-lines", "lines of core alone", "12500", core)
    yield Row("long-files", "files over 500 lines (kit, built-ins, kernels: 650)", "0",
              len(files), listed(files))  # fmt: skip
    yield Row("long-functions", f"functions over {FUNCTION_LINES} lines outside kernels", "0",
              len(functions), listed(functions))  # fmt: skip
    yield Row("most-exceptions", "exceptions from these two", "8", len(exceptions),
              [f"{place}: {reason}" for place, reason in exceptions.items()])  # fmt: skip
    yield Row("contract-names", "public names of the contract", "250", len(names))
    yield Row("gate-minutes", "minutes of the last whole run of the tests", "12", minutes())


@cache
def sources(folder: str) -> list[Path]:
    """Return the Python files of a folder; none if there is no such folder."""
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def long_files() -> dict[str, int]:
    """Return path and lines of each file over its limit."""
    num_lines = {path: lines(path) for folder in FILE_LINES for path in sources(folder)}
    return {str(path.relative_to(ROOT)): n for path, n in num_lines.items() if n > most_lines(path)}


def most_lines(path: Path) -> int:
    """Return the limit of a file's lines."""
    folders = (str(folder.relative_to(ROOT)) for folder in path.parents)
    return next(FILE_LINES[folder] for folder in folders if folder in FILE_LINES)


@cache
def long_functions() -> dict[str, int]:
    """Return "path:name" and lines of each function over the limit."""
    return {
        f"{path.relative_to(ROOT)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for folder in FILE_LINES
        if folder != "kernels"
        for path in sources(folder)
        for node in statements(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    }


def listed(places: dict[str, int]) -> list[str]:
    """Return places with their lines, most first."""
    return [f"{n:4d} {place}" for place, n in sorted(places.items(), key=lambda each: -each[1])]


def public_names(folder: str) -> set[str]:
    """Return the names in `__all__` of all modules of a folder."""
    return {
        name
        for path in sources(folder)
        for node in tree(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }


def minutes() -> float | None:
    """Return how long the last whole run of the tests took, None without one here."""
    if not DURATIONS.exists():
        return None
    seconds: float = json.loads(DURATIONS.read_text(encoding="utf-8"))["wall"]
    return round(seconds / 60, 1)


def walked() -> list[Row]:
    """Return the rows of a prompt of one token: the files and calls of its walk."""
    command = [sys.executable, str(ROOT / "benchmarks" / "walk.py"), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    walk = json.loads(done.stdout)
    dearest = [f"{calls:4d} {name}" for name, calls in walk["dearest"]]
    files = "files of a prompt of one token outside model, attention, ops and kernels"
    calls = "calls of it there; the functions called most"
    return [
        Row("walk-files", files, "55", walk["outside_files"], [walk["kernels"]]),
        Row("walk-calls", calls, "500", walk["calls"], dearest),
    ]


def print_table(rows: list[Row], limits: dict[str, float]) -> None:
    """Print the rows, and below each its parts."""
    width = max(len(row.title) for row in rows)
    print(f"{'':{width}} {'goal':>7} {'limit':>7} {'now':>7}")
    for row in rows:
        now = "" if row.value is None else f"{row.value:g}"
        print(f"{row.title:{width}} {row.goal:>7} {limits[row.key]:>7} {now:>7}")
        for part in row.parts:
            print(f"    {part}")


if __name__ == "__main__":
    sys.exit(main())
