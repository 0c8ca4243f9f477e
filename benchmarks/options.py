"""Command lines of benchmarks as data, and results as tables and files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table


def options_of(
    doc: str | None, *, scenarios: Mapping[str, Any] | None = None, **options: Any
) -> argparse.Namespace:
    """Parse the command line of a benchmark.

    Args:
        doc: docstring of the program, which `--help` prints.
        scenarios: the first argument is one of these names, by default the first one.
        options: by name of the option its default, or a pair of default and help. A bool is a
            flag, a list takes values, a mapping takes some of its keys and has all by default. A
            type takes a value of it and `list[T]` several, both with the default None.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if scenarios is not None:
        first = next(iter(scenarios))
        parser.add_argument("scenario", nargs="?", choices=scenarios, default=first)
    options["json"] = Path, "also write the result here"
    for name, option in options.items():
        default, text = option if isinstance(option, tuple) else (option, "")
        kind, suffix = _kind(default), " (default: %(default)s)"
        parser.add_argument(
            f"--{name.replace('_', '-')}", help=text + suffix * ("default" in kind), **kind
        )
    return parser.parse_args()


def _kind(default: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a default."""
    if isinstance(default, bool):
        return {"action": "store_true"}
    if isinstance(default, Mapping):
        return {"nargs": "+", "choices": default, "default": list(default)}
    if isinstance(default, list):
        return {"nargs": "*", "type": type(default[0]), "default": default}
    if types := get_args(default):
        return {"action": "extend", "nargs": "*", "type": types[0]}
    if isinstance(default, type):
        return {"type": default}
    return {"type": type(default), "default": default}


def save(file: Path | None, result: Any) -> None:
    """Write a result as JSON, if there is a file for it."""
    if file is not None:
        file.write_text(json.dumps(result, indent=1))


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
