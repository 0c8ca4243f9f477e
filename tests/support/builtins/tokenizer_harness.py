"""Opens the built-in tokenizer on a path, and writes files for it."""

from __future__ import annotations

from pathlib import Path

import gguf
from tokenizers import pre_tokenizers

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


def write_gguf(path: Path, templates=None, architecture="llama", **changes) -> Path:
    """Write a GGUF of nothing but a byte-level tokenizer; None leaves a field out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", "<tool>", *alphabet, "he", "ll", "hell", "12"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "merges": ["h e", "l l", "he ll", "1 2"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changes
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value:
            writer.add_array(key, value)
    if templates:
        writer.add_chat_template(templates)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
