"""An SVG of the time between the tokens of a stream while a long prompt is computed."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 720, 120
_LEFT, _TOP, _BETWEEN = 60, 30, 44
_TICKS = 4


def draw(plotted: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a panel per engine, with the same axes.

    Args:
        plotted: by name, what `run_long_prompt` returned.
    """
    seconds = max(at for times in plotted.values() for at, _ in times["gaps"])
    longest = max(gap for times in plotted.values() for _, gap in times["gaps"])
    height = _TOP + len(plotted) * (_HEIGHT + _BETWEEN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, times) in enumerate(plotted.items()):
        top = _TOP + number * (_HEIGHT + _BETWEEN)
        parts += _panel(name, times, top, seconds, longest)
    return "\n".join([*parts, "</svg>"])


def _panel(
    name: str, times: Mapping[str, Any], top: float, seconds: float, longest: float
) -> list[str]:
    """Return the elements of one engine: its gaps in milliseconds over time."""

    def x(at: float) -> float:
        return _LEFT + _WIDTH * at / seconds

    def y(gap: float) -> float:
        return top + _HEIGHT * (1 - gap / longest)

    greatest = max(gap for _, gap in times["gaps"])
    wait = times["first"] - times["sent"]
    title = f"{name}: at most {1e3 * greatest:.0f} ms, first token after {1e3 * wait:.0f} ms"
    parts = [
        f'<text x="{_LEFT}" y="{top - 6:.1f}">{escape(title)}</text>',
        f'<rect x="{x(times["sent"]):.1f}" y="{top}" height="{_HEIGHT}" fill="#e8e8e8" '
        f'width="{x(times["first"]) - x(times["sent"]):.1f}"/>',
    ]
    for tick in range(_TICKS + 1):
        gap, at = longest * tick / _TICKS, seconds * tick / _TICKS
        parts += [
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y(gap):.1f}" y2="{y(gap):.1f}" '
            f'stroke="#ccc"/>',
            f'<text x="{_LEFT - 6}" y="{y(gap) + 4:.1f}" text-anchor="end">{1e3 * gap:.0f}</text>',
            f'<text x="{x(at):.1f}" y="{top + _HEIGHT + 14}" text-anchor="middle">'
            f"{at:.1f} s</text>",
        ]
    for at, gap in times["gaps"]:
        parts.append(
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{y(0):.1f}" y2="{y(gap):.1f}" '
            f'stroke="#1f5fa8"/>'
        )
    return parts
