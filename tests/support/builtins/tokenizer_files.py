"""Writes files of tokenizers as SentencePiece and tiktoken have them, without these libraries."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Mapping
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def message(fields: Iterable[tuple[int, Any]]) -> bytes:
    """Return a message of Protocol Buffers: integers, floats, bytes and texts by number."""
    encoded = b""
    for number, value in fields:
        if isinstance(value, float):
            encoded += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            encoded += varint(number << 3) + varint(value & (1 << 64) - 1)
        else:
            data = value.encode() if isinstance(value, str) else value
            encoded += varint(number << 3 | 2) + varint(len(data)) + data
    return encoded


def varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def sentencepiece_model(
    pieces: Iterable[tuple[str, float, int]],
    trainer: Mapping[int, Any],
    normalizer: Mapping[int, Any],
) -> bytes:
    """Return a model: pieces with score and type, and fields by number."""
    return message(
        [
            *((1, message([(1, text), (2, score), (3, kind)])) for text, score, kind in pieces),
            (2, message(trainer.items())),
            (3, message(normalizer.items())),
        ]
    )


SPECIAL = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
WORDS = ["▁t", "he", "▁the", "in", "▁in", "er", "▁▁", "▁▁▁▁", "ll", "ell", "ello", "▁H", "▁Hello"]
LETTERS = "▁etaoinshrdlucmfpwgybvkxjqzTH,.!0123456789é"
BPE_PIECES = [
    *SPECIAL,
    *BYTES,
    ("<sep>", 0.0, USER_DEFINED),
    *((word, -float(rank), NORMAL) for rank, word in enumerate([*WORDS, *LETTERS])),
]
"""A small model of BPE with bytes for what is unknown, as Llama 2 has it."""

UNIGRAM_PIECES = [
    *SPECIAL,
    *((word, -1.5 - rank / 8, NORMAL) for rank, word in enumerate(WORDS) if word[:2] != "▁▁"),
    *((letter, -4.0 - rank / 8, NORMAL) for rank, letter in enumerate(LETTERS)),
]


def bpe_model() -> bytes:
    """Return the small model of BPE; keeps spaces, and adds one at the beginning."""
    return sentencepiece_model(
        BPE_PIECES, {3: 2, 35: 1, 40: 0, 41: 1, 42: 2}, {1: "identity", 3: 1, 4: 0, 5: 1}
    )


def unigram_model() -> bytes:
    """Return a small model of unigrams; joins spaces."""
    return sentencepiece_model(UNIGRAM_PIECES, {3: 1}, {1: "identity", 3: 1, 4: 1, 5: 1})


def tiktoken_file(tokens: Iterable[bytes] = ()) -> bytes:
    """Return a file of the bytes and some tokens."""
    all_tokens = [*(bytes([byte]) for byte in range(256)), *tokens]
    lines = (base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(all_tokens))
    return b"\n".join(lines) + b"\n"


TIKTOKEN = [
    b"he",
    b"ll",
    b"hell",
    b"hello",
    b" h",
    b" hello",
    "汉".encode(),
    "汉字".encode(),
    b"'s",
]
TIKTOKEN += ["é".encode(), b"12", b"123", b"  ", b"\n\n"]
