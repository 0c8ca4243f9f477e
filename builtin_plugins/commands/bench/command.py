"""`hardpoint bench`: `startup` prints time and memory of a start, by stage."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from hardpoint.builtin_plugins.commands.loads.figures import Tables, print_tables
from hardpoint.builtin_plugins.commands.loads.progress import ProgressLine
from hardpoint.plugins import Command, CommandContext

_INTERRUPTED = 130
"""Exit code after an interrupt."""
_MIB = 1 << 20
_BOTH = "both"


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] COMMAND ..."
    parser.description = "Measure starts."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="COMMAND", prog=parser.prog
    )
    _configure_startup(actions.add_parser("startup", help="measure the stages of a start"))


def _configure_startup(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start an engine several times, each in a process of its own, and report the stages from "
        "the beginning of the process to the first token, and the memory."
    )
    add = parser.add_argument
    add("started", nargs="?", metavar="MODEL", help="the same as --model")
    add("--runs", type=int, default=5, metavar="N", help="of each kind (default: 5)")
    add(
        "--caches",
        choices=["cold", "warm", _BOTH],
        default=_BOTH,
        help="cold: without weight cache and compiled kernels, and the model's files are read "
        "from the disk; warm: as an earlier start left them (default: both)",
    )
    add("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    model = options.started or getattr(options, "model", None)
    plan = {
        "model": model,
        "config": getattr(options, "config", None),
        "settings": list(getattr(options, "set", [])),
        "runs": options.runs,
        "caches": ["cold", "warm"] if options.caches == _BOTH else [options.caches],
    }
    context.load_catalog(*context.load_config(model=model))  # rejects mistakes before a start
    runs: list[Mapping[str, Any]] = []
    result: Mapping[str, Any] = {}
    with ProgressLine(is_shown=not context.quiet) as progress:
        for record in context.measure_startup(plan):
            if record["record"] == "progress":
                progress.show(f"start {record['run']} of {record['of']}, {record['caches']}")
            elif record["record"] == "run":
                runs.append({name: record[name] for name in ("caches", "seconds", "bytes")})
            else:
                result = {name: record[name] for name in ("model", "caches", "interrupted")}
    if options.json:
        print(json.dumps({**result, "each": runs}, indent=1))
    elif result["caches"]:
        counts = ", ".join(f"{cache['runs']} {name}" for name, cache in result["caches"].items())
        print(f"{result['model']}: {counts} starts; median, least and most")
        print_tables(_tables(result["caches"]))
    return _INTERRUPTED if result["interrupted"] else 0


def _tables(caches: Mapping[str, Any]) -> Tables:
    rows = []
    first = next(iter(caches.values()))
    for kind, unit, factor, digits in (("seconds", "s", 1.0, 2), ("bytes", "MiB", 1 / _MIB, 0)):
        for name in first[kind]:
            cells = []
            for cache in caches.values():
                values = cache[kind][name]
                cells += [f"{factor * values[key]:.{digits}f}" for key in ("median", "low", "high")]
            rows.append(
                [
                    f"{name}, {unit}" if kind == "seconds" else f"memory of the {name}, {unit}",
                    *cells,
                ]
            )
    headers = [text for name in caches for text in (name, "least", "most")]
    return [("", ["stage", *headers], rows)]


COMMAND = Command("bench", "measure starts", _configure, _run)
