"""vLLM's forms of prompts."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from hardpoint_vllm.protocol import make_tool_call_id as make_tool_call_id

from hardpoint.errors import RequestError

__path__: list[str] = []  # vLLM has modules in `inputs`

ChatCompletionMessageParam = CustomChatCompletionMessageParam = ConversationMessage = dict[str, Any]
ChatCompletionContentPartParam = ChatCompletionContentPartTextParam = dict[str, Any]
ChatTemplateContentFormat = ChatTemplateContentFormatOption = str
random_tool_call_id = make_tool_call_id


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


class DataPrompt(TypedDict):
    """Input of an IO processor."""

    data: Any


SingletonPrompt = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
PromptType = SingletonPrompt | ExplicitEncoderDecoderPrompt | DataPrompt
TokenInputs = TokensPrompt
SingletonInputs = ProcessorInputs = TokensPrompt | EmbedsPrompt


def is_tokens_prompt(prompt: Any) -> bool:
    """Return whether this is a prompt of token ids."""
    return isinstance(prompt, Mapping) and "prompt_token_ids" in prompt


def is_embeds_prompt(prompt: Any) -> bool:
    """Return whether this is a prompt of embeddings."""
    return isinstance(prompt, Mapping) and "prompt_embeds" in prompt


def is_explicit_encoder_decoder_prompt(prompt: Any) -> bool:
    """Return whether this is a prompt of an encoder and a decoder."""
    return isinstance(prompt, Mapping) and "encoder_prompt" in prompt


def tokens_input(prompt_token_ids: list[int], **fields: Any) -> TokensPrompt:
    """Return a prompt of token ids."""
    prompt: TokensPrompt = {"prompt_token_ids": prompt_token_ids, **fields}  # type: ignore[typeddict-item]
    return prompt


token_inputs = tokens_input


def is_one(prompts: Any) -> bool:
    """Return whether this is one prompt, not a list of prompts."""
    return isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and bool(prompts) and all(map(_is_id, prompts))
    )


def _is_id(item: Any) -> bool:
    return type(item) is int or (hasattr(item, "__index__") and not hasattr(item, "__len__"))


def native_prompt(prompt: Any) -> tuple[Any, str | None]:
    """Return a prompt that Hardpoint takes, and its cache salt.

    Raises:
        RequestError: there is no counterpart.
    """
    if not isinstance(prompt, Mapping):
        return (prompt if isinstance(prompt, str) else _plain_ids(prompt)), None
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
            return _plain_ids(fields["prompt_token_ids"]), salt
    return fields, salt


def _plain_ids(ids: Any) -> list[Any]:
    """Return token ids as numbers of Python, also from an array or a tensor."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    return [item if type(item) is int else _plain_id(item) for item in ids]


def _plain_id(item: Any) -> Any:
    return operator.index(item) if hasattr(item, "__index__") else item


def apply_hf_chat_template(
    tokenizer: Any,
    conversation: Sequence[Mapping[str, Any]],
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    model_config: Any = None,
    tokenize: bool = False,
    **variables: Any,
) -> Any:
    """Return the prompt of a conversation, by a tokenizer's chat template or another one."""
    del model_config
    return tokenizer.apply_chat_template(
        conversation, tools, chat_template=chat_template, tokenize=tokenize, **variables
    )


def load_chat_template(chat_template: str | Path | None, *, is_literal: bool = False) -> str | None:
    """Return the text of a chat template, given as text or by the path of its file."""
    if chat_template is None or is_literal:
        return None if chat_template is None else str(chat_template)
    text = str(chat_template)
    if not any(mark in text for mark in ("{", "}", "\n")) or Path(text).is_file():
        return Path(text).read_text(encoding="utf-8")
    return text
