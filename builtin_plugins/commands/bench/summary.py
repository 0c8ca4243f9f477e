"""The reports of loads as tables of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.builtin_plugins.commands.loads.figures import (
    Tables,
    group_tables,
    milliseconds,
    percent,
)

HEADERS = (
    *("ok", "failed", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "ITL p99", "e2e p50", "p95"),
    *("in SLO", "goodput", "req/s", "out tok/s", "hits"),
)
"""Headers of the cells of a load."""


def tables(reports: Mapping[str, Mapping[str, Any]]) -> Tables:
    """Return the tables of loads, by their names."""
    rows = [[name, *cells(report)] for name, report in reports.items()]
    return [("", ["load", *HEADERS], rows), *group_tables("load", reports)]


def cells(report: Mapping[str, Any]) -> list[str]:
    """Return the cells of a load."""
    counts = [str(report["finished"]), str(report["failed"])]
    if not report["finished"]:
        return [*counts, *["-"] * (len(HEADERS) - len(counts))]
    ttft, tpot, e2e = report["ttft"], report["tpot"], report["e2e"]
    return [
        *counts,
        *(milliseconds(ttft[key]) for key in ("p50", "p95", "p99")),
        *(milliseconds(tpot[key]) for key in ("p50", "p95")),
        milliseconds(report["itl"]["p99"]),
        *(f"{e2e[key]:.2f} s" for key in ("p50", "p95")),
        percent(report["goodput_share"]),
        f"{report['goodput']:.2f}/s",
        f"{report['request_rate']:.2f}",
        f"{report['output_rate']:.1f}",
        "-" if report["reuse"] is None else percent(report["reuse"]),
    ]


def remarks(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return lines about what went wrong, and what figures mean."""
    lines = []
    for name, report in reports.items():
        lines += [f"{name}: {count} failed: {kind}" for kind, count in report["errors"].items()]
        if report["unfinished"]:
            lines.append(f"{name}: {report['unfinished']} were interrupted, and are in no figure")
        lines += [f"{name}: {note}" for note in report["notes"]]
        lines += [f"{name}: the client was the limit: {one}" for one in report["client"]["limits"]]
    return lines
