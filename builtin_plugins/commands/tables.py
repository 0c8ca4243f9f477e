"""Tables: fitted to a terminal, or blocks if it is narrow; plain aligned columns otherwise."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

_NARROW = 60  # of a terminal on which a table would show the beginnings of cells alone


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, dim: Sequence[bool] = ()
) -> None:
    """Print rows to standard output under headers.

    Args:
        headers: one per column.
        rows: cells, as many per row as there are headers.
        dim: per row, whether it is dimmed on a terminal.
    """
    if sys.stdout.isatty():
        if shutil.get_terminal_size().columns < _NARROW:
            _print_blocks(headers, rows)
        else:
            _print_rich(headers, rows, dim or [False] * len(rows))
        return
    table = [[header.upper() for header in headers], *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headers))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _print_blocks(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print each row on lines of its own, for a terminal that a table would not fit."""
    for row in rows:
        for header, cell in zip(headers, row, strict=True):
            if cell:
                print(f"{header}: {cell}")
        print()


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], dim: Sequence[bool]) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import, wanted on terminals only
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers[:-1]:
        table.add_column(header.upper(), no_wrap=True)
    table.add_column(headers[-1].upper(), overflow="fold", min_width=16)
    for row, weak in zip(rows, dim, strict=True):
        table.add_row(*(Text(cell) for cell in row), style="dim" if weak else "")
    Console(highlight=False).print(table)
