"""`/v1/chat/completions`: conversations, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from hardpoint.builtin_plugins.server.dialects.dialect import Dialect, ParsedRequest
from hardpoint.builtin_plugins.server.routes.fields import (
    reasoning_variables,
    renamed,
)
from hardpoint.builtin_plugins.server.routes.images import with_owner
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import RequestOutput
from hardpoint.plugins.server import Call

from .answer import ChatAnswer, ChatCompletion
from .request import ChatCompletionRequest, plain_messages


class ChatDialect(Dialect[ChatCompletionRequest, RequestOutput]):
    """Conversations."""

    takes_messages = True
    path = "/v1/chat/completions"
    summary = "Answer a conversation."
    body_type = ChatCompletionRequest
    response_type = ChatCompletion
    id_prefix = "chatcmpl-"

    async def begin(
        self, parsed: ParsedRequest[ChatCompletionRequest]
    ) -> tuple[AsyncGenerator[RequestOutput, None], ChatAnswer]:
        """Return the outputs and the answer; see the base."""
        engine, body = self._service.engine, parsed.body
        max_tokens = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        fields = {} if max_tokens is None else {"max_tokens": max_tokens}
        params = self._params(body, **fields, logprobs=logprobs)
        _, choice = body.tools_and_choice()
        outputs = engine.chat(
            **chat_prompt(self._service, parsed.call, body),
            sampling_params=params,
            request_id=parsed.request_id,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls,
            **self._service.extras(parsed.call, body, parsed.adapter),
        )
        return renamed(outputs, (), body), ChatAnswer(self._service, parsed, params.n)


def chat_prompt(service: Service, call: Call, body: ChatCompletionRequest) -> dict[str, Any]:
    """Return the conversation, the tools and the arguments of the template, for the engine.

    Raises:
        RequestError: the conversation is malformed or too long.
    """
    messages, (tools, _) = plain_messages(body.messages), body.tools_and_choice()
    service.check_prompt(messages, tools, name="messages")
    return {
        "messages": with_owner(messages, service.owner_of(call)),
        "tools": tools,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "chat_template": body.chat_template or None,
        "chat_template_kwargs": reasoning_variables(
            service.engine.tokenizer.chat_template,
            body.reasoning_effort,
            body.chat_template_kwargs,
            enable_thinking=body.enable_thinking,
            thinking=body.thinking,
        ),
    }
