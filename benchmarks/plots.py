"""SVG files of figures: lines over the number of engines, and gaps between tokens over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

_COLORS = ("#1f5fa8", "#c0504d", "#5a8a3a", "#7a5195", "#b8860b")
_TICKS = 4
Figure = Callable[[Mapping[str, Any]], float]
_PANELS: tuple[tuple[str, Figure], ...] = (
    ("reuse of prompt tokens, %", lambda result: 100 * result["reuse"]),
    ("p99 time to the first token, ms", lambda result: 1e3 * result["ttft"]["p99"]),
    ("tokens computed: most / mean", lambda result: result["imbalance"]),
    ("microseconds per decision, median", lambda result: result["decisions"]["p50"]),
)


class _Panel:
    """A rectangle with axes, to which elements are added.

    Attributes:
        parts: the elements.
    """

    def __init__(self, title: str, left: float, top: float, size: tuple[int, int]) -> None:
        self.left, self.top, (self.width, self.height) = left, top, size
        self.parts = [f'<text x="{left}" y="{top - 8:.1f}">{escape(title)}</text>']

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of shares of the width, and of the height from below."""
        return self.left + self.width * x, self.top + self.height * (1 - y)

    def line(self, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
        """Add a line between two positions."""
        (x1, y1), (x2, y2) = start, end
        places = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {places} stroke="{color}"/>')

    def label(self, place: tuple[float, float], text: str, anchor: str = "middle") -> None:
        """Add a text at a position."""
        where = f'x="{place[0]:.1f}" y="{place[1]:.1f}" text-anchor="{anchor}"'
        self.parts.append(f"<text {where}>{escape(text)}</text>")

    def grid(self, highest: float, *, scale: float = 1.0, digits: str = "g") -> None:
        """Add horizontal lines with their values."""
        for tick in range(_TICKS + 1):
            x, y = self.at(0, tick / _TICKS)
            self.line((x, y), self.at(1, tick / _TICKS), "#ddd")
            self.label((x - 6, y + 4), f"{scale * highest * tick / _TICKS:{digits}}", "end")


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def draw_fleets(results: Sequence[Mapping[str, Any]]) -> str:
    """Return four panels, in each a line per balancer over the number of engines."""
    names = list(dict.fromkeys(result["balancer"] for result in results))
    sizes = sorted({result["engines"] for result in results})
    span = math.log(sizes[-1] / sizes[0]) or 1.0
    (width, height), left, top, gap = (300, 160), 56, 52, 60
    legend = _Panel("", left, 14, (0, 0))
    for place, name in enumerate(names):
        x = left + 130 * place
        legend.line((x, 14), (x + 22, 14), _COLORS[place % len(_COLORS)])
        legend.label((x + 28, 18), name, "start")
    parts = legend.parts[1:]
    for number, (title, figure) in enumerate(_PANELS):
        x, y = left + (number % 2) * (width + left), top + (number // 2) * (height + gap)
        panel = _Panel(title, x, y, (width, height))
        highest = _round_up(max(figure(result) for result in results))
        panel.grid(highest)
        for size in sizes:
            x, y = panel.at(math.log(size / sizes[0]) / span, 0)
            panel.label((x, y + 16), str(size))
        for place, name in enumerate(names):
            color = _COLORS[place % len(_COLORS)]
            points = [
                panel.at(math.log(result["engines"] / sizes[0]) / span, figure(result) / highest)
                for result in results
                if result["balancer"] == name
            ]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            style = f'fill="none" stroke="{color}" stroke-width="2"'
            panel.parts.append(f'<polyline points="{line}" {style}/>')
            panel.parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points
            ]
        parts += panel.parts
    return _document(2 * (left + width) + 24, top + 2 * (height + gap), parts)


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 6, 8 times a power of ten; 1 for values that are not positive."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 2, 4, 6, 8, 10) if step * scale >= value)


def draw_gaps(plotted: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a panel per engine, with the same axes: milliseconds between tokens over time.

    Args:
        plotted: by name, the result of `engine_process.run_long_prompt`.
    """
    seconds = max(at for times in plotted.values() for at, _ in times["gaps"])
    longest = max(gap for times in plotted.values() for _, gap in times["gaps"])
    size, left, top, between = (720, 120), 60, 30, 44
    parts = []
    for number, (name, times) in enumerate(plotted.items()):
        greatest, wait = max(gap for _, gap in times["gaps"]), times["first"] - times["sent"]
        title = f"{name}: at most {1e3 * greatest:.0f} ms, first token after {1e3 * wait:.0f} ms"
        panel = _Panel(title, left, top + number * (size[1] + between), size)
        (x, _), width = panel.at(times["sent"] / seconds, 0), size[0] * wait / seconds
        shape = f'x="{x:.1f}" y="{panel.top}" height="{size[1]}" width="{width:.1f}"'
        panel.parts.append(f'<rect {shape} fill="#e8e8e8"/>')
        panel.grid(longest, scale=1e3, digits=".0f")
        for tick in range(_TICKS + 1):
            x, y = panel.at(tick / _TICKS, 0)
            panel.label((x, y + 14), f"{seconds * tick / _TICKS:.1f} s")
        for at_s, gap in times["gaps"]:
            panel.line(
                panel.at(at_s / seconds, 0), panel.at(at_s / seconds, gap / longest), _COLORS[0]
            )
        parts += panel.parts
    return _document(left + size[0] + 20, top + len(plotted) * (size[1] + between), parts)
