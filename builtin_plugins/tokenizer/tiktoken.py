"""Tokenizers from the files of tiktoken, which have the tokens alone.

The split of texts and the special tokens are defined in a model's code, which is never run: the
known classes are a table.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, normalizers

from hardpoint.plugins import ModelError
from hardpoint.toolkit.hf_config import short

from .splits import GLM4, KIMI, QWEN2, Split
from .stream import byte_of_character

_LONGEST = 1024  # bytes of a token: each of them is a place where it may be cut
_EXTRA = tuple(f"<|extra_{index}|>" for index in range(205))


class TiktokenClass(NamedTuple):
    """A class of tokenizers, as `tokenizer_class` names it.

    Attributes:
        split: how a text is split before.
        special: the special tokens behind the others.
        reserved: how many ids there are behind the others, which tokenizer_config.json may name.
    """

    split: Split
    special: Sequence[str] = ()
    reserved: int = 0


TIKTOKEN_CLASSES: Mapping[str, TiktokenClass] = {
    "QWenTokenizer": TiktokenClass(
        QWEN2,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRA),
    ),
    "HYTokenizer": TiktokenClass(
        QWEN2,
        special=("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *_EXTRA),
    ),
    "TikTokenTokenizer": TiktokenClass(KIMI, reserved=256),
    "ChatGLM4Tokenizer": TiktokenClass(GLM4),
}


def is_tiktoken(data: bytes) -> bool:
    """Return whether a file has lines of a token in base64 and its rank."""
    return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data) is not None


def build_tiktoken(data: bytes, kind: TiktokenClass, where: str) -> Tokenizer:
    """Build the tokenizer of a file, with the special tokens of its class.

    Raises:
        ModelError: the file is damaged.
    """
    ranks = _ranks(data, where)
    character = {byte: text for text, byte in byte_of_character().items()}

    def text_of(token: bytes) -> str:
        return "".join(map(character.__getitem__, token))

    vocab = {text_of(token): rank for token, rank in ranks.items()}
    if missing := sorted(character[byte] for byte in range(256) if bytes([byte]) not in ranks):
        raise ModelError(f"{where}: expected a token for each byte, it has none for {missing[0]!r}")
    merges: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    merged = [(text_of(left), text_of(right)) for *_, left, right in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merged, ignore_merges=True))
    if kind.split.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = kind.split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _ranks(data: bytes, where: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        try:
            ranks.setdefault(base64.b64decode(token, validate=True), int(rank))
        except ValueError as cause:
            raise ModelError(
                f"{where}: line {number}: expected a token in base64 and its rank, got "
                f"{short(line)}"
            ) from cause
    if (longest := max(map(len, ranks), default=0)) > _LONGEST:
        raise ModelError(f"{where}: expected tokens of at most {_LONGEST} bytes, got {longest}")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{where}: expected the ranks 0 to {len(ranks) - 1}, each once")
    return ranks
