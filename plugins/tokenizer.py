"""Tokenizers: text to token ids and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hardpoint.errors import RequestError, shown

from .behaviour import (
    DECODE_STREAM,
    LONG,
    NONE_OR_SOME_TEXT,
    NUMBER_OF_TOKENS,
    PIECE,
    SOME_TEXT,
    TOKEN_IDS,
    Returned,
    UnusableError,
    returns,
    unusable,
    within,
)
from .component import Component, Context
from .grammars import Vocabulary
from .loader import ModelFiles

__all__ = ["DecodeStream", "Tokenizer", "TokenizerContext"]


@dataclass(frozen=True, kw_only=True)
class TokenizerContext(Context["Tokenizer"]):
    """Context of a tokenizer.

    Attributes:
        files: location of the tokenizer's files; usually the model's.
    """

    files: ModelFiles


class DecodeStream(Protocol):
    """Decodes one token at a time."""

    @returns(PIECE)
    def step(self, token_id: int) -> str | None:
        """Add a token of the model's vocabulary; return the text that is final now, or None."""


def _special_tokens(value: Any, handed: Sequence[Any], given: Sequence[Any]) -> dict[str, int]:  # noqa: ARG001
    tokens = dict(value)
    for text, token in tokens.items():
        if not isinstance(text, str) or type(token) is not int:
            raise unusable(text, f": {shown(token)}, expected a token id by its text", LONG)
    return tokens


def _end_tokens(value: Any, handed: Sequence[Any], given: Sequence[Any]) -> list[int]:
    # A tokenizer may know more special tokens than the model.
    return within(TOKEN_IDS.check(value, handed, given), 1 << 31)


def _vocabulary(value: Any, handed: Sequence[Any], given: Sequence[Any]) -> Vocabulary:
    if not isinstance(value, Vocabulary):
        raise unusable(value, ", expected a Vocabulary", LONG)
    tokens, expected = value.tokens, "expected a tuple of bytes"
    if not isinstance(tokens, tuple):
        raise UnusableError(f"returned tokens in a {type(tokens).__name__}, {expected}")
    for token in tokens:
        if type(token) is not bytes:
            raise UnusableError(f"returned the token {shown(token)}, {expected}")
    special = within(TOKEN_IDS.check(value.special, handed, given), len(tokens))
    return Vocabulary(tokens=tokens, special=tuple(sorted(set(special))))


END_TOKENS = Returned("token ids", _end_tokens)
SPECIAL_TOKENS = Returned("token ids by their texts", _special_tokens)
VOCABULARY = Returned("a `Vocabulary`: bytes, and ids of some of them", _vocabulary)


class Tokenizer(Component):
    """Converts text to token ids and back, and applies the chat template, in the frontend.

    Token ids are those of the model's vocabulary. If a method raises, or returns something else,
    the request for which it was called ends with an error that names the tokenizer. The properties
    are read when the engine starts.
    """

    context: TokenizerContext

    @property
    @returns(NUMBER_OF_TOKENS, raises=(NotImplementedError,))
    def vocab_size(self) -> int:
        """Number of token ids, special ones included; may be left out.

        Raises:
            NotImplementedError: the tokenizer does not know it.
        """
        raise NotImplementedError(f"the tokenizer {self.name!r} does not say its vocab_size")

    @property
    @returns(SPECIAL_TOKENS)
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of tokens that ordinary text never becomes part of, by their texts.

        Special and added tokens. By default there are none.
        """
        return {}

    @returns(VOCABULARY, raises=(NotImplementedError,))
    def vocabulary(self) -> Vocabulary:
        """Return the bytes of each token, for grammars; called once, if any backend is enabled.

        The tokens of `encode(text)` joined are the text's bytes, but for what the tokenizer adds
        or changes itself, such as a space at the beginning.

        Raises:
            NotImplementedError: the tokenizer does not know it; requests with grammars are refused.
        """
        raise NotImplementedError(f"the tokenizer {self.name!r} has no vocabulary()")

    @property
    @returns(NONE_OR_SOME_TEXT)
    def chat_template(self) -> str | None:
        """The source of the chat template, if there is one; it shows which formats it is for."""
        return None

    @property
    @returns(END_TOKENS)
    @abstractmethod
    def eos_token_ids(self) -> Sequence[int]:
        """End-of-sequence tokens of the tokenizer; may be empty."""

    @returns(TOKEN_IDS, raises=(RequestError,))
    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        May be called from several threads at once, also while other methods run.

        Raises:
            RequestError: the text cannot be encoded.
        """

    @returns(SOME_TEXT)
    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; incomplete characters become U+FFFD.

        Ids that the model has and the tokenizer has not are skipped.
        """

    @returns(DECODE_STREAM, raises=(RequestError,))
    @abstractmethod
    def decode_stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        """Return a decoder for the tokens that follow the prompt.

        Raises:
            RequestError: there are no texts of tokens.
        """

    @returns(SOME_TEXT, raises=(RequestError,))
    @abstractmethod
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text for a conversation.

        Args:
            messages: mappings with `role` and `content`.
            add_generation_prompt: whether the text ends with the beginning of an answer.
            template: instead of the model's.
            tools: tools that the model may call, as OpenAI's API has them. This and the following
                are left out where a caller does not use them.
            continue_final_message: the text ends with the last message, which the model goes on
                with.
            variables: further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
