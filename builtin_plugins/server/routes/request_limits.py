"""The numbers and sizes of requests, compared with the limits of the server."""

from __future__ import annotations

from typing import Any

import msgspec

from hardpoint.builtin_plugins.server.config import ServerLimits
from hardpoint.builtin_plugins.server.requests.limit_errors import too_many
from hardpoint.plugins import RequestError

from .response_formats import JsonSchemaResponseFormat


def check_limits(body: Any, limits: ServerLimits) -> None:
    """Check the numbers of a request against the server's limits.

    Raises:
        RequestError: naming the field, the limit and its place in the configuration.
    """
    for name, limit, amount in _amounts(body, limits):
        if amount > limit:
            raise too_many(name, limit, amount)
    for name in _WORDS:
        texts = getattr(body, name, None) or ()
        texts = (texts,) if isinstance(texts, str) else texts
        if isinstance(texts, msgspec.UnsetType):
            continue
        if (total := sum(map(len, texts))) > _MOST_CHARACTERS:
            raise RequestError(
                f"{name}: expected at most {_MOST_CHARACTERS} characters in all texts together, "
                f"got {total}"
            )
    grammars = {name: getattr(body, name, None) for name in _GRAMMARS}
    if isinstance(answer_format := grammars["response_format"], JsonSchemaResponseFormat):
        grammars["response_format"] = answer_format.json_schema.schema
    for name, value in grammars.items():
        if value is None:
            continue
        if (size := len(msgspec.json.encode(value))) > limits.schema_bytes:
            raise RequestError(
                f"{name}: expected at most {limits.schema_bytes} bytes of JSON on this server, "
                f"got {size}"
            )


_WORDS, _MOST_CHARACTERS = ("stop", "stop_sequences", "bad_words"), 1 << 16
"""Fields whose texts are compared with each token; each completion has tokens of its own."""

_GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "regex",
    "ebnf",
    "grammar",
    "json_schema",
    "tools",
)
"""Fields that are schemas or grammars, or hold them."""


def _amounts(body: Any, limits: ServerLimits) -> list[tuple[str, int, int]]:
    def size(name: str) -> int:
        value = getattr(body, name, None)
        return len(value) if isinstance(value, list | dict) else 0

    def number(name: str) -> int:
        value = getattr(body, name, None)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    return [
        ("n", limits.n, number("n")),
        ("top_logprobs", limits.logprobs, number("top_logprobs")),
        ("logprobs", limits.logprobs, number("logprobs")),
        ("prompt_logprobs", limits.logprobs, number("prompt_logprobs")),
        ("stop", limits.stop, size("stop")),
        ("stop_token_ids", limits.stop, size("stop_token_ids")),
        ("bad_words", limits.bad_words, size("bad_words")),
        ("logit_bias", limits.logit_bias, size("logit_bias")),
        ("allowed_token_ids", limits.logit_bias, size("allowed_token_ids")),
        ("stop_sequences", limits.stop, size("stop_sequences")),
        ("messages", limits.messages, size("messages")),
        ("input", limits.messages, size("input")),
        ("tools", limits.tools, size("tools")),
    ]
