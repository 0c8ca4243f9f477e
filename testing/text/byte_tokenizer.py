"""A tokenizer with one token per byte, and the special tokens that a test needs."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardpoint.plugins import DecodeStream, ModelFiles, RequestError, Tokenizer, TokenizerContext

_NUM_BYTES = 256


class ByteTokenizer(Tokenizer):
    """One token per byte, and one per special token."""

    contract = 1

    def __init__(self, special_tokens: Sequence[str]) -> None:
        """Give the special tokens the ids after the bytes."""
        files = ModelFiles(name="bytes", path=Path())
        super().__init__(TokenizerContext(name="bytes", options=self.Options(), files=files))
        self._special = {text: _NUM_BYTES + i for i, text in enumerate(special_tokens)}
        ordered = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._texts = {token_id: text for text, token_id in self._special.items()}

    @property
    def vocab_size(self) -> int:
        """Number of bytes and special tokens."""
        return _NUM_BYTES + len(self._special)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the special tokens."""
        return self._special

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """None."""
        return ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        """Return the ids of special tokens and of the bytes between."""
        ids: list[int] = []
        at = 0
        for found in self._pattern.finditer(text):
            ids += [*text[at : found.start()].encode(), self._special[found.group()]]
            at = found.end()
        return [*ids, *text[at:].encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text."""
        stream = _ByteStream({} if skip_special_tokens else self._texts)
        return "".join(stream.step(token) or "" for token in token_ids)

    def decode_stream(
        self,
        prompt_token_ids: Sequence[int],  # noqa: ARG002
        *,
        skip_special_tokens: bool = True,
    ) -> DecodeStream:
        """Return a decoder."""
        return _ByteStream({} if skip_special_tokens else self._texts)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],  # noqa: ARG002
        *,
        add_generation_prompt: bool = True,  # noqa: ARG002
        template: str | None = None,  # noqa: ARG002
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002
    ) -> str:
        """Raise RequestError: there is no template."""
        raise RequestError("the tokenizer has no chat template")


class _ByteStream:
    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str | None:
        """Return the text that the token completes."""
        if token_id >= _NUM_BYTES:
            return self._texts.get(token_id)
        return self._decoder.decode(bytes([token_id])) or None
