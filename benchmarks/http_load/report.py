"""Figures of loads as a table and lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from http_load.figures import PERCENTILES

TIMES = ("TTFT", "TPOT", "ITL", "E2E")
_RATES = ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second")


def show(title: str, results: dict[str, dict[str, Any]], notes: Sequence[str] = ()) -> None:
    """Print the figures of loads by name, with their errors and notes.

    Args:
        title: title of the table.
        results: what `figures` returned.
        notes: further lines.
    """
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(title=f"{title}; times in milliseconds")
    table.add_column("load", no_wrap=True)
    for column in ("ok", "failed", "req/s", "out tok/s", "all tok/s"):
        table.add_column(column, justify="right")
    table.add_column("", no_wrap=True)
    for name in TIMES:
        table.add_column(name, justify="right")
    for name, result in results.items():
        _add(table, name, result)
    console.print(table)
    for name, result in results.items():
        for kind, count in result["errors"].items():
            console.print(f"{name}: {count} failed: {kind}", markup=False)
        for note in result["notes"]:
            console.print(f"{name}: {note}", markup=False)
        for limit in result["client"]["limits"]:
            line = f"{name}: THE CLIENT WAS THE LIMIT: {limit}"
            console.print(line, style="bold red", markup=False)
    for note in notes:
        console.print(note, markup=False)


def _add(table: Table, name: str, result: dict[str, Any]) -> None:
    """Add a row per percentile, of which the first has what is not a percentile, too."""
    good = result["requests"] - result["failed"]
    first = [name, str(good), str(result["failed"])]
    requests, *tokens = (result[rate] for rate in _RATES)
    first += [f"{requests:.2f}", *(f"{value:.1f}" for value in tokens)]
    for percentile in PERCENTILES:
        times = [result["ms"][kind] for kind in TIMES]
        cells = [f"{found[percentile]:.1f}" if found else "-" for found in times]
        table.add_row(*first, percentile, *cells)
        first = [""] * len(first)
    table.add_section()
