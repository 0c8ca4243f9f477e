"""Log-probabilities in the shape of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from hardpoint.builtin_plugins.server.routes.answers import (
    finite,
    likeliest,
    token_bytes,
    token_text,
)
from hardpoint.plugins import CompletionOutput, Logprob, Tokenizer


class TopLogprob(msgspec.Struct):
    """A likely token of a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The token of a position, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of a choice."""

    content: list[TokenLogprob]
    refusal: None = None


def choice_logprobs(
    completion: CompletionOutput,
    count: int,
    extra_ids: Collection[int] = (),
    *,
    tokenizer: Tokenizer | None = None,
) -> ChoiceLogprobs | None:
    """Return the log-probabilities of a completion's tokens.

    Args:
        count: likeliest tokens per position.
        extra_ids: tokens that are there besides.
        tokenizer: has the bytes of tokens; None shows tokens by their ids.
    """
    if completion.logprobs is None:
        return None
    content = [
        _position(position, token, likeliest(position, count, extra_ids), tokenizer)
        for position, token in zip(completion.logprobs, completion.token_ids, strict=False)
    ]
    return ChoiceLogprobs(content)


def _position(
    position: Mapping[int, Logprob],
    token: int,
    others: Sequence[tuple[int, Logprob]],
    tokenizer: Tokenizer | None,
) -> TokenLogprob:
    def shown(token: int, logprob: Logprob) -> tuple[str, float, list[int]]:
        text = token_text(logprob, token, as_id=tokenizer is None)
        encoded = list(text.encode()) if tokenizer is None else token_bytes(tokenizer, token, text)
        return text, finite(logprob.logprob), encoded

    top = [TopLogprob(*shown(other, logprob)) for other, logprob in others]
    return TokenLogprob(*shown(token, position[token]), top)
