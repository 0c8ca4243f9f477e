"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def show_table(
    title: str, headings: Iterable[object], rows: Iterable[Sequence[object]], *, width: int = 120
) -> None:
    """Print a table with the first column aligned to the left."""
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(str(heading), justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width).print(table)
