"""Pairs of features that cannot be combined, their errors, and the table of the pairs.

    PYTHONPATH=tests python -m support.refused_pairs

writes the table of `docs/migrate-from-vllm.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import RepetitionPenaltyLogitsProcessor

PAGE = Path(__file__).parents[2] / "docs" / "migrate-from-vllm.md"
BEGIN = "<!-- pairs that are rejected, written by tests/support/refused_pairs.py -->"
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
        states: whether it has a layer with a state.
        prompt: prompt of the request.
        options: options of the call of `generate`.
        images: whether the model is one that reads images.
        conversation: whether the request is a turn of a conversation.
    """

    one: str
    other: str
    names: tuple[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] | None = None
    windows: bool = False
    states: bool = False
    prompt: Any = "say"
    options: Mapping[str, Any] = field(default_factory=dict)
    images: bool = False
    conversation: bool = False


_ROWS = np.ones((2, 2), np.float32)
_EMBEDDINGS = {"plugin": {"prompt_embeddings": {"enabled": True}}}
_IMAGE = {"image": np.zeros((8, 8, 3), np.uint8)}

_GROUPED = {"plugins": {"enable": [f"{HERE}.grouped:Mixed"]}}
_GROUP = {"plugin_args": {"mixed": {"prompts": ["no"]}}}

PAIRS = [
    RefusedPair(
        "a group of requests",
        "a KV connector",
        ("members", "kv_connector.use"),
        _GROUPED | _STORES,
        _GROUP,
    ),
    RefusedPair(
        "a group of requests",
        "a scheduler without `keeps_groups`",
        ("members", "keeps_no_groups"),
        _GROUPED | {"scheduler": {"use": f"{HERE}.drafted:KeepsNoGroups"}},
        _GROUP,
    ),
    RefusedPair(
        "a group of requests",
        "images",
        ("members", "media"),
        {"plugins": {"enable": [f"{HERE}.grouped:Mixed"]}},
        _GROUP,
        images=True,
        prompt={"prompt": "<start_of_image>", "multi_modal_data": _IMAGE},
    ),
    RefusedPair(
        "a speculator",
        "a batch-level logits processor that does not declare `supports_drafts`",
        ("speculation", "whole"),
        _NGRAM | {"plugins": {"enable": [f"{HERE}.faulty:Whole"]}},
    ),
    RefusedPair(
        "asynchronous scheduling",
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
        "`kv_cache.window_groups`, in a model with sliding windows",
        ("kv_connector", "kv_cache.window_groups"),
        _STORES,
        windows=True,
    ),
    RefusedPair(
        "a KV connector",
        "a model with recurrent layers",
        ("kv_connector.use", "keeps states"),
        _STORES,
        states=True,
    ),
    RefusedPair(
        "a speculator",
        "a model with recurrent layers",
        ("speculation", "keeps states"),
        _NGRAM,
        states=True,
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
        "an engine, or workers, in a process of their own; a journal",
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
        "`start` and `end` of `thinking_budget`",
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
        "prompt embeddings",
        "`prompt_logprobs`",
        ("prompt_embeds", "prompt_logprobs"),
        _EMBEDDINGS,
        {"prompt_logprobs": 1},
        prompt={"prompt_embeds": _ROWS},
    ),
    RefusedPair(
        "prompt embeddings",
        "`truncate_prompt_tokens`",
        ("prompt_embeds", "truncate_prompt_tokens"),
        _EMBEDDINGS,
        {},
        prompt={"prompt_embeds": _ROWS},
        options={"truncate_prompt_tokens": 1},
    ),
    RefusedPair(
        "prompt embeddings",
        "images in the same prompt",
        ("prompt_embeds", "multi_modal_data"),
        _EMBEDDINGS,
        {},
        prompt={"prompt_embeds": _ROWS, "multi_modal_data": _IMAGE},
    ),
    RefusedPair(
        "prompt embeddings",
        "processors of transformers as `logits_processors`",
        ("embeddings", "logits_processors"),
        _EMBEDDINGS,
        {"logits_processors": [RepetitionPenaltyLogitsProcessor(2.0)]},
        prompt={"prompt_embeds": _ROWS},
    ),
    RefusedPair(
        "images",
        "`truncate_prompt_tokens`, if it would cut the prompt",
        ("media", "truncate_prompt_tokens"),
        {},
        {},
        prompt={"prompt": "<start_of_image>", "multi_modal_data": _IMAGE},
        options={"truncate_prompt_tokens": 1},
        images=True,
    ),
    RefusedPair(
        "images",
        "an attention backend without `sees_ahead`",
        ("an image", "sees_nothing_ahead"),
        {"attention": {"use": f"{HERE}.refused:SeesNothingAhead"}},
        images=True,
    ),
    RefusedPair(
        "a session",
        "images",
        ("conversation", "multi_modal_data"),
        {},
        {},
        prompt={"prompt": "<start_of_image>", "multi_modal_data": _IMAGE},
        images=True,
        conversation=True,
    ),
    RefusedPair(
        "a session",
        "prompt embeddings",
        ("conversation", "prompt_embeds"),
        _EMBEDDINGS,
        {},
        prompt={"prompt_embeds": _ROWS},
        conversation=True,
    ),
    RefusedPair(
        "a session",
        "`n` above 1",
        ("conversation", "n: expected 1"),
        {},
        {"n": 2},
        conversation=True,
    ),
]


def table() -> str:
    """Return the table."""
    lines = ["| feature | with | rejected |", "|---|---|---|"]
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
