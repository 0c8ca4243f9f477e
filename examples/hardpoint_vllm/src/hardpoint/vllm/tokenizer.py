"""vLLM's functions that return tokenizers."""

from __future__ import annotations

from typing import Any

from hardpoint_vllm.tokenizers import TokenizerLike

__all__ = ["AnyTokenizer", "TokenizerLike", "cached_tokenizer_from_config", "get_tokenizer"]

AnyTokenizer = TokenizerLike


def get_tokenizer(tokenizer_name: str, *_: Any, **options: Any) -> Any:
    """Return the tokenizer of a model's folder or id, from transformers."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    known = {"revision", "trust_remote_code", "use_fast"}
    known_options = {name: value for name, value in options.items() if name in known}
    return AutoTokenizer.from_pretrained(tokenizer_name, **known_options)


def cached_tokenizer_from_config(model_config: Any, **options: Any) -> Any:
    """Return the tokenizer of a model's configuration, from transformers."""
    return get_tokenizer(model_config.tokenizer or model_config.model, **options)
