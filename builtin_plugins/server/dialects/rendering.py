"""`/v1/chat/completions/render`: the request to `/inference/v1/generate` for a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.routes.answers import answer_ids
from hardpoint.builtin_plugins.server.routes.models import json_response
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.errors import PromptTooLongError
from hardpoint.plugins import RequestError, SamplingParams
from hardpoint.plugins.server import Route
from hardpoint.plugins.structured import StructuredOutputs

from .chat.request import ChatCompletionRequest
from .chat.route import chat_prompt
from .tokens import OUTSIDE, GenerateRequest, TokenSampling

# Their counterparts have the values.
_RESOLVED = ("n_predict", "repeat_penalty")
_SAMPLING = tuple(
    name
    for name in TokenSampling.__struct_fields__
    if name not in OUTSIDE and name not in _RESOLVED
)


class RenderRoute:
    """The route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Return the route."""
        return [
            Route(
                path="/v1/chat/completions/render",
                endpoint=self.render,
                methods=("POST",),
                summary="Return the request to /inference/v1/generate for a conversation.",
                request_type=ChatCompletionRequest,
                response_type=GenerateRequest,
            )
        ]

    async def render(self, request: Request) -> Response:
        """Answer with the tokens and the sampling parameters of a conversation."""
        call, body = await self._service.requests.read(request, ChatCompletionRequest)
        body = body.resolved()
        model, _ = await self._service.model(body.model)

        async def work() -> GenerateRequest:
            engine, params = self._service.engine, self._params(body)
            prompt = await engine.model.apply_chat_template(
                **chat_prompt(self._service, call, body)
            )
            if "multi_modal_data" in prompt:
                raise RequestError("messages: expected texts, because tokens cannot hold images")
            length = engine.config.max_model_len
            longest = length if isinstance(length, int) else None
            ids = await engine.model.prompt_tokens(prompt)
            ids = _last_tokens(body, ids, longest, params.max_tokens)
            limit = params.max_tokens
            if longest is not None:
                room = longest - len(ids)
                limit = min(limit or room, room)
            rendered = rendered_request(
                body, ids, model, answer_ids("chatcmpl-", call, body.request_id)[0], limit
            )
            if (structured := await self._grammar_of_calls(body, prompt, params)) is not None:
                rendered = _with_grammar(rendered, structured)
            return rendered

        return json_response(await self._service.run(request, work))

    def _params(self, body: ChatCompletionRequest) -> SamplingParams:
        """Return the sampling parameters of the chat route for a request.

        Raises:
            RequestError: a field is wrong, or more than the server allows.
        """
        limit = body.max_completion_tokens or body.max_tokens
        fields = {} if limit is None else {"max_tokens": limit}
        defaults = self._service.engine.model.default_sampling_params().for_chat()
        return body.sampling_params(defaults, self._service.settings.limits, **fields)

    async def _grammar_of_calls(
        self, body: ChatCompletionRequest, prompt: Mapping[str, Any], params: SamplingParams
    ) -> StructuredOutputs | None:
        """Return the grammar of calls that are required or strict; None if the model is free.

        Raises:
            RequestError: the parser of calls gives no such grammar.
        """
        tools, choice = body.tools_and_choice()
        if not tools or choice == "none":
            return None
        constrained = await self._service.engine.model.constrained_params(
            prompt,
            params,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls,
        )
        structured = constrained.structured
        return None if structured is None or structured.structural_tag is None else structured


def _last_tokens(
    body: ChatCompletionRequest,
    token_ids: list[int],
    max_model_len: int | None,
    max_tokens: int | None,
) -> list[int]:
    """Return the tokens that `truncate_prompt_tokens` keeps, as the engine truncates prompts.

    Args:
        max_tokens: maximum length of the answer; None is the rest of the context.

    Raises:
        RequestError: it keeps none, or the prompt leaves no room for an answer.
    """
    last = body.truncate_prompt_tokens
    if last == -1 and max_model_len is not None:
        last = max(max_model_len - (max_tokens or 1), 1)
    if last is not None:
        if last < 1:
            raise RequestError(
                "truncate_prompt_tokens: expected at least 1, or -1 to leave room for max_tokens, "
                f"got {last}"
            )
        token_ids = token_ids[-last:]
    if max_model_len is not None and len(token_ids) >= max_model_len:
        error = PromptTooLongError.of(len(token_ids), max_model_len, generates=True)
        raise PromptTooLongError(body.own_names(str(error)))
    return token_ids


def _with_grammar(request: GenerateRequest, structured: StructuredOutputs) -> GenerateRequest:
    """Return the request with a grammar in place of the forms of its answer."""
    forms = dict.fromkeys(request.sampling_params.answer_forms())
    forms["structured_outputs"] = msgspec.to_builtins(structured)
    params = msgspec.structs.replace(request.sampling_params, **forms)
    return msgspec.structs.replace(request, sampling_params=params)


def rendered_request(
    body: ChatCompletionRequest,
    token_ids: Sequence[int],
    model: str,
    request_id: str,
    max_tokens: int | None,
) -> GenerateRequest:
    """Return the request that generates from the tokens of a conversation.

    Args:
        token_ids: tokens of the conversation by the chat template.
        model: name of the model or adapter.
        max_tokens: maximum length of the answer.
    """
    fields: dict[str, Any] = {}
    for name in _SAMPLING:
        value = getattr(body, name, msgspec.UNSET)
        if value is not msgspec.UNSET:
            fields[name] = value
    fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    names = set(GenerateRequest.__struct_fields__) & set(OUTSIDE) - {"model", "request_id"}
    return GenerateRequest(
        token_ids=list(token_ids),
        sampling_params=TokenSampling(**fields),
        model=model,
        request_id=request_id,
        **{name: getattr(body, name) for name in sorted(names)},
    )
