"""vLLM's functions that return tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hardpoint_vllm.tokenizers import TokenizerLike, pretrained_source

from hardpoint.host.registry.model_files import alias_of, find_files

__all__ = [
    "AnyTokenizer",
    "TokenizerLike",
    "cached_tokenizer_from_config",
    "get_config",
    "get_hf_text_config",
    "get_tokenizer",
]

AnyTokenizer = TokenizerLike


def get_tokenizer(tokenizer_name: str, *_: Any, **options: Any) -> Any:
    """Return the tokenizer of a model's folder or id, from transformers."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    known = {"revision", "trust_remote_code", "use_fast"}
    known_options = {name: value for name, value in options.items() if name in known}
    name, file = _source(tokenizer_name)
    return AutoTokenizer.from_pretrained(name, **file, **known_options)


def get_config(model: str, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the configuration of a model's folder, file or id, from transformers."""
    from transformers import AutoConfig  # noqa: PLC0415

    del trust_remote_code  # code of a model's repository is not run
    known_options = {name: options[name] for name in ("revision",) if options.get(name)}
    name, file = _source(model)
    return AutoConfig.from_pretrained(name, **file, **known_options)


def get_hf_text_config(config: Any) -> Any:
    """Return the configuration of the model that produces text."""
    return config.get_text_config()


def _source(name: Any) -> tuple[str, dict[str, str]]:
    """Return the arguments of `from_pretrained` for a model's path, alias or id."""
    path = find_files(str(name)).path if alias_of(str(name)) else Path(str(name))
    return pretrained_source(path)


def cached_tokenizer_from_config(model_config: Any, **options: Any) -> Any:
    """Return the tokenizer of a model's configuration, from transformers."""
    return get_tokenizer(model_config.tokenizer or model_config.model, **options)
