"""The results of simulations as tables of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.builtin_plugins.commands.loads.figures import (
    Tables,
    change_text,
    group_tables,
    milliseconds,
    percent,
    print_tables,
)

CHANGES = (
    ("ttft.p50", "TTFT p50"),
    ("ttft.p95", "TTFT p95"),
    ("tpot.p50", "TPOT p50"),
    ("tpot.p95", "TPOT p95"),
    ("e2e.p50", "e2e p50"),
    ("e2e.p95", "e2e p95"),
    ("goodput", "goodput"),
)
"""Figures that are compared, and their headers."""


def print_summary(results: Mapping[str, Any]) -> None:
    """Print the results as tables, and remarks after them."""
    reports = {name: results["report"] for name, results in results["variants"].items()}
    print_tables(tables(reports, results["comparison"]))
    for line in remarks(reports):
        print(line)


def tables(reports: Mapping[str, Mapping[str, Any]], comparison: Mapping[str, Any]) -> Tables:
    """Return title, headers and rows of each table."""
    headers = ["variant", "requests", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "p99"]
    headers += ["e2e p50", "p95", "in SLO", "goodput", "hits", "preempted"]
    result: Tables = [("", headers, [_row(name, report) for name, report in reports.items()])]
    if changes := comparison["changes"]:
        rows = [
            [name, *(change_text(change[key]) for key, _ in CHANGES)]
            for name, change in changes.items()
        ]
        names = ["variant", *(text for _, text in CHANGES)]
        result.append((f"compared with {comparison['with']}", names, rows))
    result += group_tables("variant", reports)
    return result


def _row(name: str, report: Mapping[str, Any]) -> list[str]:
    ttft, tpot, e2e = report["ttft"], report["tpot"], report["e2e"]
    return [
        name,
        str(report["finished"]),
        *(milliseconds(ttft[key]) for key in ("p50", "p95", "p99")),
        *(milliseconds(tpot[key]) for key in ("p50", "p95", "p99")),
        *(f"{e2e[key]:.2f} s" for key in ("p50", "p95")),
        percent(report["goodput_share"]),
        f"{report['goodput']:.2f}/s",
        percent(report["reuse"]),
        str(report["preemptions"]),
    ]


def remarks(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return lines about errors."""
    lines = []
    for name, report in reports.items():
        if report["refused"]:
            first = next(iter(report["refusals"].values()), "")
            lines.append(f"{name}: {report['refused']} requests were refused: {first}")
        if report["unfinished"]:
            lines.append(f"{name}: {report['unfinished']} requests have not ended")
        lines += [
            f"{name}: {plugin} failed {count} times" for plugin, count in report["faults"].items()
        ]
    return lines
