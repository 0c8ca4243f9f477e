"""An SVG of the figures of benchmarks/fleet.py, by balancer and number of engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 160, 56, 52, 60
_COLOURS = ("#1f5fa8", "#c0504d", "#5a8a3a", "#7a5195", "#b8860b")
_TICKS = 4

Figure = Callable[[Mapping[str, Any]], float]
_PANELS: tuple[tuple[str, Figure], ...] = (
    ("reuse of prompt tokens, %", lambda one: 100 * one["reuse"]),
    ("p99 time to the first token, ms", lambda one: 1e3 * one["ttft"]["p99"]),
    ("tokens computed: most / mean", lambda one: one["imbalance"]),
    ("microseconds per decision, median", lambda one: one["decisions"]["p50"]),
)


def draw(results: Sequence[Mapping[str, Any]]) -> str:
    """Return four panels, in each a line per balancer over the number of engines."""
    names = list(dict.fromkeys(one["balancer"] for one in results))
    width = 2 * (_LEFT + _WIDTH) + 24
    height = _TOP + 2 * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, name in enumerate(names):
        x = _LEFT + 130 * place
        parts += [
            f'<line x1="{x}" x2="{x + 22}" y1="14" y2="14" stroke="{_colour(place)}" '
            f'stroke-width="2"/>',
            f'<text x="{x + 28}" y="18">{escape(name)}</text>',
        ]
    for number, (title, figure) in enumerate(_PANELS):
        left = _LEFT + (number % 2) * (_WIDTH + _LEFT)
        top = _TOP + (number // 2) * (_HEIGHT + _GAP)
        parts += _panel(title, figure, results, names, left, top)
    return "\n".join([*parts, "</svg>\n"])


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _panel(
    title: str,
    figure: Figure,
    results: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    left: float,
    top: float,
) -> list[str]:
    sizes = sorted({one["engines"] for one in results})
    highest = _round_up(max(figure(one) for one in results))
    span = math.log(sizes[-1] / sizes[0]) or 1.0

    def x(size: int) -> float:
        return left + _WIDTH * math.log(size / sizes[0]) / span

    def y(value: float) -> float:
        return top + _HEIGHT * (1 - value / highest)

    parts = [f'<text x="{left}" y="{top - 8}">{escape(title)}</text>']
    for tick in range(_TICKS + 1):
        value = highest * tick / _TICKS
        parts += [
            f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#ddd"/>',
            f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>',
        ]
    parts += [
        f'<text x="{x(size):.1f}" y="{top + _HEIGHT + 16}" text-anchor="middle">{size}</text>'
        for size in sizes
    ]
    for place, name in enumerate(names):
        points = [(x(one["engines"]), y(figure(one))) for one in results if one["balancer"] == name]
        line = " ".join(f"{at:.1f},{value:.1f}" for at, value in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{_colour(place)}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{at:.1f}" cy="{value:.1f}" r="3" fill="{_colour(place)}"/>'
            for at, value in points
        ]
    return parts


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 6, 8 times a power of ten; 1 for what is not above 0."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 2, 4, 6, 8, 10) if step * scale >= value)
