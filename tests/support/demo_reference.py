"""The results of transformers with the demo model, as scripts/demo-reference wrote it."""

from __future__ import annotations

from pathlib import Path

import msgspec


class GreedyReference(msgspec.Struct, frozen=True):
    """A prompt that was continued greedily in float32.

    Attributes:
        gaps: gaps of the two best logits, per token.
        best: the choice at each position of prompt and continuation, if that was computed.
        bf16_equal: how many of these a model in bfloat16 shares, but for the last position.
    """

    prompt: str
    prompt_ids: list[int]
    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]
    best: list[int] = []
    bf16_equal: int = 0


class TextReference(msgspec.Struct, frozen=True):
    """The logits of a text in float32: per position the best ones, the mean and the spread."""

    tokens: list[int]
    best: list[int]
    top_ids: list[list[int]]
    top_logits: list[list[float]]
    mean: list[float]
    std: list[float]
    bf16_equal: int


class DemoReference(msgspec.Struct, frozen=True):
    """The whole file."""

    greedy: list[GreedyReference]
    texts: list[TextReference]


_FILE = Path(__file__).with_suffix(".json")
_REFERENCE = msgspec.json.decode(_FILE.read_bytes(), type=DemoReference)
GREEDY = _REFERENCE.greedy
LONG_GREEDY = [each for each in GREEDY if each.best]
*TEXTS, RANDOM_TEXT = _REFERENCE.texts
NEW_TOKENS = min(len(each.tokens) for each in GREEDY)
