"""The vocabulary of a tokenizer, as grammar backends compile it."""

from __future__ import annotations

import hashlib
from functools import cached_property

import msgspec

__all__ = ["Vocabulary"]


class Vocabulary(msgspec.Struct, frozen=True, dict=True):
    """The bytes of each token.

    Attributes:
        tokens: by id; UTF-8 bytes that a token adds to the text, possibly a part of a character.
            Empty bytes for an id that adds none, which no grammar allows.
        special: ids of special tokens, in order. Grammars never take one for its text, which
            `tokens` has nevertheless.
    """

    tokens: tuple[bytes, ...]
    special: tuple[int, ...] = ()

    @cached_property
    def digest(self) -> str:
        """A hash of the content, in hexadecimal."""
        return hashlib.sha256(msgspec.msgpack.encode((self.tokens, self.special))).hexdigest()

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of special tokens by their texts."""
        return {self.tokens[token].decode(errors="replace"): token for token in self.special}

    def split(self, text: str) -> list[str | int]:
        """Return a text with the special tokens in it, longest first, as ids."""
        parts: list[str | int] = [text]
        for name in sorted(filter(None, self.special_ids), key=len, reverse=True):
            if name in text:
                token = self.special_ids[name]
                parts = [piece for part in parts for piece in _split(part, name, token)]
        return parts


def _split(part: str | int, name: str, token: int) -> list[str | int]:
    if isinstance(part, int):
        return [part]
    pieces: list[str | int] = []
    for index, text in enumerate(part.split(name)):
        if index:
            pieces.append(token)
        if text:
            pieces.append(text)
    return pieces
