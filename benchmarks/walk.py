"""Count the files and calls that one 1-token prompt walks through, in this process.

    python benchmarks/walk.py             a table by folder
    python benchmarks/walk.py --files     every file, with its functions and calls
    python benchmarks/walk.py --json      the sums, and the functions that are called most

Model and attention are counted apart, with the operations that they call: their calls grow with
the model's layers. A second prompt is counted, so that what happens once per process (imports,
first-use caches) is left out. `scripts/sizes --walk` compares the sums with their limits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hardpoint
from hardpoint import LLM, SamplingParams

PACKAGE = Path(hardpoint.__file__).resolve().parent
CHECKOUT = Path(__file__).resolve().parent.parent
MODEL_FOLDERS = (
    "builtin_plugins/models",
    "builtin_plugins/attention",
    "builtin_plugins/ops",
    "toolkit/layers",
    "boundary/checked_attention",
    "boundary/layer_groups",
    "kernels",
)
DEAREST = 12
FOLDERS = {
    "boundary",
    "builtin_plugins",
    "core",
    "features",
    "kernels",
    "plugins",
    "registry",
    "system",
    "testing",
    "toolkit",
    "typed",
}


def main() -> None:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--files", action="store_true", help="print every file")
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    options = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    with LLM(options.model) as llm:
        llm.generate("The capital of France is", params)
        calls = count_calls(lambda: llm.generate("One plus one is", params))
    if options.json:
        print(json.dumps(sums(calls)))
    else:
        print_table(calls, by_file=options.files)


def count_calls(run: Any) -> Counter[CodeType]:
    """Return how often each Python function of the package is called by `run`."""
    calls: Counter[CodeType] = Counter()
    paths: dict[str, bool] = {}

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and paths.setdefault(code.co_filename, in_package(code.co_filename)):
            calls[code] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def in_package(filename: str) -> bool:
    """Return whether a file is part of Hardpoint."""
    return relative(filename) is not None


def relative(filename: str) -> str | None:
    """Return a file's path as in the checkout, None for files of others."""
    if filename == __file__:
        return None
    path = Path(filename)
    resolved = path.resolve() if path.exists() else path
    if "site-packages" in resolved.parts and not resolved.is_relative_to(PACKAGE):
        return None
    for root in (PACKAGE, CHECKOUT):
        if resolved.is_relative_to(root):
            inside = resolved.relative_to(root)
            top = inside.parts[0]
            if root == PACKAGE and top not in FOLDERS:
                return f"api/{inside}"
            return str(inside)
    return None


def sums(calls: Counter[CodeType]) -> dict[str, Any]:
    """Return files and calls, and the functions outside model and attention called most."""
    places = {code: relative(code.co_filename) or code.co_filename for code in calls}
    outside = Counter(
        {code: count for code, count in calls.items() if not places[code].startswith(MODEL_FOLDERS)}
    )
    dearest = outside.most_common(DEAREST)
    return {
        "files": len(set(places.values())),
        "calls": outside.total(),
        "all_calls": calls.total(),
        "dearest": [(f"{places[code]}: {code.co_qualname}", count) for code, count in dearest],
    }


def print_table(calls: Counter[CodeType], *, by_file: bool) -> None:
    """Print files, functions and calls by folder or file, then the sums."""
    rows: dict[str, tuple[set[str], int, int]] = {}
    for code, count in calls.items():
        path = relative(code.co_filename) or code.co_filename
        place = path if by_file else str(Path(path).parent)
        files, functions, total = rows.get(place, (set(), 0, 0))
        rows[place] = (files | {path}, functions + 1, total + count)
    print(f"{'files':>6} {'functions':>10} {'calls':>7}  place")
    for place, (files, functions, total) in sorted(rows.items()):
        print(f"{len(files):>6} {functions:>10} {total:>7}  {place}")
    for title, chosen in (
        ("model and attention", lambda place: place.startswith(MODEL_FOLDERS)),
        ("everything else", lambda place: not place.startswith(MODEL_FOLDERS)),
        ("all", lambda _place: True),
    ):
        some = [row for place, row in rows.items() if chosen(place)]
        files = set().union(*(row[0] for row in some))
        functions, total = sum(row[1] for row in some), sum(row[2] for row in some)
        print(f"{len(files):>6} {functions:>10} {total:>7}  = {title}")


if __name__ == "__main__":
    main()
