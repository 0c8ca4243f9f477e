"""`hardpoint bench sweep`: loads on servers of several settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.builtin_plugins.commands.loads.document import (
    aside,
    document,
    figure,
    key,
    plots,
    remark,
    table,
    time_plots,
    write_page,
)
from hardpoint.builtin_plugins.commands.loads.figures import Tables, group_tables, print_tables
from hardpoint.builtin_plugins.commands.loads.options import VARY_EXAMPLE, combinations, varied
from hardpoint.builtin_plugins.commands.loads.plots import Series, line_plot
from hardpoint.builtin_plugins.commands.loads.progress import ProgressLine
from hardpoint.plugins import CommandContext

from .load_options import add_options, address_of, plan_of, refuse_address_options, start_of
from .serve import EXPLANATION, INTERRUPTED, load_text, progress_text
from .summary import HEADERS, cells, remarks

_DEFAULT_FILE = "sweep.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Start a server for each combination of settings, send it loads of each concurrency or "
        "rate, and report all of it in one table. What was measured is kept in a file; a point "
        "that fails is a row with its error."
    )
    add = parser.add_argument
    add("served", nargs="?", metavar="MODEL", help="the same as --model")
    add(
        "--vary",
        action="append",
        default=[],
        metavar="PATH=VALUE,...",
        help=f"a setting with its values, such as scheduler.policy=fair,fcfs or {VARY_EXAMPLE}; "
        "repeatable: all combinations are measured",
    )
    add_options(parser)
    add("--output", default=_DEFAULT_FILE, metavar="FILE", help=f"(default: {_DEFAULT_FILE})")
    add("--resume", action="store_true", help="keep what the file has, and measure what is missing")
    add("--json", action="store_true", help="print JSON")
    add("--html", metavar="FILE", help="also write a page with plots")


def run(options: argparse.Namespace, context: CommandContext) -> int:
    """Measure the points; return the exit code."""
    plan = _plan(options, context)
    points: list[Mapping[str, Any]] = []
    is_interrupted = False
    try:
        with ProgressLine(is_shown=not context.quiet) as progress:
            for record in context.sweep(plan, output=options.output, resume=options.resume):
                if record["record"] == "point":
                    points.append(record["point"])
                elif record["record"] == "end":
                    is_interrupted = record["interrupted"]
                else:
                    text = progress_text(record) if record["load"] else "starting"
                    progress.show(f"{record['variant']}: {text}")
    except KeyboardInterrupt:  # while a server starts
        is_interrupted = True
    results = {
        "plan": plan["plan"],
        "model": plan["plan"]["fields"]["model"] or plan["server"]["model"],
        "points": points,
        "interrupted": is_interrupted,
    }
    if options.html is not None:
        write_page(options.html, page(results, context.version))
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        _print(results, options.output)
    if is_interrupted:
        return INTERRUPTED
    return int(any(not (point["report"] and point["report"]["finished"]) for point in points))


def _plan(options: argparse.Namespace, context: CommandContext) -> dict[str, Any]:
    """Return the fields of a `hardpoint.bench.SweepPlan`."""
    model = options.served or getattr(options, "model", None)
    variants = {
        name: [f"{path}={text}" for path, text in settings.items()]
        for name, settings in combinations(varied(options.vary), ["scheduler.policy"]).items()
    }
    if options.url is not None:
        plan, address = plan_of(options, model), address_of(options)
        return {"plan": plan, "variants": variants, "address": address, "server": {"model": None}}
    refuse_address_options(options)
    loaded = None
    for settings in variants.values():  # refuses what is wrong before a server starts
        loaded, sources = context.load_config(*settings, model=model)
        context.load_catalog(loaded, sources)
    server = start_of(options, model if loaded is None else loaded.model)
    return {"plan": plan_of(options, None), "variants": variants, "server": server}


def _print(results: Mapping[str, Any], output: str) -> None:
    print(f"{results['model'] or 'the server'}: {load_text(results['plan'])}")
    print_tables(_tables(results["points"]))
    for line in _remarks(results["points"]):
        print(line)
    if results["interrupted"]:
        print(f"The sweep was interrupted: --resume goes on with {output}.")


def _name(point: Mapping[str, Any]) -> str:
    return f"{point['variant']}, {point['load']}"


def _reports(points: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {_name(point): point["report"] for point in points if point["report"] is not None}


def _tables(points: Sequence[Mapping[str, Any]]) -> Tables:
    rows = [
        [
            point["variant"],
            point["load"],
            *(["-"] * len(HEADERS) if point["report"] is None else cells(point["report"])),
        ]
        for point in points
    ]
    found: Tables = [("", ["variant", "load", *HEADERS], rows)]
    return found + group_tables("point", _reports(points))


def _remarks(points: Sequence[Mapping[str, Any]]) -> list[str]:
    errors = [f"{_name(point)}: failed: {point['error']}" for point in points if point["error"]]
    return [*errors, *remarks(_reports(points))]


def page(results: Mapping[str, Any], version: str) -> str:
    """Return the page of results, which are what `--json` prints."""
    points = results["points"]
    measured = {_name(point): point["curves"] for point in points if point["report"] is not None}
    variants = list(dict.fromkeys(point["variant"] for point in points))
    parts = [
        aside(f"{results['model'] or 'The server'}: {load_text(results['plan'])}."),
        *map(remark, _remarks(points)),
        "<h2>Variants</h2>",
        key(variants),
        plots([_by_load(variants, points, *one) for one in _BY_LOAD]),
        *(table(title or "Points", headers, rows) for title, headers, rows in _tables(points)),
        "<h2>Points</h2>",
        key(list(measured)),
        time_plots(measured),
        aside(f"{EXPLANATION} Hardpoint {version}."),
    ]
    return document("Sweep", parts)


_BY_LOAD = (
    ("Output tokens per second", "tokens/s", lambda report: report["output_rate"]),
    ("p95 of the time to the first token", "seconds", lambda report: report["ttft"]["p95"]),
    ("p95 of the time per further token", "ms", lambda report: 1e3 * report["tpot"]["p95"]),
    ("Requests that met the objective", "per second", lambda report: report["goodput"]),
)
"""Title, unit and figure of the plots over concurrency or rate."""


def _by_load(
    variants: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    title: str,
    unit: str,
    value: Any,
) -> str:
    """Return a plot of a figure over the concurrency or rate, with a curve per variant."""
    series = [
        Series(
            variant,
            sorted(
                (_place(point["traffic"]), value(point["report"]))
                for point in points
                if point["variant"] == variant and point["report"] is not None
            ),
        )
        for variant in variants
    ]
    rates = any(point["traffic"]["rate"] is not None for point in points)
    label = "requests per second" if rates else "streams"
    return figure(title, line_plot(series, x_label=label, y_label=unit))


def _place(traffic: Mapping[str, Any]) -> float:
    """Return the place of a load on the axis of loads."""
    return float(traffic["concurrency"] or traffic["rate"] or 0)
