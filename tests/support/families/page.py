"""The data file of the families, and the page made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import transformers

from support.processes import ROOT

from .survey import NATIVE, NOT_COMPARED, REFUSED, REFUSED_LATE, THROUGH, Family

DATA = Path(__file__).with_name("families.json")
PAGE = ROOT / "docs" / "model-families.md"

_HEAD = """\
# Model families (transformers backend)

The {count} architectures of transformers {version} that generate text, whose names end
with ForCausalLM or LMHeadModel: {native} run [natively](models.md), {through}
[through its modules](models-through-transformers.md), {refused} are refused in one line. This page
is written by a run, of all or of a few architectures:

```sh
PYTHONPATH=tests python -m support.families
PYTHONPATH=tests python -m support.families --only LlamaForCausalLM GptOssForCausalLM
```

Each has a tiny model of random weights, whose configuration is the default one of its class with
smaller sizes ([the exceptions](../tests/support/families/configs.py)). What a published
configuration changes besides, types of layers for example, is looked at when its model starts.
Those in the first two tables have, in float32, the logits of transformers to 1e-4 (of the
largest one, where that is above 1): alone, and in chunks next to another prompt. An engine gives
the tokens of `generate`: two requests in one batch, in chunks, and again with prefix hits. (Where
positions begin after that of padding, as RoBERTa's, `generate` begins at 0 all the same: these have
the tokens of the model's own forward pass.) Real weights were not compared.
"""
_NATIVE = """
## Native models

The last column is what `models.use = "transformers"` does with the same model.

| architecture | model_type | through transformers |
|---|---|---|
"""
_THROUGH = """
## Through transformers

| architecture | model_type |
|---|---|
"""
_REFUSED = """
## Unsupported models

The reasons are those of the tiny models, so that sizes in them are small.

| architecture | model_type | why |
|---|---|---|
"""
_REFUSED_LATE = """
## Refused when weights are read

A step is compared with attention of transformers once the weights are there; these differ from it.

| architecture | model_type | why |
|---|---|---|
"""
_NOT_COMPARED = """
## Not compared

Nothing is refused by their configurations, but transformers does not compute the tiny model.

| architecture | model_type | why |
|---|---|---|
"""


@dataclass(frozen=True)
class Data:
    """Results of runs.

    Attributes:
        transformers: its version, of the last run.
        families: sorted by name.
    """

    transformers: str
    families: list[Family]


def read_data() -> Data:
    """Return the results of the last runs."""
    return msgspec.json.decode(DATA.read_bytes(), type=Data)


def write(families: Iterable[Family]) -> None:
    """Write the results of runs, and their page."""
    data = Data(transformers.__version__, sorted(families, key=lambda family: family.name))
    rows = b",\n".join(msgspec.json.encode(family) for family in data.families)
    version = msgspec.json.encode(data.transformers)
    DATA.write_bytes(b'{"transformers":' + version + b',"families":[\n' + rows + b"\n]}\n")
    PAGE.write_text(render(data))


def render(data: Data) -> str:
    """Return the page."""
    by_path: dict[str, list[Family]] = {}
    for family in data.families:
        by_path.setdefault(family.path, []).append(family)
    native, through = by_path.get(NATIVE, []), by_path.get(THROUGH, [])
    early, late = by_path.get(REFUSED, []), by_path.get(REFUSED_LATE, [])
    text = _HEAD.format(
        count=len(data.families),
        version=data.transformers,
        native=len(native),
        through=len(through),
        refused=len(early) + len(late),
    )
    text += _table(_NATIVE, [(_name(f), _type(f), _cell(f.other)) for f in native])
    text += _table(_THROUGH, [(_name(f), _type(f)) for f in through])
    for head, path in (
        (_REFUSED, REFUSED),
        (_REFUSED_LATE, REFUSED_LATE),
        (_NOT_COMPARED, NOT_COMPARED),
    ):
        rows = [(_name(f), _type(f), _cell(f.why)) for f in by_path.get(path, [])]
        text += _table(head, rows)
    return text


def _table(head: str, rows: Sequence[Sequence[str]]) -> str:
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows) if rows else ""


def _name(family: Family) -> str:
    return family.name


def _type(family: Family) -> str:
    return f"`{family.model_type}`"


def _cell(text: str) -> str:
    """Return the text of a cell without Markdown syntax."""
    for mark in "|*<[_`":
        text = text.replace(mark, f"\\{mark}")
    return text
