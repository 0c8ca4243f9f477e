"""`/v1/chat/completions`: conversations, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.dialects.dialect import Dialect, ParsedRequest
from hardpoint.builtin_plugins.server.dialects.tokens import GenerateRequest
from hardpoint.builtin_plugins.server.routes.answers import new_id
from hardpoint.builtin_plugins.server.routes.fields import (
    reasoning_variables,
    renamed,
)
from hardpoint.builtin_plugins.server.routes.images import with_owner
from hardpoint.builtin_plugins.server.routes.models import json_response
from hardpoint.plugins import RequestError, RequestOutput
from hardpoint.plugins.server import Call, Route

from .answer import ChatAnswer, ChatCompletion
from .render import rendered_request
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
        self, asked: ParsedRequest[ChatCompletionRequest]
    ) -> tuple[AsyncGenerator[RequestOutput, None], ChatAnswer]:
        """Return the outputs and the answer; see the base."""
        engine, body = self._service.engine, asked.body
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs: expected logprobs to be true with it")
        max_tokens = body.max_completion_tokens or body.max_tokens
        if max_tokens == 0:
            raise RequestError(f"{body.limit_field}: expected at least 1, got 0")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        fields = {} if max_tokens is None else {"max_tokens": max_tokens}
        params = self._params(body, **fields, logprobs=logprobs)
        _, choice = body.tools_and_choice()
        outputs = engine.chat(
            **self._prompt(asked.call, body),
            sampling_params=params,
            request_id=asked.request_id,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls,
            **self._service.extras(asked.call, body, asked.adapter),
        )
        return renamed(outputs, (), body), ChatAnswer(self._service, asked)

    def _prompt(self, call: Call, body: ChatCompletionRequest) -> dict[str, Any]:
        """Return the conversation, the tools and the arguments of the template, for the engine.

        Raises:
            RequestError: the conversation is malformed or too long.
        """
        messages, (tools, _) = plain_messages(body.messages), body.tools_and_choice()
        self._service.check_prompt(messages, tools, name="messages")
        return {
            "messages": with_owner(messages, self._service.owner_of(call)),
            "tools": tools,
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
            "chat_template": body.chat_template or None,
            "chat_template_kwargs": reasoning_variables(
                self._service.engine.tokenizer.chat_template,
                body.reasoning_effort,
                body.chat_template_kwargs,
                enable_thinking=body.enable_thinking,
                thinking=body.thinking,
            ),
        }

    def routes(self) -> list[Route]:
        """Return the routes."""
        render = Route(
            path=f"{self.path}/render",
            endpoint=self.render,
            methods=("POST",),
            summary="Return the request to /inference/v1/generate for a conversation.",
            request_type=ChatCompletionRequest,
            response_type=GenerateRequest,
        )
        return [*super().routes(), render]

    async def render(self, request: Request) -> Response:
        """Answer with the tokens and the sampling parameters of a conversation."""
        call, body = await self._service.read(request, self.body_type)
        body = body.resolved()
        model, _ = await self._service.model(body.model)

        async def work() -> GenerateRequest:
            engine = self._service.engine
            prompt = await engine.model.apply_chat_template(**self._prompt(call, body))
            if "multi_modal_data" in prompt:
                raise RequestError("messages: expected texts, because tokens cannot hold images")
            ids = await engine.model.prompt_tokens(prompt)
            length = engine.config.max_model_len
            room = length - len(ids) if isinstance(length, int) else None
            return rendered_request(body, ids, model, new_id(self.id_prefix, body.request_id), room)

        return json_response(await self._service.run(request, work))
