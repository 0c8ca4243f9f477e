"""Tokenizers from the metadata of GGUF files."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from hardpoint.builtin_plugins.loaders.gguf_file import GGUFFile
from hardpoint.plugins import ModelError
from hardpoint.toolkit.hf_config import short

from .sentencepiece import marked_spaces, space_decoder
from .splits import SPLITS, Split

_CONTROL, _USER_DEFINED = 3, 4
_NEVER_PREFIXED = ("gemma", "gemma2", "gemma3")
"""Architectures of models without a space before texts, which early files do not state."""


def build_gguf_tokenizer(file: GGUFFile, path: Path) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Byte-level BPE is built directly, other kinds through transformers.

    Raises:
        ModelError: a field is missing, or the kind of tokenizer is not supported.
    """
    kind = file.scalar("tokenizer.ggml.model", str)
    if kind is None:
        raise ModelError(f"{path.name}: tokenizer.ggml.model: missing; the file has no tokenizer")
    if kind == "gpt2":
        return _byte_level(file, path)
    tokenizer = _through_transformers(path, kind)
    if kind == "llama" and file.scalar("general.architecture", str) not in _NEVER_PREFIXED:
        _prefix_as_stated(tokenizer, file)
    return tokenizer


def special_tokens(file: GGUFFile, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens for chat templates by name, such as `bos_token`."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: file.scalar(f"tokenizer.ggml.{key}_token_id", int) for name, key in keys.items()}
    tokens = {
        f"{name}_token": tokenizer.id_to_token(index)
        for name, index in ids.items()
        if index is not None and index >= 0
    }
    return {name: token for name, token in tokens.items() if token is not None}


def _byte_level(file: GGUFFile, path: Path) -> Tokenizer:
    tokens: list[str] = _required(file, path, "tokens")
    merges: list[str] = _required(file, path, "merges")
    split = _split(file, path)
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in merges],
            ignore_merges=split.keeps_tokens,
        )
    except Exception as cause:  # the library raises nothing narrower
        raise ModelError(f"{path.name}: tokenizer.ggml.merges: {str(cause)[:400]}") from cause
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    types = file.numbers("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=False)
            if kind == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind == _USER_DEFINED
        ]
    )
    _add_bos_eos(tokenizer, file, tokens, bos_by_default=split.begins)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _split(file: GGUFFile, path: Path) -> Split:
    pre = file.scalar("tokenizer.ggml.pre", str) or "default"
    if pre not in SPLITS:
        raise ModelError(
            f"{path.name}: tokenizer.ggml.pre: expected one of {', '.join(SPLITS)}, got "
            f"{short(pre)}; set tokenizer.path to a directory with the model's tokenizer.json"
        )
    return SPLITS[pre]


def _add_bos_eos(
    tokenizer: Tokenizer, file: GGUFFile, tokens: list[str], *, bos_by_default: bool
) -> None:
    """Set the tokens that `add_special_tokens` adds, as the file specifies."""
    added = {}
    for side, default in (("bos", bos_by_default), ("eos", False)):
        stated = file.scalar(f"tokenizer.ggml.add_{side}_token", bool)
        index = file.scalar(f"tokenizer.ggml.{side}_token_id", int)
        if (default if stated is None else stated) and index is not None:
            added[side] = (tokens[index], index)
    if not added:
        return
    before = ["bos"] if "bos" in added else []
    after = ["eos"] if "eos" in added else []
    tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{side}:1" for side in before), "$B:1", *after],
        special_tokens=[
            {"id": side, "ids": [index], "tokens": [token]}
            for side, (token, index) in added.items()
        ],
    )


def _through_transformers(path: Path, kind: str) -> Tokenizer:
    # Imported on use: importing transformers takes seconds, and byte-level models do not need it.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        converted = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False, local_files_only=True
        )
        fast: Tokenizer = converted.backend_tokenizer
    except Exception as cause:  # a damaged file can make it raise anything
        message = re.sub(r"\s+", " ", str(cause))[:400]
        raise ModelError(
            f"{path.name}: tokenizer.ggml.model: {short(kind)} could not be converted: {message}"
        ) from cause
    return fast


def _prefix_as_stated(tokenizer: Tokenizer, file: GGUFFile) -> None:
    """Prefix each text between special tokens with a space, as llama.cpp, unless the file forbids.

    Transformers does not read the field, and prefixes the beginning of a prompt alone.
    """
    adds_prefix = file.scalar("tokenizer.ggml.add_space_prefix", bool) is not False
    tokenizer.normalizer = normalizers.Sequence(marked_spaces(adds_prefix=adds_prefix))
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = space_decoder(adds_prefix=adds_prefix)


def _required(file: GGUFFile, path: Path, name: str) -> list[str]:
    value = file.strings(f"tokenizer.ggml.{name}")
    if not value:
        raise ModelError(f"{path.name}: tokenizer.ggml.{name}: missing")
    return value
