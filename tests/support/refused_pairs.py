"""Pairs of features that do not go together, how each is refused, and the table of them.

    PYTHONPATH=tests python -m support.refused_pairs

writes the table of `docs/differences.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
BEGIN = "<!-- pairs that are refused, written by tests/support/refused_pairs.py -->"
END = "<!-- end of pairs -->"

HERE = "support.plugins"
_NGRAM = {"speculation": {"use": ["ngram"]}}
_STORES = {
    "kv_connector": {"stores": ["memory"]},
    "plugin": {"memory": {"size_bytes": 1 << 20}},
}


@dataclass(frozen=True)
class RefusedPair:
    """Two features that do not go together.

    Attributes:
        one, other: the features, as the table names them.
        names: what the error has of each.
        config: configuration of an engine of the scripted model.
        request: parameters of a request; None if the engine is refused when it starts.
        windows: whether the model has a layer with a sliding window.
        part: part of a conversation with those parameters, which has to be refused; None if it is
            a request of its own.
    """

    one: str
    other: str
    names: tuple[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] | None = None
    windows: bool = False
    part: Any = None


PAIRS = [
    RefusedPair(
        "a speculator",
        "a batch-level logits processor that does not declare `supports_drafts`",
        ("speculation", "whole"),
        _NGRAM | {"plugins": {"enable": [f"{HERE}.faulty:Whole"]}},
    ),
    RefusedPair(
        "planning ahead",
        "an executor that takes one step at a time",
        ("scheduler.asynchronous", "one_at_a_time"),
        {
            "scheduler": {"asynchronous": True},
            "executor": {"use": f"{HERE}.refused:OneAtATime"},
        },
    ),
    RefusedPair(
        "a speculator",
        "a scheduler without `update_drafts`",
        ("speculation", "takes_no_drafts"),
        _NGRAM | {"scheduler": {"use": f"{HERE}.drafted:TakesNoDrafts"}},
    ),
    RefusedPair(
        "a KV connector",
        "`kv_cache.window_groups`, in a model of sliding windows",
        ("kv_connector", "kv_cache.window_groups"),
        _STORES,
        windows=True,
    ),
    RefusedPair(
        "a KV connector",
        "an attention backend without `kv_layout`",
        ("kv_connector", "no_layout"),
        _STORES | {"attention": {"use": f"{HERE}.refused:NoLayout"}},
    ),
    RefusedPair(
        "a KV connector",
        "a loader without `content_hash`",
        ("kv_connector", "no_content_hash"),
        _STORES
        | {
            "load": {"use": "no_content_hash"},
            "plugins": {
                "enable": [{"use": f"{HERE}.refused:SilentLoader", "name": "no_content_hash"}]
            },
        },
    ),
    RefusedPair(
        "a KV connector",
        "another step part that loads blocks",
        ("kv_transfer", "loads_blocks"),
        _STORES | {"plugins": {"enable": [f"{HERE}.refused:LoadsBlocks"]}},
    ),
    RefusedPair(
        "`kv_cache.dtype`",
        "an attention backend that does not store it",
        ("kv_cache.dtype", "history_attention"),
        {"kv_cache": {"dtype": "int8"}},
    ),
    RefusedPair(
        "functions as `logits_processors`",
        "an engine in a process of its own",
        ("logits_processors", "engine.in_process"),
        {"engine": {"in_process": False}},
        {"logits_processors": [lambda output_ids, logits: logits]},
    ),
    RefusedPair(
        "`stop`",
        "`detokenize = false`",
        ("stop", "detokenize"),
        {},
        {"stop": "a", "detokenize": False},
    ),
    RefusedPair(
        "`structured.lenient`",
        "`detokenize = false`",
        ("structured.lenient", "detokenize"),
        {},
        {"structured": {"json": {}, "lenient": True}, "detokenize": False},
    ),
    RefusedPair(
        "`structured`",
        "markers of the thinking budget's own",
        ("structured", "thinking_budget"),
        {},
        {
            "structured": {"regex": "a"},
            "plugin_args": {
                "thinking_budget": {"thinking_token_budget": 4, "start": [1], "end": [2]}
            },
        },
    ),
    RefusedPair(
        "`thinking_token_budget`",
        "an engine without a reasoning parser",
        ("thinking_token_budget", "reasoning.parser"),
        {"reasoning": {"parser": "none"}},
        {"thinking_token_budget": 4},
    ),
    RefusedPair(
        "`thinking_token_budget`",
        "`allowed_token_ids` without the end marker",
        ("thinking_budget", "allowed_token_ids"),
        {},
        {
            "allowed_token_ids": [5],
            "plugin_args": {
                "thinking_budget": {"thinking_token_budget": 4, "start": [1], "end": [2]}
            },
        },
    ),
    RefusedPair(
        "`include`",
        "an engine or a request without that part",
        ("include", "speculation"),
        {},
        {"include": ["speculation"]},
    ),
    RefusedPair(
        "images",
        "a conversation that stays open",
        ("multi_modal_data", "conversation that stays open"),
        {},
        {},
        part={"prompt": "say", "multi_modal_data": {"image": [b"an image"]}},
    ),
    RefusedPair(
        "prompt embeddings",
        "a conversation that stays open",
        ("prompt_embeds", "conversation that stays open"),
        {"plugin": {"prompt_embeddings": {"enabled": True}}},
        {},
        part={"prompt_embeds": [[0.0, 0.0]]},
    ),
    RefusedPair(
        "`n` above 1",
        "a conversation that stays open",
        ("n: expected 1", "a conversation"),
        {},
        {"n": 2},
        part="say",
    ),
]


def table() -> str:
    """Return the table."""
    lines = ["| | with | is refused |", "|---|---|---|"]
    for pair in PAIRS:
        when = "at the start" if pair.request is None else "the request"
        lines.append(f"| {pair.one} | {pair.other} | {when} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """Return the page with the table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
