"""`/v1/responses`: conversations as items, in OpenAI's shape; stored where a plugin stores them."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.dialects.dialect import Dialect, ParsedRequest
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.requests.limit_errors import too_many_items
from hardpoint.builtin_plugins.server.routes.answers import answer_ids
from hardpoint.builtin_plugins.server.routes.fields import (
    Renaming,
    reasoning_variables,
    renamed,
)
from hardpoint.builtin_plugins.server.routes.images import check_images, with_owner
from hardpoint.builtin_plugins.server.routes.request_limits import check_limits
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import RequestError, RequestOutput, SamplingParams
from hardpoint.plugins.server import Call, Client, Route

from .compaction import CompactedResponse, CompactRequest, compacted, with_instruction
from .conversations import ConversationRoutes, StoredConversations
from .custom_tools import CustomTool
from .events import ResponseAnswer
from .input import InputItem, ItemReference
from .objects import (
    RESPONSE_PREFIX,
    ConversationReference,
    RequestedTool,
    ResponseObject,
    echoed,
)
from .request import ResponsesRequest
from .store import StoreClient
from .stored import StoredResponses

_NOTHING_STORED = (
    "nothing is stored on this server (plugin.response_stores.use); send the whole conversation as "
    "input (some clients do with store = false)"
)
_NAMES: Renaming = ((re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),)
"""Names of fields in the engine's errors, and those of this route."""


class InputTokens(msgspec.Struct):
    """The number of tokens of a conversation."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


@dataclass(frozen=True)
class _History:
    """The stored items before the input of a request.

    Attributes:
        items: items, the oldest first.
        field: field of the request that names them.
        session, retain_seconds: retention of their prefix cache; None without one.
    """

    items: Sequence[InputItem] = ()
    field: str = "previous_response_id"
    session: str | None = None
    retain_seconds: float | None = None


class ResponsesDialect(Dialect[ResponsesRequest, RequestOutput]):
    """Conversations as items."""

    takes_messages = True
    path = "/v1/responses"
    summary = "Answer a conversation of items."
    body_type = ResponsesRequest
    response_type = ResponseObject
    id_prefix = RESPONSE_PREFIX

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        owned = service.response_store
        store = self._store = None if owned is None else StoreClient(service, owned)
        self._stored = None if store is None else StoredResponses(service, store)
        self._conversations = None if store is None else StoredConversations(service, store)

    def routes(self) -> list[Route]:
        """Return the routes."""
        routes = [
            *super().routes(),
            Route(
                path="/v1/responses/input_tokens",
                endpoint=self.count_tokens,
                methods=("POST",),
                summary="Count the tokens of a conversation of items.",
                request_type=ResponsesRequest,
                response_type=InputTokens,
            ),
            Route(
                path="/v1/responses/compact",
                endpoint=self.compact,
                methods=("POST",),
                summary="Replace a conversation of items by its user messages and a summary.",
                request_type=CompactRequest,
                response_type=CompactedResponse,
            ),
            *ConversationRoutes(self._service, self._conversations).routes(),
        ]
        if self._stored is not None:
            return [*routes, *self._stored.routes()]
        return [
            *routes,
            Route(
                path="/v1/responses/{response_id:path}",
                endpoint=self.not_stored,
                methods=("GET", "POST", "DELETE"),
                summary="Answer that no response is stored.",
            ),
        ]

    async def not_stored(self, request: Request) -> Response:  # noqa: ARG002
        """Answer that no response is stored.

        Raises:
            AnswerError: always.
        """
        raise AnswerError(
            404,
            "response_id: no response is stored on this server; POST /v1/responses answers at once",
            param="response_id",
            code="not_found",
        )

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a conversation, including previous responses."""
        call, body = await self._service.requests.read(request, ResponsesRequest)
        model, adapter = await self._service.model(body.model)
        check_limits(body, self._service.settings.limits)
        parsed = ParsedRequest(call, body, model, "", "", adapter)

        async def counted() -> InputTokens:
            before, known = await self._gone_on(parsed)
            conversation = self._conversation(parsed.call, known, before)
            prompt = await self._service.engine.model.apply_chat_template(**conversation)
            return InputTokens(len(await self._service.engine.model.prompt_tokens(prompt)))

        return await self._service.answer(request, call, counted)

    async def compact(self, request: Request) -> Response:
        """Answer with the user messages of a conversation and a summary of all of it."""
        call, body = await self._service.requests.read(request, CompactRequest)
        body = msgspec.structs.replace(body.resolved(), store=False, stream=False)
        model, adapter = await self._service.model(body.model)
        answer_id, engine_name = answer_ids(self.id_prefix, call, body.request_id)
        parsed: ParsedRequest[ResponsesRequest] = ParsedRequest(
            call, body, model, answer_id, engine_name, adapter
        )

        async def work() -> CompactedResponse:
            before, whole = await self._gone_on(parsed)
            outputs, answer = self._generate(parsed, with_instruction(whole), before, None)
            return compacted(await answer.whole(outputs), [*before, *whole.items()])

        return await self._service.answer(request, call, work)

    async def begin(
        self, parsed: ParsedRequest[ResponsesRequest]
    ) -> tuple[AsyncGenerator[RequestOutput, None], ResponseAnswer]:
        """Return the outputs and the answer; see the base."""
        before, body = await self._gone_on(parsed)
        limit, number = self._service.settings.limits.messages, len(before) + len(body.items())
        if body.conversation_id is not None and number >= limit:
            raise too_many_items(_field_of_items(body), limit, number, before_answer=True)
        return self._generate(parsed, body, before, self._keep(parsed, body, before))

    def _generate(
        self,
        parsed: ParsedRequest[ResponsesRequest],
        body: ResponsesRequest,
        before: Sequence[InputItem],
        keep: Callable[[ResponseObject], Awaitable[None]] | None,
    ) -> tuple[AsyncGenerator[RequestOutput, None], ResponseAnswer]:
        """Return the outputs of a conversation and the answer.

        Args:
            body: the body of the request, with the session of the conversation.
            before: stored items before the input.
            keep: see `ResponseAnswer`.

        Raises:
            RequestError: a field is wrong.
        """
        engine = self._service.engine
        if body.background:
            raise RequestError("background: expected false; a response ends with its connection")
        logprobs, limit = body.logprobs, body.max_output_tokens
        fields = {} if limit is None else {"max_tokens": limit}
        params = self._params(
            body,
            **fields,
            logprobs=logprobs,
            include=[name for name in body.include if "." not in name],
        )
        outputs = engine.chat(
            **self._conversation(parsed.call, body, before),
            sampling_params=params,
            request_id=parsed.request_id,
            parallel_tool_calls=body.parallel_tool_calls,
            **self._service.extras(parsed.call, body, parsed.adapter),
        )
        response = _response(parsed, params)
        response.store = keep is not None and body.store is not False
        names = {
            tool.flat_name: RequestedTool(tool.name, tool.namespace, isinstance(tool, CustomTool))
            for tool in body.tools or ()
            if tool.namespace or isinstance(tool, CustomTool)
        }
        answer = ResponseAnswer(engine.tokenizer, response, logprobs, keep, names)
        return renamed(outputs, _NAMES, body), answer

    def _conversation(
        self, call: Call, body: ResponsesRequest, before: Sequence[InputItem]
    ) -> dict[str, Any]:
        """Return a conversation as the engine takes it.

        Args:
            before: items of the responses before.

        Raises:
            RequestError: it is malformed or too long.
        """
        engine, messages = self._service.engine, body.messages(before)
        check_images(engine, messages, "input_image")
        tools, choice = body.tools_and_choice()
        self._service.check_prompt(messages, tools, name="input")
        return {
            "messages": with_owner(messages, self._service.owner_of(call)),
            "tools": tools,
            "tool_choice": choice,
            "chat_template_kwargs": reasoning_variables(
                engine.tokenizer.chat_template,
                body.reasoning.effort,
                body.chat_template_kwargs,
                enable_thinking=body.enable_thinking,
            ),
        }

    async def _gone_on(
        self, parsed: ParsedRequest[ResponsesRequest]
    ) -> tuple[Sequence[InputItem], ResponsesRequest]:
        """Return the stored items before the input, and the body with the session of all of them.

        Raises:
            AnswerError: there is no such response or conversation.
            RequestError: nothing is stored, or the conversation has no items or too many.
        """
        body, store = await self._with_items(parsed.call.client, parsed.body), self._store
        history = await self._history(parsed.call.client, body)
        if not history.items and not body.items():
            raise RequestError(
                "input: expected a text or at least one item, unless previous_response_id or "
                "conversation has some"
            )
        if store is None:
            return (), body
        session, seconds = body.session, body.retain_seconds
        if session is None:
            session = history.session
        if seconds is None and session == history.session:
            seconds = history.retain_seconds
        if seconds is None and body.session is None and body.store is not False:
            seconds = store.retain_seconds
        if seconds is not None and session is None and body.store is not False:
            session = parsed.answer_id
        if seconds is None:
            session = body.session
        limit, number = (
            self._service.settings.limits.messages,
            len(history.items) + len(body.items()),
        )
        if number > limit:
            raise too_many_items(history.field, limit, number)
        return history.items, msgspec.structs.replace(body, session=session, retain_seconds=seconds)

    async def _with_items(self, client: Client, body: ResponsesRequest) -> ResponsesRequest:
        """Return the body with stored items instead of references to them.

        Raises:
            RequestError: nothing is stored.
        """
        items = body.items()
        references = [i for i, item in enumerate(items) if isinstance(item, ItemReference)]
        if not references:
            return body
        if self._stored is None:
            raise RequestError(f"input[{references[0]}].type: 'item_reference': {_NOTHING_STORED}")
        return msgspec.structs.replace(body, input=await self._stored.resolved(client, items))

    async def _history(self, client: Client, body: ResponsesRequest) -> _History:
        """Return the items that the request names.

        Raises:
            AnswerError: the client has no such response or conversation.
            RequestError: nothing is stored, or the input cannot be added to the conversation.
        """
        name, conversation = body.previous_response_id, body.conversation_id
        if name is not None:
            if self._stored is None:
                raise RequestError(f"previous_response_id: not supported: {_NOTHING_STORED}")
            previous = await self._stored.previous(client, name)
            return _History(
                previous.items(), session=previous.session, retain_seconds=previous.retain_seconds
            )
        if conversation is None:
            return _History()
        if self._conversations is None:
            raise RequestError(f"conversation: not supported: {_NOTHING_STORED}")
        record = await self._conversations.find(client, conversation)
        self._conversations.check_new(record, body.items(), _field_of_items(body))
        return _History(record.input_items(), "conversation", session=conversation)

    def _keep(
        self,
        parsed: ParsedRequest[ResponsesRequest],
        body: ResponsesRequest,
        before: Sequence[InputItem],
    ) -> Callable[[ResponseObject], Awaitable[None]] | None:
        """Return the function that stores the response and adds it to its conversation."""
        stored, conversations, client = self._stored, self._conversations, parsed.call.client
        conversation = body.conversation_id
        if stored is None or conversations is None:
            return None
        if body.store is False and conversation is None:
            return None

        async def keep(response: ResponseObject) -> None:
            if conversation is not None:
                content = msgspec.json.encode(response.output)
                output = msgspec.json.decode(content, type=list[InputItem])
                await conversations.append_answer(client, conversation, body.items(), output)
            if body.store is not False:
                items = [*before, *body.items()]
                await stored.keep(client, response, items, body.session, body.retain_seconds)

        return keep


def _field_of_items(body: ResponsesRequest) -> str:
    """Return the field of a request with a conversation that has its last items."""
    return "input" if body.items() else "conversation"


def _response(parsed: ParsedRequest[ResponsesRequest], params: SamplingParams) -> ResponseObject:
    body = parsed.body
    (text,) = echoed([body.text])
    (reasoning,) = echoed([body.reasoning])
    choice, name = body.tool_choice, body.conversation_id
    return ResponseObject(
        id=parsed.answer_id,
        created_at=int(time.time()),
        conversation=None if name is None else ConversationReference(name),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata,
        model=parsed.model,
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None, "summary": None, **reasoning},
        temperature=params.temperature,
        text={"format": {"type": "text"}, **text},
        tool_choice=msgspec.to_builtins(choice),
        tools=echoed(body.tools or []),
        top_logprobs=body.top_logprobs,
        top_p=params.top_p,
    )
