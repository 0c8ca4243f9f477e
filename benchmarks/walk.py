"""Count the files and calls that one 1-token prompt walks through, in this process.

    python benchmarks/walk.py             a table by folder
    python benchmarks/walk.py --files     every file, with its functions and calls
    python benchmarks/walk.py --json      the sums, and the functions that are called most

Model and attention are counted apart, with all that is called while one of their functions runs
(operations, kernels, the tensors that these allocate): such calls grow with the model's layers. A
second prompt is counted, so that what happens once per process (imports, first-use caches) is
left out. `scripts/sizes --walk` compares the sums with their limits. They depend on the kernels:
the last line has the operations and attention that ran, and the instruction set of compiled ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter, defaultdict
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
    "host/boundary/checked_attention",
    "host/boundary/layers/groups",
    "kernels",
)
DEAREST = 12


def main() -> None:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--files", action="store_true", help="print every file")
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    options = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    kernels = KernelLog()
    # A stated number of threads: the default one changes with the load of other programs.
    with LLM(options.model, config={"executor": {"threads": 1}}) as llm:
        llm.generate("The capital of France is", params)
        # The fewest of some walks: a collection of garbage may call something during one of them.
        texts = ("One plus one is", "The sea is", "Once upon a")
        walks = [count_calls(lambda text=text: llm.generate(text, params)) for text in texts]
        calls = min(walks, key=Counter.total)
    if options.json:
        print(json.dumps(sums(calls) | {"kernels": kernels.text}))
    else:
        print(f"{table(calls, by_file=options.files)}\n{kernels.text}")


class KernelLog(logging.Handler):
    """The log message of the engine about its operations and attention.

    Attributes:
        text: the message; empty before it came.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.text = ""
        logger = logging.getLogger("hardpoint")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message, which has the names and instruction sets of both."""
        if (text := record.getMessage()).startswith("operations: "):
            self.text = text


Calls = Counter[tuple[CodeType, bool]]
"""How often each function was called, apart for calls that are the model's."""


def count_calls(run: Any) -> Calls:
    """Return how often each Python function of the package is called by `run`."""
    calls: Calls = Counter()
    places: dict[str, str | None] = {}
    depth = 0  # of running functions, from the outermost one of the model on

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal depth
        if event not in {"call", "return"}:
            return
        name = frame.f_code.co_filename
        if name not in places:
            places[name] = relative(name)
        if (place := places[name]) is None:
            return
        if event == "return":
            depth -= bool(depth)
            return
        depth += bool(depth) or place.startswith(MODEL_FOLDERS)
        calls[frame.f_code, bool(depth)] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def relative(filename: str) -> str | None:
    """Return the path of a file of the package in it, of the checkout's in that, else None."""
    if filename == __file__:
        return None
    path = Path(filename)
    resolved = path.resolve() if path.exists() else path
    if "site-packages" in resolved.parts and not resolved.is_relative_to(PACKAGE):
        return None
    for root in (PACKAGE, CHECKOUT):
        if resolved.is_relative_to(root):
            return str(resolved.relative_to(root))
    return None


def sums(calls: Calls) -> dict[str, Any]:
    """Return the numbers of files and calls, and the functions called most.

    `outside_files`, `calls` and `dearest` are those outside model and attention.
    """
    outside = Counter({code: count for (code, of_model), count in calls.items() if not of_model})
    return {
        "files": len({code.co_filename for code, _ in calls}),
        "outside_files": len({code.co_filename for code in outside}),
        "calls": outside.total(),
        "all_calls": calls.total(),
        "dearest": [
            (f"{relative(code.co_filename)}: {code.co_qualname}", count)
            for code, count in outside.most_common(DEAREST)
        ],
    }


def table(calls: Calls, *, by_file: bool) -> str:
    """Return files, functions and calls by folder or file, then the sums."""
    rows: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for (code, of_model), count in calls.items():
        path = relative(code.co_filename) or code.co_filename
        place = path if by_file else str(Path(path).parent)
        total = "= model and attention" if of_model else "= everything else"
        for key in (place + " (model)" * of_model, total, "= all"):
            rows[key].append((path, count))
    lines = [f"{'files':>6} {'functions':>10} {'calls':>7}  place"]
    for key in sorted(rows, key=lambda key: (key.startswith("="), key)):
        files, counts = zip(*rows[key], strict=True)
        lines.append(f"{len(set(files)):>6} {len(counts):>10} {sum(counts):>7}  {key}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
