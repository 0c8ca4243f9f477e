"""vLLM's forms of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from hardpoint.errors import RequestError

__path__: list[str] = []  # vLLM had a module `inputs.data`

ChatCompletionMessageParam = dict[str, Any]


class TextPrompt(TypedDict):
    """A text."""

    prompt: str
    multi_modal_data: NotRequired[dict[str, Any] | None]
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]
    multi_modal_data: NotRequired[dict[str, Any] | None]
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """Rows of embeddings, [tokens, hidden_size]."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """Prompts of an encoder and a decoder, which no model of Hardpoint takes."""

    encoder_prompt: Any
    decoder_prompt: Any


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt


def tokens_input(prompt_token_ids: list[int], **fields: Any) -> TokensPrompt:
    """Return a prompt of token ids."""
    prompt: TokensPrompt = {"prompt_token_ids": prompt_token_ids, **fields}  # type: ignore[typeddict-item]
    return prompt


def is_one(prompts: Any) -> bool:
    """Return whether this is one prompt, not a list of prompts."""
    return isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and bool(prompts) and all(type(p) is int for p in prompts)
    )


def native_prompt(prompt: Any) -> tuple[Any, str | None]:
    """Return a prompt that Hardpoint takes, and its cache salt.

    Raises:
        RequestError: there is no counterpart.
    """
    if not isinstance(prompt, Mapping):
        return prompt, None
    fields = {name: value for name, value in prompt.items() if value is not None}
    salt = fields.pop("cache_salt", None)
    fields.pop("multi_modal_uuids", None)
    if "encoder_prompt" in fields or "decoder_prompt" in fields:
        raise RequestError(
            "encoder_prompt: expected a prompt of a decoder; encoder-decoder models are not "
            "supported (docs/models.md)"
        )
    if fields.pop("mm_processor_kwargs", None):
        raise RequestError(
            "mm_processor_kwargs: expected none; sizes of images come from the model's files"
        )
    media = fields.get("multi_modal_data")
    if isinstance(media, Mapping):
        if other := sorted(media.keys() - {"image"}):
            raise RequestError(f"multi_modal_data: expected images, got {', '.join(other)}")
        if not media:
            del fields["multi_modal_data"]
        elif not isinstance(media["image"], list | tuple):
            fields["multi_modal_data"] = {"image": [media["image"]]}
    if "prompt_token_ids" in fields and "prompt_embeds" not in fields:
        fields.pop("prompt", None)
        fields.pop("token_type_ids", None)
        if set(fields) == {"prompt_token_ids"}:
            return list(fields["prompt_token_ids"]), salt
    return fields, salt


def load_chat_template(chat_template: str | Path | None, *, is_literal: bool = False) -> str | None:
    """Return the text of a chat template, given as text or by the path of its file."""
    if chat_template is None or is_literal:
        return None if chat_template is None else str(chat_template)
    text = str(chat_template)
    if not any(mark in text for mark in ("{", "}", "\n")) or Path(text).is_file():
        return Path(text).read_text(encoding="utf-8")
    return text
