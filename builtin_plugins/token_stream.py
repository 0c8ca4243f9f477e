"""Token ids to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.decoders import DecodeStream as FastDecodeStream

__all__ = ["TokenStream", "TokenTexts"]

# Enough tokens for a character of four bytes and a letter before it.
_PRIMING_TOKENS = 6
_REPLACEMENT = "\ufffd"


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


class TokenStream:
    """Decodes one token at a time with the prompt's last tokens as context."""

    def __init__(self, texts: TokenTexts, prompt: Sequence[int]) -> None:
        """Begin after the prompt."""
        self._texts = texts
        self._pending: list[int] = []
        tail = list(prompt[-_PRIMING_TOKENS:])
        whole = len(tail)
        # A character that the prompt leaves unfinished belongs to what follows.
        while whole and texts.decode(tail[:whole]).endswith(_REPLACEMENT):
            whole -= 1
        # Between characters, a decoder that joins bytes needs to remember nothing.
        self._stream = None if texts.joins_bytes else self._fresh(tail[:whole])
        self._shown = 0
        for token_id in tail[whole:]:
            self.step(token_id)
        if whole < len(tail):
            certain = texts.decode(tail).rstrip(_REPLACEMENT)
            self._shown = len(certain) - len(texts.decode(tail[:whole]))

    def step(self, token_id: int) -> str | None:
        """Take one token; return the text that became certain, if any did."""
        if self._stream is None:
            if (text := self._texts[token_id]) is not None:
                return text
            self._stream = self._fresh([])
        self._pending.append(token_id)
        text = self._decoded(self._stream, token_id)
        if text is None:
            return None
        self._pending.clear()
        if self._texts.joins_bytes:
            self._stream = None
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
