"""Plots as SVG inside a page; the styles of the page set the colors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 440, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 38
NUM_COLOURS = 8

Points = Sequence[tuple[float, float]]


class Series(NamedTuple):
    """A curve."""

    name: str
    points: Points


class _Axis(NamedTuple):
    """Where values are on an axis, and the values that are written at it."""

    place: Callable[[float], float]
    ticks: Sequence[float]


def line_plot(
    series: Sequence[Series], *, x_label: str, y_label: str, log_x: bool = False, y_top: float = 0
) -> str:
    """Return a plot of curves.

    Args:
        series: the curves; the n-th one has the n-th color.
        x_label, y_label: labels of the axes.
        log_x: whether x is logarithmic; values of at most 0 are left out then.
        y_top: greatest value of y; 0 takes it from the curves.
    """
    drawn = [
        Series(line.name, [(x, y) for x, y in line.points if x > 0 or not log_x]) for line in series
    ]
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    if not xs:
        return '<p class="empty">No requests to show.</p>'
    across = _log_axis(min(xs), max(xs)) if log_x else _axis(0, max(xs), _LEFT, WIDTH - _RIGHT)
    up = _axis(0, y_top or max(ys), HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(across, up, x_label, y_label)]
    for number, line in enumerate(drawn):
        path = " ".join(f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in line.points)
        parts.append(
            f'<polyline class="line c{number % NUM_COLOURS}" points="{path}">'
            f"<title>{escape(line.name)}</title></polyline>"
        )
    label = escape(f"{y_label} by {x_label}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _frame(across: _Axis, up: _Axis, x_label: str, y_label: str) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for tick in across.ticks:
        x = across.place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{short(tick)}</text>'
        )
    for tick in up.ticks:
        y = up.place(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        )
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text class="label" x="{(_LEFT + right) / 2}" y="{HEIGHT - 5}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
        f'<text class="label" transform="rotate(-90 12 {middle})" x="12" y="{middle}" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _axis(low: float, high: float, start: float, end: float) -> _Axis:
    high = high if high > low else low + 1
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (10, 5, 2, 1) if unit * factor <= rough)
    count = math.floor((high - low) / step + 1e-9)
    ticks = [low + step * number for number in range(count + 1)]
    return _Axis(lambda value: start + (end - start) * (value - low) / (high - low), ticks)


def _log_axis(low: float, high: float) -> _Axis:
    """Return a logarithmic axis with ticks at 1, 2 and 5 times powers of ten, or powers alone."""
    first, last = math.log10(low), math.log10(max(high, low * 1.2))
    start, end = _LEFT, WIDTH - _RIGHT
    factors = (1,) if last - first > 2.5 else (1, 2, 5)
    ticks = [
        factor * 10.0**power
        for power in range(math.floor(first), math.ceil(last) + 1)
        for factor in factors
        if low <= factor * 10.0**power <= max(high, low * 1.2)
    ]
    return _Axis(
        lambda value: start + (end - start) * (math.log10(value) - first) / (last - first), ticks
    )


def short(value: float) -> str:
    """Return a number at an axis."""
    if (value and abs(value) < 0.01) or abs(value) >= 100_000:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"
