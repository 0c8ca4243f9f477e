"""A trace as one HTML page, which loads nothing and needs no script."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from .records import Change, CompletionTrace, TokenTrace
from .wording import (
    chances,
    change_name,
    change_text,
    draft_text,
    draw_text,
    head_lines,
    logit_text,
    moves_text,
    score_text,
    step_lines,
    token_text,
)

_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --dim: #5c636b; --page: #ffffff; --box: #f3f5f7;
  --line: #d5dade; --mark: #0b62c4; --low: #b3261e; --chosen: #dceafd; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ec; --dim: #a0a8b0; --page: #14171a;
  --box: #1e2327; --line: #3a4248; --mark: #7ab7ff; --low: #ff8a80; --chosen: #17324f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; color: var(--text);
  background: var(--page); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 1.5rem 0 .5rem; }
code, .tokens { font-family: ui-monospace, monospace; font-size: .9rem; white-space: pre-wrap; }
.dim { color: var(--dim); } .error { color: var(--low); }
.tokens { line-height: 2; } .tokens a { color: var(--text); text-decoration: none;
  border-bottom: 3px solid var(--mark); padding: 0 .1rem; margin-right: .15rem; }
.tokens a.low { border-bottom-color: var(--low); border-bottom-style: dashed; }
a:focus-visible, summary:focus-visible, .wide:focus-visible { outline: 3px solid var(--mark);
  outline-offset: 2px; }
details { background: var(--box); border: 1px solid var(--line); border-radius: .5rem;
  margin: .5rem 0; padding: 0 .75rem; } details[open] { padding-bottom: .5rem; }
summary { cursor: pointer; padding: .5rem 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; }
th { color: var(--dim); font-weight: 600; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } tr.chosen { background: var(--chosen); }
tr.chosen td:first-child { font-weight: 600; } ol, ul { padding-left: 1.25rem; }
@media (max-width: 30rem) { body { padding: .5rem; font-size: 15px; }
  th, td { padding: .2rem .4rem; } }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def trace_page(prompt: str | None, count: int, completions: Sequence[CompletionTrace]) -> str:
    """Return traces as a page: of each completion the tokens, their details, and the steps.

    Args:
        prompt: text of the prompt.
        count: tokens of the prompt.
        completions: traces of its completions.
    """
    lines = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Trace</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>Trace</h1>",
    ]
    if prompt is not None:
        summary = f"Prompt, {count} tokens"
        text = f"<p><code>{_safe(prompt)}</code></p>"
        lines.append(f"<details><summary>{summary}</summary>{text}</details>")
    for completion in completions:
        lines += _completion(completion)
    return "\n".join([*lines, "</main>\n</body>\n</html>\n"])


def _safe(text: str) -> str:
    return html.escape(text, quote=True)


def _completion(completion: CompletionTrace) -> Iterator[str]:
    head, *notes = head_lines(completion)
    index = completion.index
    yield f"<h2>Completion {index}</h2>\n<p>{_safe(head)}</p>"
    yield from (f'<p class="error">{_safe(line)}</p>' for line in notes)
    yield '<p class="dim">A dashed line: not the likeliest token of the model.</p>'
    yield f'<p class="tokens">{"".join(_link(index, token) for token in completion.tokens)}</p>'
    for token in completion.tokens:
        yield from _token(index, token)
    yield "<details><summary>Steps</summary><ul>"
    yield from (f"<li>{_safe(line)}</li>" for line in step_lines(completion.steps))
    yield "</ul></details>"


def _link(index: int, token: TokenTrace) -> str:
    text = token_text(token.token_id, token.text, 40)
    kind = ' class="low"' if token.rank != 1 else ""
    return f'<a href="#c{index}p{token.position}"{kind}>{_safe(text)}</a> '


def _token(index: int, token: TokenTrace) -> Iterator[str]:
    text = _safe(token_text(token.token_id, token.text))
    rank = "" if token.rank is None else f", number {token.rank} of the model"
    is_open = " open" if token.position == 0 else ""
    yield f'<details id="c{index}p{token.position}"{is_open}>'
    yield (
        f"<summary>Position {token.position}: <code>{text}</code> "
        f'<span class="dim">step {token.step}{rank}</span></summary>'
    )
    yield '<div class="wide" tabindex="0" role="region" aria-label="Candidates"><table><thead><tr>'
    names = ["model", *map(change_name, token.changes), "model chance", "chance", "noise"]
    yield "<th>candidate</th>" + "".join(f"<th>{_safe(name)}</th>" for name in names)
    yield "</tr></thead><tbody>"
    for candidate in token.candidates:
        cells = [
            token_text(candidate.token_id, candidate.text),
            *map(logit_text, [candidate.logit, *candidate.logits]),
            *chances(token, candidate),
            score_text(candidate),
        ]
        kind = ' class="chosen"' if candidate.token_id == token.token_id else ""
        yield f"<tr{kind}>{''.join(f'<td>{_safe(cell)}</td>' for cell in cells)}</tr>"
    yield "</tbody></table></div>"
    if token.changes:
        yield "<ol>"
        yield from map(_change, token.changes)
        yield "</ol>"
    yield from (f"<p>{_safe(s)}</p>" for s in (draw_text(token), draft_text(token)) if s)
    yield "</details>"


def _change(change: Change) -> str:
    where = f' <span class="dim">{_safe(change.package)}</span>' if change.package else ""
    moves = "".join(f"<li><code>{_safe(move)}</code></li>" for move in moves_text(change, 5))
    name = f"<strong>{_safe(change_name(change))}</strong>{where}"
    return f"<li>{change.phase}: {name} {_safe(change_text(change))}<ul>{moves}</ul></li>"
