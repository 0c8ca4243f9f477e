"""The reference page of the architectures of transformers, from the results of their survey.

`PYTHONPATH=tests python -m support.families` makes the survey and writes its data file.
"""

from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "tests" / "support" / "families" / "families.json"
INTRODUCTION = """\
The {count} architectures of transformers {version} that generate text, whose names end
with ForCausalLM or LMHeadModel: {native} run [natively](../models.md), {through} through the
[transformers backend](../models.md#transformers-backend), and {refused} are rejected at start.

A test compares each with transformers in float32, with a tiny model of random weights: logits to
1e-4, and the tokens of `generate` in a batch, in chunks, and with the prefix cache.
Published weights may have other settings, which are checked when the model starts."""
TABLES = (
    (
        "native",
        "Native models",
        'The last column is the result of `models.use = "transformers"`.',
        "through transformers",
    ),
    ("through transformers", "Transformers backend", "These need no setting.", ""),
    ("refused", "Unsupported models", "The sizes are those of the tiny models.", "reason"),
    (
        "refused when weights are read",
        "Rejected after the weights are read",
        "Attention differs from that of transformers.",
        "reason",
    ),
    (
        "not compared",
        "Not compared",
        "The configuration is accepted, but transformers does not run the tiny model.",
        "reason",
    ),
)
"""Result of a survey, heading, introduction and third column of each table."""


def families_page(note: str) -> str:
    """Return the page, with a note below its title."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    families = data["families"]
    counts = {path: sum(family["path"] == path for family in families) for path, *_ in TABLES}
    introduction = INTRODUCTION.format(
        count=len(families),
        version=data["transformers"],
        native=counts["native"],
        through=counts["through transformers"],
        refused=counts["refused"] + counts["refused when weights are read"],
    )
    lines = ["# Architectures of transformers", "", note, "", introduction, ""]
    for path, heading, text, column in TABLES:
        rows = [family for family in families if family["path"] == path]
        if rows:
            lines += [f"## {heading}", "", text, ""]
            lines += _table(rows, column)
    return "\n".join(lines).rstrip() + "\n"


def _table(families: list[dict[str, str]], column: str) -> list[str]:
    head = ("architecture", "model_type", column) if column else ("architecture", "model_type")
    rows = [head, ("---",) * len(head)]
    for family in families:
        text = family["other"] or family["why"]
        rows.append((family["name"], f"`{family['model_type']}`", _escaped(text))[: len(head)])
    return [*("| " + " | ".join(row) + " |" for row in rows), ""]


def _escaped(text: str) -> str:
    """Return text without the marks that Markdown would read."""
    for mark in "|*<[_`":
        text = text.replace(mark, f"\\{mark}")
    return text
