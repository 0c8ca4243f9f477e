"""Tokenizers: text to token ids and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hardpoint.errors import RequestError, shown
from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import (
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
from hardpoint.plugins.config.model_files import ModelFiles

from .vocabulary import Vocabulary

__all__ = ["EncodedPair", "Tokenizer", "TokenizerContext"]


@dataclass(frozen=True, kw_only=True)
class TokenizerContext(Context["Tokenizer"]):
    """Context of a tokenizer.

    Attributes:
        files: location of the tokenizer's files; usually the model's.
    """

    files: ModelFiles


@dataclass(frozen=True)
class EncodedPair:
    """The tokens of two texts, as a model reads them together.

    Attributes:
        token_ids: ids of the tokens of both texts, and of the special tokens around them.
        first: positions of the tokens of the first text, one after the other.
        second: positions of the second text, which follow.
        second_type_start: position of the first token of type 1 (`token_type_ids`); all tokens from
            there on have it. The number of tokens, if none does.
    """

    token_ids: list[int]
    first: range
    second: range
    second_type_start: int

    def within(self, vocab_size: int) -> EncodedPair:
        """Return the pair.

        Raises:
            UnusableError: a token id is too large.
        """
        within(self.token_ids, vocab_size)
        return self

    def cut(self, limit: int) -> EncodedPair:
        """Return at most so many tokens; the longer text is truncated first.

        It is the cut of transformers for `truncation="longest_first"`.

        Raises:
            RequestError: the limit leaves no room for a token of a text.
        """
        special = len(self.token_ids) - len(self.first) - len(self.second)
        room = limit - special
        if room < 1:
            raise RequestError(
                f"truncate_prompt_tokens: expected more than {special}, the special tokens of a "
                f"pair, got {limit}"
            )
        shorter, longer = sorted((len(self.first), len(self.second)))
        if shorter + longer <= room:
            return self
        shorter = min(shorter, room // 2)
        sizes = (shorter, room - shorter)
        kept_1, kept_2 = sizes if len(self.first) <= len(self.second) else reversed(sizes)
        first, second = self.first[:kept_1], self.second[:kept_2]
        ends = self.first[kept_1:], self.second[kept_2:]
        ids = [
            *self.token_ids[: first.stop],
            *self.token_ids[self.first.stop : second.stop],
            *self.token_ids[self.second.stop :],
        ]
        types = self.second_type_start
        types -= sum(max(min(types, end.stop) - end.start, 0) for end in ends)
        lost = len(ends[0])
        return EncodedPair(ids, first, range(second.start - lost, second.stop - lost), types)


class DecodeStream(Protocol):
    """Decodes one token at a time."""

    @returns(PIECE)
    def step(self, token_id: int) -> str | None:
        """Add a token of the model's vocabulary; return the text that is final now, or None."""


def _special_tokens(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> dict[str, int]:  # noqa: ARG001
    tokens = dict(value)
    for text, token in tokens.items():
        if not isinstance(text, str) or type(token) is not int:
            raise unusable(text, f": {shown(token)}, expected a token id by its text", LONG)
    return tokens


def _texts_by_name(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> dict[str, str]:  # noqa: ARG001
    texts = dict(value)
    for name, text in texts.items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise unusable(name, f": {shown(text)}, expected a text by its name", LONG)
    return texts


def _end_tokens(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> list[int]:
    # A tokenizer may know more special tokens than the model.
    return within(TOKEN_IDS.check(value, args, originals), 1 << 31)


def _vocabulary(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> Vocabulary:
    if not isinstance(value, Vocabulary):
        raise unusable(value, ", expected a Vocabulary", LONG)
    tokens, expected = value.tokens, "expected a tuple of bytes"
    if not isinstance(tokens, tuple):
        raise UnusableError(f"returned tokens in a {type(tokens).__name__}, {expected}")
    for token in tokens:
        if type(token) is not bytes:
            raise UnusableError(f"returned the token {shown(token)}, {expected}")
    special = within(TOKEN_IDS.check(value.special, args, originals), len(tokens))
    return Vocabulary(tokens=tokens, special=tuple(sorted(set(special))))


def _pair(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> EncodedPair:
    if not isinstance(value, EncodedPair):
        raise unusable(value, ", expected an EncodedPair", LONG)
    ids = TOKEN_IDS.check(value.token_ids, args, originals)
    first, second, types = value.first, value.second, value.second_type_start
    places = [first.start, first.stop, second.start, second.stop]
    if [0, *places, len(ids)] != sorted([0, *places, len(ids)]) or first.step * second.step != 1:
        raise unusable(value, ", with texts that overlap or are out of order", LONG)
    if type(types) is not int or not 0 <= types <= len(ids):
        raise unusable(value, ", with a second_type_start outside of the tokens", LONG)
    return EncodedPair(ids, first, second, types)


END_TOKENS = Returned("token ids", _end_tokens)
TEXTS_BY_NAME = Returned("texts by their names", _texts_by_name)
SPECIAL_TOKENS = Returned("token ids by their texts", _special_tokens)
PAIR = Returned("an `EncodedPair` with consecutive texts", _pair)
VOCABULARY = Returned("a `Vocabulary`: bytes, and ids of some of them", _vocabulary)


class Tokenizer(Component):
    """Converts text to token ids and back, and applies the chat template, in the frontend.

    Token ids are from the model's vocabulary. If a method raises, or returns something else,
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
        raise NotImplementedError(f"the tokenizer {self.name!r} has no vocab_size")

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

        The tokens of `encode(text)` joined are the text's bytes, except for additions or changes of
        the tokenizer itself, such as a space at the beginning.

        Raises:
            NotImplementedError: the tokenizer does not know it; requests with grammars are
                rejected.
        """
        raise NotImplementedError(f"the tokenizer {self.name!r} has no vocabulary()")

    @property
    @returns(NONE_OR_SOME_TEXT)
    def chat_template(self) -> str | None:
        """The source of the chat template, if there is one; it shows which formats it is for."""
        return None

    @property
    @returns(TEXTS_BY_NAME)
    def chat_templates(self) -> Mapping[str, str]:
        """The sources of all chat templates by name; a request may choose one.

        By default there is `chat_template` alone, as `default`.
        """
        return {} if self.chat_template is None else {"default": self.chat_template}

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

    @returns(PAIR, raises=(RequestError, NotImplementedError))
    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Return the tokens of two texts that a model reads together; may be left out.

        Called like `encode`. The tokens of each text are the same as for the text alone.

        Raises:
            RequestError: a text cannot be encoded.
            NotImplementedError: the tokenizer takes no pairs, which are rejected then.
        """
        raise NotImplementedError(f"the tokenizer {self.name!r} has no encode_pair()")

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
            RequestError: the model has no chat template, or the template rejects the messages.
        """
