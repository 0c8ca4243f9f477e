"""Tokenizers: text to token ids and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .component import Component, Context
from .model import ModelFiles

__all__ = ["DecodeStream", "Tokenizer", "TokenizerContext"]


@dataclass(frozen=True, kw_only=True)
class TokenizerContext(Context["Tokenizer"]):
    """What a tokenizer is built with.

    Attributes:
        files: where the tokenizer's own files are; usually the model's.
    """

    files: ModelFiles


class DecodeStream(Protocol):
    """Decodes one token at a time."""

    def step(self, token_id: int) -> str | None:
        """Take one token; return the text that became certain, or None."""


class Tokenizer(Component):
    """Text to token ids and back, and the chat template. Lives in the frontend."""

    context: TokenizerContext

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included; may be left out.

        Raises:
            NotImplementedError: the tokenizer does not say.
        """
        raise NotImplementedError(f"the tokenizer {self.name!r} does not say its vocab_size")

    @property
    @abstractmethod
    def eos_token_ids(self) -> Sequence[int]:
        """The end-of-sequence tokens that the tokenizer itself names; may be empty."""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        May be called in another thread than the other methods, while one of them runs.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; bytes that are no text yet become U+FFFD."""

    @abstractmethod
    def decode_stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        """Return a decoder for the tokens that follow the prompt."""

    @abstractmethod
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
    ) -> str:
        """Return the prompt text for a conversation.

        Raises:
            RequestError: if the model has no chat template or the template refuses the messages.
        """
