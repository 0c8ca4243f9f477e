"""Figures of reports as text, and tables that all of them have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.builtin_plugins.commands.tables import print_table

_MOST_TENANTS = 20  # of a load, by requests

Rows = list[list[str]]
Tables = list[tuple[str, Sequence[str], Rows]]
"""Title, headers and rows of each table; the first one may have no title."""


def print_tables(tables: Tables) -> None:
    """Print tables, each under its title."""
    for title, headers, rows in tables:
        if title:
            print(f"\n{title}")
        print_table(headers, rows)


def group_tables(first: str, reports: Mapping[str, Mapping[str, Any]]) -> Tables:
    """Return tables of tenants and conversations, where reports have any.

    Args:
        first: header of the names of reports.
        reports: reports by their names.
    """
    tables: Tables = []
    if any(report["tenants"] for report in reports.values()):
        headers = [first, "tenant", "requests", "TTFT p50", "p95", "TPOT p50", "p95", "in SLO"]
        tables.append(("by tenant", headers, _tenant_rows(reports)))
    if any(report["conversations"] for report in reports.values()):
        headers = [first, "conversations", "turns", "duration p50", "p95"]
        headers += ["waited p50", "p95", "all turns in SLO"]
        tables.append(("by conversation", headers, _conversation_rows(reports)))
    return tables


def _tenant_rows(reports: Mapping[str, Mapping[str, Any]]) -> Rows:
    rows = []
    for name, report in reports.items():
        tenants = sorted(report["tenants"].items(), key=lambda item: -item[1]["finished"])
        for tenant, figures in tenants[:_MOST_TENANTS]:
            ttft, tpot = figures["ttft"], figures["tpot"]
            times = [
                milliseconds(times_of[key]) for times_of in (ttft, tpot) for key in ("p50", "p95")
            ]
            rows.append(
                [name, tenant, str(figures["finished"]), *times, percent(figures["goodput_share"])]
            )
    return rows


def _conversation_rows(reports: Mapping[str, Mapping[str, Any]]) -> Rows:
    rows = []
    for name, report in reports.items():
        if figures := report["conversations"]:
            times = [
                f"{figures[field][key]:.2f} s"
                for field in ("seconds", "waited")
                for key in ("p50", "p95")
            ]
            turns = f"{figures['turns']:.1f}"
            share = percent(figures["goodput_share"])
            rows.append([name, str(figures["count"]), turns, *times, share])
    return rows


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with the digits that matter."""
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def percent(share: float) -> str:
    """Return a share from 0 to 1 in percent."""
    return f"{100 * share:.1f} %"


def change_text(change: float | None) -> str:
    """Return a relative change in percent; `-` where there was nothing to compare with."""
    return "-" if change is None else f"{100 * change:+.1f} %"
