"""SVG files of figures: lines over the number of engines, and gaps between tokens over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from hardpoint.builtin_plugins.commands.loads.plots import HEIGHT, WIDTH, Series, line_plot

_COLORS = ("#1f5fa8", "#c0504d", "#5a8a3a", "#7a5195", "#b8860b")
_TOP, _STEP = 24, HEIGHT + 24
_PANELS: tuple[tuple[str, Callable[[Mapping[str, Any]], float]], ...] = (
    ("reuse of prompt tokens, %", lambda result: 100 * result["reuse"]),
    ("p99 time to the first token, ms", lambda result: 1e3 * result["ttft"]["p99"]),
    ("tokens computed: most / mean", lambda result: result["imbalance"]),
    ("microseconds per decision, median", lambda result: result["decisions"]["p50"]),
)


def _document(panels: Sequence[str], columns: int, legend: Sequence[str]) -> str:
    """Return panels in rows of so many columns, below a legend in their colors."""
    size = f'width="{columns * WIDTH}" height="{_TOP + -(-len(panels) // columns) * _STEP}"'
    style = "".join(f".c{n}{{stroke:{c}}}text.c{n}{{fill:{c}}}" for n, c in enumerate(_COLORS))
    style += ".line{fill:none;stroke-width:2}text{stroke:none}.grid{stroke:#ddd}"
    style += "svg{overflow:visible}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif"']
    parts += [f' font-size="11"><style>{style}</style>']
    parts += ['<rect width="100%" height="100%" fill="white"/>']
    for place, name in enumerate(legend):
        parts.append(f'<text class="c{place}" x="{56 + 130 * place}" y="16">{escape(name)}</text>')
    for number, panel in enumerate(panels):
        place = f'x="{number % columns * WIDTH}" y="{_TOP + number // columns * _STEP}"'
        parts.append(f'<svg {place} width="{WIDTH}" height="{HEIGHT}"{panel[4:]}')
    return "\n".join([*parts, "</svg>\n"])


def draw_fleets(results: Sequence[Mapping[str, Any]]) -> str:
    """Return four panels, in each a line per balancer over the number of engines."""
    names = list(dict.fromkeys(result["balancer"] for result in results))
    panels = []
    for title, figure in _PANELS:
        lines = [
            Series(name, [(r["engines"], figure(r)) for r in results if r["balancer"] == name])
            for name in names
        ]
        panels.append(line_plot(lines, x_label="engines", y_label=title, log_x=True))
    return _document(panels, 2, names)


def draw_gaps(plotted: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a panel per engine, with the same axis: milliseconds between tokens over time.

    A second line shows when the long prompt was sent, and when its first token came.

    Args:
        plotted: by name, the result of `engine_process.run_long_prompt`.
    """
    top = 1e3 * max(gap for times in plotted.values() for _, gap in times["gaps"])
    panels = []
    for name, times in plotted.items():
        sent, first = times["sent"], times["first"]
        lines = [
            Series("gaps", [(at, 1e3 * gap) for at, gap in times["gaps"]]),
            Series("long prompt", [(sent, 0), (sent, top), (first, top), (first, 0)]),
        ]
        greatest = 1e3 * max(gap for _, gap in times["gaps"])
        text = f"gaps of at most {greatest:.0f} ms, first token after {1e3 * (first - sent):.0f} ms"
        label = f"{name}: ms between tokens"
        panels.append(line_plot(lines, x_label=f"seconds ({text})", y_label=label, y_top=top))
    return _document(panels, 1, ["tokens of a stream", "until the first token of a long prompt"])
