"""Tokens of texts: `/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.requests.reading import call_of
from hardpoint.builtin_plugins.server.routes.compatibility_fields import (
    ThinkingMode,
    drop_thinking,
)
from hardpoint.builtin_plugins.server.routes.fields import (
    reasoning_variables,
)
from hardpoint.builtin_plugins.server.routes.images import with_owner
from hardpoint.builtin_plugins.server.routes.models import json_response
from hardpoint.builtin_plugins.server.routes.request_limits import check_limits
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import (
    RequestError,
)
from hardpoint.plugins.server import Call, Route
from hardpoint.typed import Strict

from .chat.request import ChatTool, Effort, Message, plain_messages, plain_tools
from .tokens import TokenId


class TokenizeRequest(Strict):
    """A text or a conversation.

    Attributes:
        prompt: a text.
        messages: a conversation, with `tools` and what else its template takes.
        add_special_tokens: whether to add the model's own, such as the one at the beginning; by
            default to texts alone, for templates write them.
        return_token_strs: whether the answer holds the text of each token.
    """

    refused: ClassVar[Mapping[str, str]] = {"mm_processor_kwargs": "the model reads text alone"}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[ChatTool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingMode | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    without_thinking = drop_thinking


class Tokenized(msgspec.Struct):
    """The tokens of a text or a conversation; `token_strs` is null unless asked for."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    """Tokens.

    Attributes:
        skip_special_tokens: leave special tokens out of the text.
    """

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool = False


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: str


class AddedToken(msgspec.Struct):
    """A special or added token."""

    content: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The description of the tokenizer, with the names of `tokenizer_config.json`.

    Attributes:
        vocab_size: number of token ids; None if the tokenizer does not know it.
        added_tokens_decoder: special and added tokens by their ids.
        chat_templates: all chat templates by name.
    """

    tokenizer_class: str
    vocab_size: int | None = None
    added_tokens_decoder: dict[str, AddedToken]
    eos_token_ids: list[int]
    model_max_length: int | None
    chat_template: str | None
    chat_templates: dict[str, str]


class TokenRoutes:
    """The routes of tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                path="/tokenize",
                endpoint=self.tokenize,
                methods=("POST",),
                summary="Return the tokens of a text or a conversation.",
                request_type=TokenizeRequest,
                response_type=Tokenized,
            ),
            Route(
                path="/detokenize",
                endpoint=self.detokenize,
                methods=("POST",),
                summary="Return the text of tokens.",
                request_type=DetokenizeRequest,
                response_type=Detokenized,
            ),
            Route(
                path="/tokenizer_info",
                endpoint=self.describe,
                summary="Describe the tokenizer, with its special tokens and chat templates.",
                response_type=TokenizerInfo,
            ),
        ]

    async def describe(self, request: Request) -> Response:  # noqa: ARG002
        """Describe the tokenizer, if the server lets clients read it.

        Raises:
            AnswerError: it does not.
        """
        if not self._service.settings.tokenizer_info:
            raise AnswerError(
                404,
                "tokenizer_info: not available on this server (server.tokenizer_info is false)",
                code="not_found",
            )
        tokenizer, config = self._service.engine.tokenizer, self._service.engine.config
        length = config.max_model_len
        info = TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            added_tokens_decoder={
                str(token): AddedToken(text)
                for text, token in sorted(
                    tokenizer.special_tokens.items(), key=lambda entry: entry[1]
                )
            },
            eos_token_ids=list(tokenizer.eos_token_ids),
            model_max_length=length if isinstance(length, int) else None,
            chat_template=tokenizer.chat_template,
            chat_templates=dict(tokenizer.chat_templates),
        )
        with contextlib.suppress(NotImplementedError):
            info.vocab_size = tokenizer.vocab_size
        return json_response(info)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or a conversation."""
        call = call_of(request)
        body = await self._service.requests.read_plain(request, TokenizeRequest)
        await self._service.model(body.model)
        return json_response(await self._service.run(request, lambda: self._tokenized(call, body)))

    async def _tokenized(self, call: Call, body: TokenizeRequest) -> Tokenized:
        tokens = await self._tokens(call, body)
        longest = self._service.engine.config.max_model_len
        answer = Tokenized(len(tokens), longest if isinstance(longest, int) else None, tokens)
        if body.return_token_strs:
            answer.token_strs = await asyncio.to_thread(self._texts, tokens)
        return answer

    async def _tokens(self, call: Call, body: TokenizeRequest) -> list[int]:
        engine = self._service.engine
        check_limits(body, self._service.settings.limits)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt and messages: expected one of them")
        if body.prompt is not None:
            if body.chat_template:
                raise RequestError(
                    f"chat_template: expected none with a prompt, for templates are of "
                    f"conversations, got {body.chat_template!r}"
                )
            self._service.check_prompt(body.prompt)
            special = body.add_special_tokens is not False
            return await engine.model.tokenize(body.prompt, add_special_tokens=special)
        messages = plain_messages(body.messages or ())
        tools = plain_tools(body.tools)
        self._service.check_prompt(messages, tools, name="messages")
        rendered = await engine.model.apply_chat_template(
            with_owner(messages, self._service.owner_of(call)),
            tools=tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template or None,
            chat_template_kwargs=reasoning_variables(
                engine.tokenizer.chat_template,
                body.reasoning_effort,
                body.chat_template_kwargs,
                enable_thinking=body.enable_thinking,
                thinking=body.thinking,
            ),
        )
        if body.add_special_tokens and "multi_modal_data" in rendered:
            raise RequestError(
                "add_special_tokens: expected false for a conversation with images, whose template "
                "writes them"
            )
        if body.add_special_tokens:
            return await engine.model.tokenize(rendered["prompt"], add_special_tokens=True)
        return await engine.model.prompt_tokens(rendered)

    def _texts(self, tokens: list[int]) -> list[str]:
        decode = self._service.engine.tokenizer.decode
        return [decode([token], skip_special_tokens=False) for token in tokens]

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        body = await self._service.requests.read_plain(request, DetokenizeRequest)
        await self._service.model(body.model)
        tokenizer = self._service.engine.tokenizer
        with contextlib.suppress(NotImplementedError):  # without details of the request
            size = tokenizer.vocab_size
            for index, token in enumerate(body.tokens):
                if token >= size:
                    raise RequestError(
                        f"tokens[{index}]: expected a token id below {size}, got {token}"
                    )

        def decode() -> str:
            return tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)

        text = await self._service.run(request, lambda: asyncio.to_thread(decode))
        return json_response(Detokenized(text))
