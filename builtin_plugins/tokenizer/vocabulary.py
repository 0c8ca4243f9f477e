"""The bytes of each token of a tokenizer, for grammars."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import Replace

from hardpoint.plugins.grammars import Vocabulary

from .stream import byte_of_character

_MAX_IDS = 1 << 22
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEANUP = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " ' ": "'",
    " n't": "n't",
    " 'm": "'m",
    " do not": " don't",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}
"""Replacements of the library's WordPiece decoder, in order."""

_CLEANED = re.compile("|".join(map(re.escape, _CLEANUP)))

_Decode = Callable[[str], str]
"""Decodes a token. Bytes that are no UTF-8 are lone surrogates, as `surrogateescape` has them."""


def num_token_ids(tokenizer: FastTokenizer) -> int:
    """Return one more than the largest token id; ids below it may have no token."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if None not in map(tokenizer.id_to_token, range(size)):
        return size
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def read_vocabulary(tokenizer: FastTokenizer, num_ids: int) -> Vocabulary:
    """Return the bytes that each token adds to the text, where it is not the first.

    Args:
        tokenizer: tokenizer of the library.
        num_ids: `num_token_ids` of it.

    Raises:
        NotImplementedError: the decoder has tokens without bytes of their own, or
            the ids are too large for a table.
    """
    if num_ids > _MAX_IDS:
        raise NotImplementedError(
            f"the tokenizer's largest token id is {num_ids - 1}; grammars need ids below {_MAX_IDS}"
        )
    pieces = list(map(tokenizer.id_to_token, range(num_ids)))
    texts = [text or "" for text in pieces]
    for decode in _decoders(tokenizer):
        texts = list(map(decode, texts))
    tokens = [
        b"" if token is None else text.encode(errors="surrogateescape")
        for token, text in zip(pieces, texts, strict=True)
    ]
    special = []
    for token_id, added in sorted(tokenizer.get_added_tokens_decoder().items()):
        if added.special:
            special.append(token_id)
        if added.special or not _is_text(tokens[token_id]):
            tokens[token_id] = added.content.encode()
    return Vocabulary(tokens=tuple(tokens), special=tuple(special))


def _is_text(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decoders(tokenizer: FastTokenizer) -> list[_Decode]:
    """Return the changes of the tokenizer's decoder to a token that is not the first, in order.

    Raises:
        NotImplementedError: a part of the decoder is not known.
    """
    if tokenizer.decoder is None:
        return [_after_space]
    decoders: list[_Decode] = []
    is_fused = False
    for part in _parts(json.loads(tokenizer.decoder.__getstate__())):
        is_fused = is_fused or part["type"] == "Fuse"
        # Fused parts are stripped as a whole, not each token.
        if part["type"] != "Fuse" and not (is_fused and part["type"] == "Strip"):
            decoders.append(_decoder(part))
    return decoders


def _parts(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for part in decoder.get("decoders", ()):
        yield from _parts(part)


def _decoder(part: Mapping[str, Any]) -> _Decode:
    match part:
        case {"type": "ByteLevel"}:
            return _from_byte_alphabet
        case {"type": "ByteFallback"}:
            return _from_byte_token
        case {"type": "Metaspace", "replacement": mark}:
            return partial(_replaced, old=mark, new=" ")
        case {"type": "BPEDecoder", "suffix": suffix}:
            return partial(_replaced, old=suffix, new=" ")
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return partial(_replaced, old=old, new=new)
        case {"type": "Replace", "pattern": {"Regex": pattern}, "content": new}:
            return partial(_matches_replaced, Replace(Regex(pattern), new))
        case {"type": "Strip", "content": character, "start": start, "stop": stop}:
            return partial(_stripped, character=character, start=start, stop=stop)
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return partial(_from_word_piece, prefix=prefix, cleanup=cleanup)
    raise NotImplementedError(
        f"the tokenizer's decoder is of the type {part['type']!r}, which grammars cannot follow"
    )


def _after_space(text: str) -> str:
    return f" {text}"


_BYTES = {ord(character): byte for character, byte in byte_of_character().items()}


def _from_byte_alphabet(text: str) -> str:
    """Decode a token in GPT-2's alphabet; a token with other characters is plain text."""
    if text.isascii():  # characters of the alphabet stand for themselves
        return text
    try:
        return codecs.charmap_encode(text, "strict", _BYTES)[0].decode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text


def _from_byte_token(text: str) -> str:
    match = _BYTE.fullmatch(text)
    return bytes.fromhex(match[1]).decode(errors="surrogateescape") if match else text


def _replaced(text: str, *, old: str, new: str) -> str:
    return text.replace(old, new) if old else text


def _matches_replaced(decoder: Replace, text: str) -> str:
    try:
        return decoder.decode([text])
    except UnicodeEncodeError:  # a part of a character matches nothing
        return text


def _stripped(text: str, *, character: str, start: int, stop: int) -> str:
    text = text[:start].lstrip(character) + text[start:]
    end = max(0, len(text) - stop)
    return text[:end] + text[end:].rstrip(character)


def _from_word_piece(text: str, *, prefix: str, cleanup: bool) -> str:
    text = text.removeprefix(prefix) if text.startswith(prefix) else f" {text}"
    if cleanup and _CLEANED.search(text):
        for old, new in _CLEANUP.items():
            text = text.replace(old, new)
    return text
