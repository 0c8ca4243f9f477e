"""A page of HTML, which needs nothing else, for reports of loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from hardpoint.errors import ConfigError

from .plots import NUM_COLOURS, Series, line_plot

_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#3f3fb0", "#7a3b00", "#5b6770")
_DARK = ("#56b4e9", "#ff9a4d", "#3ddc97", "#f2a6cf", "#f0e442", "#a6a6ff", "#d9a066", "#b8c4cc")
"""Colors of the variants; the first ones come from Okabe and Ito (2008)."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5a636b; --line: #dfe3e7;
  --paper: #ffffff; --card: #f6f8f9; COLOURS_LIGHT }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --soft: #a3adb7; --line: #333b43;
  --paper: #14181c; --card: #1c2228; COLOURS_DARK } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .5rem 0 }
h2 { font-size: 1.1rem; margin: 1.5rem 0 .5rem }
p { margin: .4rem 0 }
.soft, .empty { color: var(--soft) }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: 1rem }
figure { margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem }
figcaption { font-weight: 600; margin-bottom: .25rem }
svg { display: block; width: 100%; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) }
svg .label { fill: var(--ink) }
.grid { stroke: var(--line); stroke-width: 1 }
.line { fill: none; stroke-width: 2.25; stroke-linejoin: round }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .3rem .75rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper) }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none }
.key span { display: inline-block; width: 1.5rem; height: .25rem; vertical-align: middle;
  margin-right: .4rem; border-radius: .2rem }
.wrong { border-left: .25rem solid var(--c1); padding-left: .75rem }
LINES
"""


def document(title: str, parts: Sequence[str]) -> str:
    """Return a page.

    Args:
        title: its title and headline.
        parts: HTML below the headline.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_styles()}</style></head>\n<body>"
        + "\n".join([f"<h1>{escape(title)}</h1>", *parts])
        + "</body></html>\n"
    )


def write_page(path: str, text: str) -> None:
    """Write a page to the file that `--html` names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--html: {path!r} cannot be written: {reason}") from None


def remark(text: str) -> str:
    """Return a paragraph about errors."""
    return f'<p class="wrong">{escape(text)}</p>'


def aside(text: str) -> str:
    """Return a paragraph that explains."""
    return f'<p class="soft">{escape(text)}</p>'


def _styles() -> str:
    lines = "\n".join(
        f".c{n} {{ stroke: var(--c{n}) }} .k{n} {{ background: var(--c{n}) }}"
        for n in range(NUM_COLOURS)
    )
    light, dark = (
        " ".join(f"--c{n}: {colour};" for n, colour in enumerate(colours))
        for colours in (_LIGHT, _DARK)
    )
    style = _STYLE.replace("COLOURS_LIGHT", light).replace("COLOURS_DARK", dark)
    return style.replace("LINES", lines)


def key(names: Sequence[str]) -> str:
    """Return the names of curves, with their colors."""
    items = "".join(
        f'<li><span class="k{number % NUM_COLOURS}"></span>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="key">{items}</ul>'


def time_plots(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return plots of the times of requests, by the name of a load or a variant."""
    figures = [
        figure(
            f"{title}: share of the requests that had it by then",
            line_plot(
                [
                    Series(name, [(x, place) for place, x in enumerate(curve[key])])
                    for name, curve in curves.items()
                ],
                x_label="seconds",
                y_label="%",
                log_x=True,
                y_top=100,
            ),
        )
        for key, title in (("ttft", "First token"), ("e2e", "Last token"))
    ]
    figures.append(
        figure(
            "Time per further token: share of the requests",
            line_plot(
                [
                    Series(name, [(1e3 * x, place) for place, x in enumerate(curve["tpot"])])
                    for name, curve in curves.items()
                ],
                x_label="milliseconds",
                y_label="%",
                log_x=True,
                y_top=100,
            ),
        )
    )
    for key, title, label, factor, top in (
        ("wait", "Mean time to the first token, by arrival", "seconds", 1.0, 0.0),
        ("good", "Share that met the objective, by arrival", "%", 100.0, 100.0),
    ):
        series = [
            Series(name, [(x, factor * y) for x, y in zip(curve["time"], curve[key], strict=True)])
            for name, curve in curves.items()
        ]
        plot = line_plot(series, x_label="seconds since the start", y_label=label, y_top=top)
        figures.append(figure(title, plot))
    return plots(figures)


def plots(figures: Sequence[str]) -> str:
    """Return plots side by side."""
    return f'<div class="plots">{"".join(figures)}</div>'


def figure(title: str, plot: str) -> str:
    """Return a plot with its title."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{plot}</figure>"


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with its title."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in headers)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    name = f"{title[:1].upper()}{title[1:]}"
    return (
        f'<h2>{escape(name)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
