"""Draw docs/architecture.svg: the packages by layer, and the imports between them.

scripts/architecture           writes the picture
scripts/architecture --check   exits with 1 if the picture differs from the imports

An arrow means that modules of one package import modules of another one, imports for type checking
included. An arrow is left out if a chain of others has the same meaning. Needs `grimp`, which comes
with import-linter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"
API = "hardpoint"


class Box(NamedTuple):
    """A package in the picture.

    Attributes:
        title: import name.
        folder: where its files are.
        role: content in a few words.
        column: 0 for built-ins and kernels, 1 for the engine.
        row: layer from the top.
    """

    title: str
    folder: str
    role: str
    column: int
    row: int


BOXES = {
    API: Box("hardpoint", "src/hardpoint/", "LLM, AsyncLLM, command line", 1, 0),
    "testing": Box("hardpoint.testing", "plugins/testing/", "conformance kit", 1, 1),
    "deployment": Box(
        "hardpoint.process, .replicas, ...",
        "deployment/",
        "processes, replicas, Ray, journals",
        1,
        2,
    ),
    "core": Box("hardpoint.core", "core/", "scheduling loop, KV cache, workers", 1, 3),
    "host": Box("hardpoint.host", "host/", "discovery, guards, messages", 1, 4),
    "builtin_plugins": Box(
        "hardpoint.builtin_plugins", "builtin_plugins/", "loaded by entry point alone", 0, 4
    ),
    "toolkit": Box("hardpoint.toolkit", "plugins/toolkit/", "libraries for authors", 1, 5),
    "kernels": Box("hardpoint.kernels", "kernels/", "C++ and Triton", 0, 6),
    "plugins": Box("hardpoint.plugins", "plugins/contract/", "interfaces of all kinds", 1, 6),
    "typed": Box("hardpoint.typed", "plugins/typed/", "options and arguments", 1, 7),
}
DEPLOYMENT = ("bench", "simulation", "ray_serve", "replicas", "journal", "process")
LEFT_OUT = ("errors",)
"""Modules that every package imports."""
WIDTH, HEIGHT, GAP, MARGIN = 300, 50, 26, 60


def main() -> int:
    """Write or check the picture; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if the picture is old")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    picture = drawn(reduced(arrows()))
    if not options.check:
        PICTURE.write_text(picture, encoding="utf-8")
    elif not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture:
        print(
            f"{PICTURE.relative_to(ROOT)}: expected the present imports; run scripts/architecture"
        )
        return 1
    return 0


def box_of(module: str) -> str | None:
    """Return the key of the box of a module, None for a module that is left out."""
    top = module.split(".")[1] if "." in module else ""
    if top in LEFT_OUT:
        return None
    if top in DEPLOYMENT:
        return "deployment"
    return top if top in BOXES else API


def arrows() -> set[tuple[str, str]]:
    """Return the pairs of boxes with imports from the first to the second."""
    graph = grimp.build_graph("hardpoint", cache_dir=None)
    pairs = {
        (box_of(module), box_of(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    return {(a, b) for a, b in pairs if a is not None and b is not None and a != b and b != API}


def reduced(pairs: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs that no chain of other pairs connects."""

    def reaches(start: str, end: str, without: tuple[str, str]) -> bool:
        nexts = {b for a, b in pairs if a == start and (a, b) != without}
        return end in nexts or any(reaches(each, end, without) for each in nexts)

    return sorted(pair for pair in pairs if not reaches(*pair, pair))


def drawn(pairs: list[tuple[str, str]]) -> str:
    """Return the picture as SVG."""
    rows = max(box.row for box in BOXES.values()) + 1
    width = 2 * WIDTH + 3 * MARGIN
    height = rows * (HEIGHT + GAP) + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            '<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker>',
            *(line for box in BOXES.values() for line in box_lines(box)),
            *(arrow_line(BOXES[a], BOXES[b]) for a, b in pairs),
            "</svg>\n",
        ]
    )


def place(box: Box) -> tuple[int, int]:
    """Return the upper left corner of a box."""
    return MARGIN + box.column * (WIDTH + MARGIN), GAP + box.row * (HEIGHT + GAP)


def box_lines(box: Box) -> Iterator[str]:
    """Yield the lines of a box."""
    x, y = place(box)
    yield (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#eef3fa" '
        'stroke="#1f5fa8"/>'
    )
    yield f'<text x="{x + 12}" y="{y + 20}" font-weight="bold">{escape(box.title)}</text>'
    yield f'<text x="{x + 12}" y="{y + 38}" fill="#444">{escape(f"{box.folder} {box.role}")}</text>'


def arrow_line(source: Box, target: Box) -> str:
    """Return the arrow between two boxes."""
    (x1, y1), (x2, y2) = place(source), place(target)
    if source.column == target.column and target.row == source.row + 1:
        path = f"M{x1 + WIDTH // 2},{y1 + HEIGHT} L{x2 + WIDTH // 2},{y2}"
    elif source.column == target.column:
        side = x1 + (WIDTH if source.column else 0)
        bend = side + (MARGIN - 10 if source.column else 10 - MARGIN)
        middle = y1 + HEIGHT // 2, y2 + HEIGHT // 2
        path = f"M{side},{middle[0]} C{bend},{middle[0]} {bend},{middle[1]} {side},{middle[1]}"
    else:
        start = x1 + (0 if source.column else WIDTH)
        end = x2 + (WIDTH if source.column else 0)
        path = f"M{start},{y1 + HEIGHT // 2} L{end},{y2 + HEIGHT // 2}"
    return f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#head)"/>'


if __name__ == "__main__":
    sys.exit(main())
