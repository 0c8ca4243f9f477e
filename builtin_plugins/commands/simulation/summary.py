"""The results of simulations as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.builtin_plugins.commands.tables import print_table

_MOST_TENANTS = 20  # per variant, by requests

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

Rows = list[list[str]]


def print_summary(results: Mapping[str, Any]) -> None:
    """Print the results as tables, and remarks after them."""
    reports = {name: found["report"] for name, found in results["variants"].items()}
    for title, headers, rows in tables(reports, results["comparison"]):
        if title:
            print(f"\n{title}")
        print_table(headers, rows)
    for line in remarks(reports):
        print(line)


def tables(
    reports: Mapping[str, Mapping[str, Any]], comparison: Mapping[str, Any]
) -> list[tuple[str, Sequence[str], Rows]]:
    """Return title, headers and rows of each table."""
    headers = ["variant", "requests", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "p99"]
    headers += ["e2e p50", "p95", "in SLO", "goodput", "hits", "preempted"]
    found: list[tuple[str, Sequence[str], Rows]] = [
        ("", headers, [_row(name, report) for name, report in reports.items()])
    ]
    if changes := comparison["changes"]:
        rows = [
            [name, *(change_text(one[key]) for key, _ in CHANGES)] for name, one in changes.items()
        ]
        names = ["variant", *(text for _, text in CHANGES)]
        found.append((f"compared with {comparison['with']}", names, rows))
    if any(report["tenants"] for report in reports.values()):
        headers = ["variant", "tenant", "requests", "TTFT p50", "p95", "TPOT p50", "p95", "in SLO"]
        found.append(("by tenant", headers, _tenant_rows(reports)))
    if any(report["conversations"] for report in reports.values()):
        headers = ["variant", "conversations", "turns", "duration p50", "p95"]
        headers += ["waited p50", "p95", "all turns in SLO"]
        found.append(("by conversation", headers, _conversation_rows(reports)))
    return found


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


def _tenant_rows(reports: Mapping[str, Mapping[str, Any]]) -> Rows:
    rows = []
    for name, report in reports.items():
        tenants = sorted(report["tenants"].items(), key=lambda item: -item[1]["finished"])
        for tenant, found in tenants[:_MOST_TENANTS]:
            ttft, tpot = found["ttft"], found["tpot"]
            times = [milliseconds(one[key]) for one in (ttft, tpot) for key in ("p50", "p95")]
            rows.append(
                [name, tenant, str(found["finished"]), *times, percent(found["goodput_share"])]
            )
    return rows


def _conversation_rows(reports: Mapping[str, Mapping[str, Any]]) -> Rows:
    rows = []
    for name, report in reports.items():
        if found := report["conversations"]:
            times = [
                f"{found[one][key]:.2f} s"
                for one in ("seconds", "waited")
                for key in ("p50", "p95")
            ]
            turns = f"{found['turns']:.1f}"
            share = percent(found["goodput_share"])
            rows.append([name, str(found["count"]), turns, *times, share])
    return rows


def remarks(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return lines about what went wrong."""
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


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with the digits that matter."""
    found = 1e3 * seconds
    return f"{found:.0f} ms" if found >= 100 else f"{found:.1f} ms"


def percent(share: float) -> str:
    """Return a share from 0 to 1 in percent."""
    return f"{100 * share:.1f} %"


def change_text(change: float | None) -> str:
    """Return a relative change in percent; `-` where there was nothing to compare with."""
    return "-" if change is None else f"{100 * change:+.1f} %"
