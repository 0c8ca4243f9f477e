"""`hardpoint bench serve`: sends loads to a server, and reports what its clients see."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from hardpoint.builtin_plugins.commands.loads.document import (
    aside,
    document,
    key,
    remark,
    table,
    time_plots,
    write_page,
)
from hardpoint.builtin_plugins.commands.loads.figures import print_tables
from hardpoint.builtin_plugins.commands.loads.progress import ProgressLine
from hardpoint.errors import shown
from hardpoint.plugins import CommandContext

from .load_options import add_options, address_of, plan_of, refuse_address_options, start_of
from .summary import remarks, tables

INTERRUPTED = 130
"""Exit code after an interrupt."""
EXPLANATION = (
    "TTFT: time to the first token; TPOT: mean time per further token of a request; ITL: time "
    "between two chunks; e2e: time to the end of the answer; hits: share of the prompt tokens that "
    "a cache had. Times are those of requests that ended well."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Send requests to a server that speaks OpenAI's API, Hardpoint's or another, and report "
        "what its clients see. Without --url, `hardpoint serve MODEL` is started for it."
    )
    add = parser.add_argument
    add("served", nargs="?", metavar="MODEL", help="the same as --model")
    add_options(parser)
    add("--json", action="store_true", help="print JSON")
    add("--html", metavar="FILE", help="also write a page with plots")


def run(options: argparse.Namespace, context: CommandContext) -> int:
    """Send the loads; return the exit code."""
    model = options.served or getattr(options, "model", None)
    if options.url is None:
        refuse_address_options(options)
        context.load_config(model=model)  # refuses what is wrong before a server starts
        plan, server = plan_of(options, None), start_of(options, model)
    else:
        plan, server = plan_of(options, model), address_of(options)
    results: dict[str, Any] = {"plan": plan, "url": options.url, "loads": {}}
    with ProgressLine(is_shown=not context.quiet) as progress:
        progress.show("starting" if options.url is None else f"asking {shown(options.url)}")
        for record in context.measure_server(server, plan):
            if record["record"] == "progress":
                progress.show(progress_text(record))
            elif record["record"] == "result":
                results["loads"][record["load"]] = {
                    name: record[name] for name in ("report", "curves")
                }
            else:
                results |= {name: record[name] for name in ("model", "notes", "interrupted")}
    _show(results, options, context.version)
    if results["interrupted"]:
        return INTERRUPTED
    reports = [found["report"] for found in results["loads"].values()]
    return int(any(not report["finished"] for report in reports))


def _show(results: Mapping[str, Any], options: argparse.Namespace, version: str) -> None:
    if options.html is not None:
        write_page(options.html, page(results, version))
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        _print(results)


def progress_text(record: Mapping[str, Any]) -> str:
    """Return the line of progress of a load."""
    of = "" if record["of"] is None else f" of {record['of']}"
    ended = record["good"] + record["failed"]
    return (
        f"{record['load']}: {ended}{of} requests, {record['failed']} failed, "
        f"{record['seconds']:.0f} s"
    )


def _print(results: Mapping[str, Any]) -> None:
    reports = {name: found["report"] for name, found in results["loads"].items()}
    print(f"{results['model']}: {load_text(results['plan'])}")
    print_tables(tables(reports))
    for line in [*remarks(reports), *results["notes"]]:
        print(line)
    if results["interrupted"]:
        print("The load was interrupted: this is what was measured until then.")


def load_text(plan: Mapping[str, Any]) -> str:
    """Return the description of a load."""
    load = plan["load"]
    text = (
        f"trace {load['trace']}"
        if "trace" in load
        else f"synthetic {json.dumps(load['synthetic'])}"
    )
    if load["speed"] != 1:
        text += f", {load['speed']:g} times as fast"
    ttft, tpot = (1e3 * plan["objective"][name] for name in ("ttft", "tpot"))
    return f"{text}; SLO {ttft:g} ms to the first token, {tpot:g} ms per further one"


def page(results: Mapping[str, Any], version: str) -> str:
    """Return the page of results, which are what `--json` prints."""
    loads = results["loads"]
    reports = {name: found["report"] for name, found in loads.items()}
    where = f" at {results['url']}" if results["url"] else ""
    parts = [
        aside(f"{results['model']}{where}: {load_text(results['plan'])}."),
        *map(remark, [*remarks(reports), *results["notes"]]),
        key(list(reports)),
        time_plots({name: found["curves"] for name, found in loads.items()}),
        *(table(title or "Loads", headers, rows) for title, headers, rows in tables(reports)),
        aside(f"{EXPLANATION} Hardpoint {version}."),
    ]
    return document("Load on a server", parts)
