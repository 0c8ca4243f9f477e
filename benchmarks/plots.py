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
    ("reuse of prompt tokens, %", lambda one: 100 * one["reuse"]),
    ("p99 time to the first token, ms", lambda one: 1e3 * one["ttft"]["p99"]),
    ("tokens computed: most / mean", lambda one: one["imbalance"]),
    ("microseconds per decision, median", lambda one: one["decisions"]["p50"]),
)


class _Panel:
    """A rectangle with axes, to which elements are added.

    Attributes:
        parts: the elements.
    """

    def __init__(self, title: str, left: float, top: float, size: tuple[int, int]) -> None:
        self.left, self.top, (self.width, self.height) = left, top, size
        self.parts = [f'<text x="{left}" y="{top - 8:.1f}">{escape(title)}</text>']

    def x(self, share: float) -> float:
        """Return the horizontal position of a share of the width."""
        return self.left + self.width * share

    def y(self, share: float) -> float:
        """Return the vertical position of a share of the height, from below."""
        return self.top + self.height * (1 - share)

    def line(self, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
        """Add a line between two positions."""
        (x1, y1), (x2, y2) = start, end
        places = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {places} stroke="{color}"/>')

    def label(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        """Add a text at a position."""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f"<text {place}>{escape(text)}</text>")

    def grid(self, highest: float, *, scale: float = 1.0, digits: str = "g") -> None:
        """Add horizontal lines with their values."""
        for tick in range(_TICKS + 1):
            y = self.y(tick / _TICKS)
            self.line((self.x(0), y), (self.x(1), y), "#ddd")
            value = scale * highest * tick / _TICKS
            self.label(self.left - 6, y + 4, f"{value:{digits}}", "end")


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def draw_fleets(results: Sequence[Mapping[str, Any]]) -> str:
    """Return four panels, in each a line per balancer over the number of engines."""
    names = list(dict.fromkeys(one["balancer"] for one in results))
    size, left, top, gap = (300, 160), 56, 52, 60
    parts = []
    for place, name in enumerate(names):
        legend = _Panel("", left + 130 * place, 14, size)
        legend.line((legend.left, 14), (legend.left + 22, 14), _COLORS[place % len(_COLORS)])
        legend.label(legend.left + 28, 18, name, "start")
        parts += legend.parts[1:]
    for number, (title, figure) in enumerate(_PANELS):
        x, y = left + (number % 2) * (size[0] + left), top + (number // 2) * (size[1] + gap)
        panel = _Panel(title, x, y, size)
        _draw_lines(panel, figure, results, names)
        parts += panel.parts
    return _document(2 * (left + size[0]) + 24, top + 2 * (size[1] + gap), parts)


def _draw_lines(
    panel: _Panel, figure: Figure, results: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> None:
    sizes = sorted({one["engines"] for one in results})
    highest = _round_up(max(figure(one) for one in results))
    span = math.log(sizes[-1] / sizes[0]) or 1.0
    places = {size: panel.x(math.log(size / sizes[0]) / span) for size in sizes}
    panel.grid(highest)
    for size, x in places.items():
        panel.label(x, panel.top + panel.height + 16, str(size))
    for place, name in enumerate(names):
        color = _COLORS[place % len(_COLORS)]
        points = [
            (places[one["engines"]], panel.y(figure(one) / highest))
            for one in results
            if one["balancer"] == name
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f'fill="none" stroke="{color}" stroke-width="2"'
        panel.parts.append(f'<polyline points="{line}" {style}/>')
        panel.parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points
        ]


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
        x, width = panel.x(times["sent"] / seconds), size[0] * wait / seconds
        panel.parts.append(
            f'<rect x="{x:.1f}" y="{panel.top}" height="{size[1]}" fill="#e8e8e8" '
            f'width="{width:.1f}"/>'
        )
        panel.grid(longest, scale=1e3, digits=".0f")
        for tick in range(_TICKS + 1):
            at = f"{seconds * tick / _TICKS:.1f} s"
            panel.label(panel.x(tick / _TICKS), panel.top + size[1] + 14, at)
        for at_s, gap in times["gaps"]:
            x = panel.x(at_s / seconds)
            panel.line((x, panel.y(0)), (x, panel.y(gap / longest)), _COLORS[0])
        parts += panel.parts
    return _document(left + size[0] + 20, top + len(plotted) * (size[1] + between), parts)
