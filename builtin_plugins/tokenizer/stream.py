"""Token ids to text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.decoders import DecodeStream as FastDecodeStream

from hardpoint.plugins import DecodeStream

# Enough tokens for a character of four bytes and a letter before it.
_PRIMING_TOKENS = 6
_REPLACEMENT = "\ufffd"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenTexts(dict[int, str | None]):
    """Where a tokenizer's decoder joins bytes, the text of each token of whole characters.

    Such a token reads the same wherever it stands, and looking that up costs a tenth of decoding
    it. All others have None. Filled as tokens are asked for; shared by the tokenizer's streams.

    Attributes:
        joins_bytes: whether the decoder does so; nothing is to be looked up where it does not.
    """

    def __init__(self, tokenizer: FastTokenizer, *, skip_special_tokens: bool) -> None:
        """Begin empty."""
        super().__init__()
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.joins_bytes = isinstance(tokenizer.decoder, ByteLevel)

    def __missing__(self, token_id: int) -> str | None:
        text = self.decode([token_id])
        self[token_id] = found = None if _REPLACEMENT in text else text
        return found

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids that follow nothing."""
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, where the decoder joins bytes."""
        if (text := self[token_id]) is not None:
            return text.encode()
        token = self.tokenizer.id_to_token(token_id) or ""
        table = _byte_of_character()
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode()  # added as text, as it is

    def stream(self, prompt: Sequence[int]) -> DecodeStream:
        """Return a decoder for the tokens that follow a prompt."""
        return (ByteStream if self.joins_bytes else TokenStream)(self, prompt)


class ByteStream:
    """Decodes one token at a time where the tokenizer's decoder joins bytes.

    Text is certain as soon as no character is unfinished. What a token costs depends on nothing
    that came before, also where bytes never become characters.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int]) -> None:
        """Begin after the prompt; a character that it leaves unfinished belongs to what follows."""
        self._texts = texts
        self._decoder = _Utf8Decoder("replace")
        for token_id in prompt[-_PRIMING_TOKENS:]:
            self._decoder.decode(texts.bytes_of(token_id))
        self._unfinished = self._is_unfinished()
        self._held: list[str] = []  # text of tokens that hold a part of an unfinished character

    def step(self, token_id: int) -> str | None:
        """Take one token; return the text that became certain, if any did."""
        if not self._unfinished and (text := self._texts[token_id]) is not None:
            return text
        self._held.append(self._decoder.decode(self._texts.bytes_of(token_id)))
        self._unfinished = self._is_unfinished()
        if self._unfinished:
            return None
        text = "".join(self._held)
        self._held.clear()
        return text

    def _is_unfinished(self) -> bool:
        return bool(self._decoder.getstate()[0])


class TokenStream:
    """Decodes one token at a time with the prompt's last tokens as context: for any tokenizer."""

    def __init__(self, texts: TokenTexts, prompt: Sequence[int]) -> None:
        """Begin after the prompt."""
        self._texts = texts
        self._pending: list[int] = []
        tail = list(prompt[-_PRIMING_TOKENS:])
        whole = len(tail)
        # A character that the prompt leaves unfinished belongs to what follows.
        while whole and texts.decode(tail[:whole]).endswith(_REPLACEMENT):
            whole -= 1
        self._stream = self._fresh(tail[:whole])
        self._shown = 0
        for token_id in tail[whole:]:
            self.step(token_id)
        if whole < len(tail):
            certain = texts.decode(tail).rstrip(_REPLACEMENT)
            self._shown = len(certain) - len(texts.decode(tail[:whole]))

    def step(self, token_id: int) -> str | None:
        """Take one token; return the text that became certain, if any did."""
        self._pending.append(token_id)
        text = self._decoded(self._stream, token_id)
        if text is None:
            return None
        self._pending.clear()
        if self._shown:
            # Of the prompt's unfinished token, this much was text of the prompt already.
            text, self._shown = text[self._shown :], 0
        return text

    def _decoded(self, stream: FastDecodeStream, token_id: int) -> str | None:
        try:
            return stream.step(self._texts.tokenizer, token_id)
        except Exception as cause:  # the library raises nothing narrower
            if "Invalid prefix" not in str(cause):
                raise
        # Later tokens changed the text of earlier ones, so start again after the last text.
        self._stream = again = self._fresh([])
        parts = [again.step(self._texts.tokenizer, pending) for pending in self._pending]
        return "".join(part for part in parts if part) or None

    def _fresh(self, ids: list[int]) -> FastDecodeStream:
        return FastDecodeStream(ids=ids, skip_special_tokens=self._texts.skip_special_tokens)


@cache
def _byte_of_character() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for.

    Bytes that print stand for themselves, the others, in order, for U+0100 and up: as in GPT-2's
    encoder (Radford et al., 2019).
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printing]
    table = {chr(byte): byte for byte in printing}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}
