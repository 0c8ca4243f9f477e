"""`hardpoint simulate`: simulate the requests of a trace with other settings."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from hardpoint.builtin_plugins.commands.loads.document import write_page
from hardpoint.builtin_plugins.commands.loads.options import (
    VARY_EXAMPLE,
    add_load_options,
    add_objective_options,
    combinations,
    load_of,
    objective_of,
    varied,
)
from hardpoint.builtin_plugins.commands.loads.progress import ProgressLine
from hardpoint.plugins import Command, CommandContext, EngineConfig

from . import DEFAULT_FILE
from .page import page
from .summary import print_summary

_SYNTHETIC = "synthetic"
_PATHS = {
    "policy": "scheduler.policy",
    "balancer": "parallel.balancer",
    "eviction": "kv_cache.eviction",
    "replicas": "parallel.data",
}
"""The setting of each option that may be given several times."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the requests of a trace through the real scheduler, KV cache, policies and balancer, "
        "on a virtual clock with the step times of `hardpoint calibrate`. Options that are given "
        "several times make a variant of each value; the variants are compared with the first one."
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a file of requests, or `synthetic`: some that are made")
    add(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="name or FQCN of a scheduling policy",
    )
    add(
        "--balancer", action="append", default=[], metavar="NAME", help="name or FQCN of a balancer"
    )
    add(
        "--eviction",
        action="append",
        default=[],
        metavar="NAME",
        help="name or FQCN of an eviction policy",
    )
    add("--replicas", action="append", default=[], type=int, metavar="N", help="number of engines")
    add(
        "--vary",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help=f"any other setting, such as {VARY_EXAMPLE}; several values are divided by commas",
    )
    add(
        "--cost",
        default=DEFAULT_FILE,
        metavar="FILE",
        help=f"step times of `calibrate` (default: {DEFAULT_FILE})",
    )
    add_objective_options(parser)
    add_load_options(parser)
    add(
        "--processes",
        type=int,
        metavar="N",
        help="variants that run at the same time (default: processors)",
    )
    add("--json", action="store_true", help="print JSON")
    add("--html", metavar="FILE", help="also write a page with plots")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    objective = objective_of(options)
    variants = _variants(options, context)
    load = load_of(options, None if options.trace == _SYNTHETIC else options.trace)
    processes = options.processes or min(len(variants), os.cpu_count() or 1)
    results: dict[str, Any] = {"load": load, "cost": options.cost, "variants": {}}
    with ProgressLine(is_shown=not context.quiet) as progress:
        for record in context.simulate(
            variants, load, cost=options.cost, objective=objective, processes=processes
        ):
            if record["record"] == "progress":
                progress.show(
                    f"{record['variant']}: {record['requests']} of {record['of']} requests, "
                    f"{record['seconds']:.0f} s simulated"
                )
            elif record["record"] == "result":
                results["variants"][record["variant"]] = {
                    key: record[key] for key in ("report", "curves", "real_seconds")
                }
            else:
                results["comparison"] = {key: record[key] for key in ("with", "changes")}
    results["variants"] = {name: results["variants"][name] for name in variants}
    if options.html:
        write_page(options.html, page(results, context.version))
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        print_summary(results)
    return 0


def _variants(options: argparse.Namespace, context: CommandContext) -> dict[str, EngineConfig]:
    values: dict[str, list[str]] = {}
    for option, path in _PATHS.items():
        if option_values := getattr(options, option):
            values[path] = [str(value) for value in option_values]
    for path, texts in varied(options.vary).items():
        values.setdefault(path, []).extend(texts)
    short = [_PATHS[name] for name in ("policy", "balancer", "eviction")]
    configs: dict[str, EngineConfig] = {}
    for name, settings in combinations(values, short, {_PATHS["replicas"]: "replicas"}).items():
        changes = (f"{path}={text}" for path, text in settings.items())
        configs[name], sources = context.load_config(*changes)
        context.load_catalog(configs[name], sources)  # refuses unknown names, with their origin
    return configs


COMMAND = Command(
    "simulate", "run a trace on a virtual clock, under several settings", _configure, _run
)
