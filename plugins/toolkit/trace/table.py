"""A trace as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .records import CompletionTrace, TokenTrace
from .wording import (
    chances,
    change_name,
    change_text,
    draft_text,
    draw_text,
    head_lines,
    logit_text,
    moves_text,
    plain_text,
    score_text,
    step_lines,
    token_text,
)


def trace_table(
    prompt: str | None, count: int, completions: Sequence[CompletionTrace], width: int
) -> str:
    """Return traces as text.

    Args:
        prompt: text of the prompt.
        count: tokens of the prompt.
        completions: traces of its completions.
        width: columns of the terminal.
    """
    lines = [f"prompt, {count} token{'s' * (count != 1)}: {plain_text(prompt or '')}"[:width]]
    for completion in completions:
        lines += ["", *_completion_lines(completion, width)]
    return "\n".join(lines)


def _completion_lines(completion: CompletionTrace, width: int) -> Iterator[str]:
    head, *notes = head_lines(completion)
    yield f"completion {completion.index}, {head}: {plain_text(completion.text)}"[:width]
    yield from notes
    yield from step_lines(completion.steps)
    for token in completion.tokens:
        yield ""
        yield from _token_lines(token, width)


def _token_lines(token: TokenTrace, width: int) -> Iterator[str]:
    rank = "" if token.rank is None else f", number {token.rank} of the model"
    text = token_text(token.token_id, token.text)
    yield f"position {token.position}: {text}, step {token.step}{rank}"
    yield from _candidate_lines(token, width)
    for change in token.changes:
        where = f" ({change.package})" if change.package else ""
        yield f"  {change.phase}: {change_name(change)}{where} {change_text(change)}"
        yield from (f"      {move}" for move in moves_text(change))
    yield from (f"  {text}" for text in (draw_text(token), draft_text(token)) if text)


def _candidate_lines(token: TokenTrace, width: int) -> Iterator[str]:
    """Yield the candidates as a table; columns that do not fit are left out and named."""
    names = ["model", *map(change_name, token.changes)]
    columns = [[candidate.logit, *candidate.logits] for candidate in token.candidates]
    fixed = [
        [
            ">" if candidate.token_id == token.token_id else "",
            token_text(candidate.token_id, candidate.text),
            *chances(token, candidate),
            score_text(candidate),
        ]
        for candidate in token.candidates
    ]
    shown = list(range(len(names)))
    while True:
        table = [["", "candidate", *(names[at] for at in shown), "model chance", "chance", "noise"]]
        for cells, logits in zip(fixed, columns, strict=True):
            table.append([*cells[:2], *(logit_text(logits[at]) for at in shown), *cells[2:]])
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        if sum(widths) + 2 * len(widths) <= width or len(shown) < 3:
            break
        inner = shown[1:-1]  # columns that changed none of the candidates go first
        same = [at for at in inner if all(row[at] == row[at - 1] for row in columns)]
        shown.remove((same or inner)[0])
    for row in table:
        cells = [
            cell.ljust(size) if column < 2 else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
    if left_out := [name for at, name in enumerate(names) if at not in shown]:
        yield f"  (too narrow for {', '.join(left_out)})"
