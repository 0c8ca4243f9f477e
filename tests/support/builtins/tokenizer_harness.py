"""Opens the built-in tokenizer on a path."""

from __future__ import annotations

from pathlib import Path

from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.plugins import ModelFiles, TokenizerContext

MESSAGES = [{"role": "user", "content": "Why?"}]


def open_tokenizer(path: Path) -> TransformersTokenizer:
    files = ModelFiles(name=path.name, path=path)
    return TransformersTokenizer(
        TokenizerContext(name="transformers", options=TransformersTokenizer.Options(), files=files)
    )


def token_texts(tokenizer: TransformersTokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.encode(text)]
