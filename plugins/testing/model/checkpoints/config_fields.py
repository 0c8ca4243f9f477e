"""Fields of a ModelConfig and their valid values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from hardpoint import typed
from hardpoint.plugins import HardpointError, ModelConfig, SamplingParams

__all__ = ["FIELDS"]

_DTYPES = ("float64", "float32", "float16", "bfloat16")


def _is_count(_config: ModelConfig, value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_plain(_config: ModelConfig, value: Any) -> bool:
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError):
        return False
    return isinstance(value, Mapping)


def _are_tokens(config: ModelConfig, value: Any) -> bool:
    return isinstance(value, tuple) and all(
        type(token) is int and 0 <= token < config.vocab_size for token in value
    )


def _is_sampling(_config: ModelConfig, value: Any) -> bool:
    try:
        typed.convert(dict(value), SamplingParams, path="default_sampling")
    except (TypeError, ValueError, HardpointError):
        return False
    return True


FIELDS: tuple[tuple[str, str, Callable[[ModelConfig, Any], bool]], ...] = (
    ("architecture", "a name", lambda _, value: isinstance(value, str) and bool(value)),
    ("vocab_size", "a whole number >= 1", _is_count),
    ("max_position_embeddings", "a whole number >= 1", _is_count),
    ("hf", "a mapping of plain data, as in JSON", _is_plain),
    ("eos_token_ids", "a tuple of token ids below vocab_size", _are_tokens),
    ("dtype", f"None or one of {', '.join(_DTYPES)}", lambda _, v: v is None or v in _DTYPES),
    ("default_sampling", "fields of SamplingParams", _is_sampling),
)
"""Fields of a ModelConfig: name, valid values, and the check."""
