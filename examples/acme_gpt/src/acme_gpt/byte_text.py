"""A tokenizer without files: token 0 to 255 is a byte of UTF-8, 256 is the end of the text."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import RequestError, Tokenizer
from hardpoint.plugins.grammars import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EOS = 256


class ByteStream:
    """Decodes one byte at a time; a character is final with its last byte."""

    def __init__(self) -> None:
        """Start between two characters."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str | None:
        """Return the characters that this byte completes."""
        return self._decoder.decode(bytes([token_id])) or None if token_id < EOS else None


class ByteText(Tokenizer):
    """Bytes as tokens."""

    contract = 1

    @property
    def vocab_size(self) -> int:
        """256 bytes, and the end."""
        return EOS + 1

    def vocabulary(self) -> Vocabulary:
        """Return the bytes; the end has none."""
        return Vocabulary(tokens=(*(bytes([byte]) for byte in range(EOS)), b""))

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """The end of the text."""
        return (EOS,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes; there are no special tokens to add."""
        del add_special_tokens
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the bytes."""
        del skip_special_tokens
        return bytes(token for token in token_ids if token < EOS).decode(errors="replace")

    def decode_stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> ByteStream:
        """Return a decoder that begins with the output, maybe inside a character."""
        del skip_special_tokens
        stream = ByteStream()
        for token_id in prompt_token_ids[-4:]:
            stream.step(token_id)
        return stream

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **options: object,  # noqa: ARG002
    ) -> str:
        """Return `role: content` per line."""
        if template is not None:
            raise RequestError("chat_template: this tokenizer has a fixed one")
        try:
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        except (LookupError, TypeError) as cause:
            raise RequestError(f"messages: expected role and content: {cause}") from cause
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")
