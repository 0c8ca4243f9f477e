"""Incremental decoding of token ids to text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.decoders import DecodeStream as FastDecodeStream

if TYPE_CHECKING:
    from hardpoint.plugins.text.tokenizer import DecodeStream


# Enough tokens for a character of four bytes and one before it.
_PRIMING_TOKENS = 6
_REPLACEMENT = "\ufffd"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenTexts(dict[int, str | None]):
    """Cache of token texts, shared by a tokenizer's decode streams.

    With a byte-level decoder, a token of whole characters has the same text in any context; looking
    it up costs a tenth of decoding it. All other tokens have None.

    Attributes:
        is_byte_level: whether the decoder is byte-level; the cache is used only then.
    """

    def __init__(self, tokenizer: FastTokenizer, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.is_byte_level = isinstance(tokenizer.decoder, ByteLevel)

    def __missing__(self, token_id: int) -> str | None:
        text = self.decode([token_id])
        self[token_id] = visible = None if _REPLACEMENT in text else text
        return visible

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids without context."""
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; for byte-level decoders only."""
        if (text := self[token_id]) is not None:
            return text.encode()
        token = self.tokenizer.id_to_token(token_id) or ""
        table = byte_of_character()
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode()  # an added token is plain text

    def stream(self, prompt: Sequence[int]) -> DecodeStream:
        """Return a decode stream for the output after a prompt."""
        return ByteStream.after(self, prompt) if self.is_byte_level else TokenStream(self, prompt)


# A hundred thousand requests may wait with their streams. Nothing refers back to a stream, so the
# garbage collector need not visit it.
class ByteStream(msgspec.Struct, eq=False, gc=False):
    """Decode stream for byte-level decoders.

    Text is final once no character is incomplete. A token takes constant time, even if its bytes
    never form a character.

    Attributes:
        texts: texts of tokens.
        decoder: while a character is incomplete.
        pending: with a decoder, text since the last final one.
    """

    texts: TokenTexts
    decoder: codecs.IncrementalDecoder | None = None
    pending: list[str] | None = None

    @classmethod
    def after(cls, texts: TokenTexts, prompt: Sequence[int]) -> ByteStream:
        """Start after a prompt; a character that is incomplete there belongs to the output."""
        if prompt and texts[prompt[-1]]:  # nothing is incomplete after a token of whole characters
            return cls(texts)
        decoder = _Utf8Decoder("replace")
        for token_id in prompt[-_PRIMING_TOKENS:]:
            decoder.decode(texts.bytes_of(token_id))
        return cls(texts, decoder, []) if _is_incomplete(decoder) else cls(texts)

    def step(self, token_id: int) -> str | None:
        """Decode one token; return the text that became final, None if none did."""
        decoder = self.decoder
        if decoder is None:
            if (text := self.texts[token_id]) is not None:
                return text
            decoder = self.decoder = _Utf8Decoder("replace")
        pending = self.pending = self.pending or []
        pending.append(decoder.decode(self.texts.bytes_of(token_id)))
        if _is_incomplete(decoder):
            return None
        self.decoder = self.pending = None
        return "".join(pending)


def _is_incomplete(decoder: codecs.IncrementalDecoder) -> bool:
    return bool(decoder.getstate()[0])


class TokenStream:
    """Decode stream for any tokenizer, with the prompt's last tokens as context."""

    def __init__(self, texts: TokenTexts, prompt: Sequence[int]) -> None:
        self._texts = texts
        self._pending: list[int] = []
        tail = list(prompt[-_PRIMING_TOKENS:])
        num_whole = len(tail)
        # A character that is incomplete at the end of the prompt belongs to the output.
        while num_whole and texts.decode(tail[:num_whole]).endswith(_REPLACEMENT):
            num_whole -= 1
        self._stream = self._new_stream(tail[:num_whole])
        self._num_skipped = 0
        for token_id in tail[num_whole:]:
            self.step(token_id)
        if num_whole < len(tail):
            final = texts.decode(tail).rstrip(_REPLACEMENT)
            self._num_skipped = len(final) - len(texts.decode(tail[:num_whole]))

    def step(self, token_id: int) -> str | None:
        """Decode one token; return the text that became final, None if none did."""
        self._pending.append(token_id)
        text = self._decode(self._stream, token_id)
        if text is None:
            return None
        self._pending.clear()
        if self._num_skipped:
            # The prompt's last tokens began with so many characters of the prompt's own text.
            text, self._num_skipped = text[self._num_skipped :], 0
        return text

    def _decode(self, stream: FastDecodeStream, token_id: int) -> str | None:
        try:
            return stream.step(self._texts.tokenizer, token_id)
        except Exception as cause:  # the library raises nothing narrower
            if "Invalid prefix" not in str(cause):
                raise
        # Later tokens changed the text of earlier ones: restart after the last final text.
        self._stream = restarted = self._new_stream([])
        parts = [restarted.step(self._texts.tokenizer, pending) for pending in self._pending]
        return "".join(part for part in parts if part) or None

    def _new_stream(self, ids: list[int]) -> FastDecodeStream:
        return FastDecodeStream(ids=ids, skip_special_tokens=self._texts.skip_special_tokens)


@cache
def byte_of_character() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    Printable bytes are their own characters, the others are U+0100 and up in order, as in GPT-2's
    encoder (Radford et al., 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
