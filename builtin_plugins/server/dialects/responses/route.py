"""`/v1/responses`: conversations as items, in OpenAI's shape; stored where a plugin stores them."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.dialects.dialect import Dialect, ParsedRequest
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.routes.fields import (
    IGNORED,
    REFUSED,
    GenerationFields,
    JsonObjectFormat,
    Renaming,
    TextFormat,
    check_known,
    check_limits,
    reasoning_variables,
    renamed,
)
from hardpoint.builtin_plugins.server.routes.images import check_images, with_owner
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import RequestError, RequestOutput, SamplingParams
from hardpoint.plugins.server import Call, Route
from hardpoint.typed import Strict

from .custom_tools import CustomTool, unenforced_formats
from .events import RequestedTool, ResponseAnswer, ResponseObject, echoed
from .input import InputItem, ItemConverter, MessageItem, prepared_input
from .stored import StoredResponses
from .tools import CALLABLE, flat_name, flat_tools, without_hosted_tools

_NOTHING_STORED = "nothing is stored on this server; send the whole conversation as input"
_NO_CONVERSATIONS = (
    "there are no conversations on the server; send the whole one as input, or "
    "previous_response_id where responses are stored"
)
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]
_LOGPROBS = "message.output_text.logprobs"
_NAMES: Renaming = ((re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),)
"""Names of fields in the engine's errors, and those of this route."""


class FunctionTool(Strict, tag_field="type", tag="function"):
    """A function that the model may call.

    Attributes:
        strict: whether calls have to keep to the schema; left out is false.
        allowed_callers: must hold "direct": no programs are run that could call it.
        async: ignored: calls are the caller's to make.
        defer_loading: ignored: the model sees all tools.
        output_schema: ignored: results are taken as they are.
        namespace: namespace that the function is of; a part of the name that the model sees.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[str] | None = None
    async_: Any = msgspec.field(default=None, name="async")
    defer_loading: Any = None
    output_schema: Any = None
    namespace: str | None = None

    @property
    def flat_name(self) -> str:
        """The name that the model sees."""
        return flat_name(self.namespace, self.name)

    def plain(self) -> dict[str, Any]:
        """Return the tool as conversations have it."""
        fields = {
            "name": self.flat_name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": given}


class FunctionChoice(Strict, tag_field="type", tag="function", omit_defaults=True):
    """The function that has to be called."""

    name: str
    namespace: str | None = None

    @property
    def flat_name(self) -> str:
        """The name that the model sees."""
        return flat_name(self.namespace, self.name)


class CustomChoice(FunctionChoice, tag_field="type", tag="custom"):
    """The custom tool that has to be called."""


class AllowedFunctions(Strict, tag_field="type", tag="allowed_tools"):
    """The functions that may be called, of those that the request has.

    Attributes:
        mode: whether the model may call them, or has to call one.
    """

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[FunctionChoice | CustomChoice], Meta(min_length=1)]


class TextSchemaFormat(Strict, tag_field="type", tag="json_schema"):
    """JSON of a schema.

    Attributes:
        strict: whether every keyword must be enforced; if not, keywords that cannot be are checked
            when the answer is finished.
    """

    schema: dict[str, Any] | bool
    name: str = "answer"
    strict: bool | None = None
    description: str | None = None


class TextOptions(Strict):
    """The form of the text.

    Attributes:
        verbosity: ignored: ask for it in the instructions.
    """

    format: TextFormat | JsonObjectFormat | TextSchemaFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Strict):
    """How much the model reasons.

    Attributes:
        effort: for templates that have it; "none" asks for no reasoning.
        summary, generate_summary: ignored: the reasoning is shown as it is.
        context, mode: ignored: the template decides.
    """

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(Strict):
    """The contents of a stream besides the answer.

    Attributes:
        include_obfuscation: ignored: events are not padded.
    """

    include_obfuscation: bool | None = None


class ResponsesRequest(GenerationFields):
    """A conversation to answer.

    Attributes:
        input: a text of the user, or items: messages, calls, their results, and reasoning.
        instructions: the system message.
        max_output_tokens: maximum length of the answer with its reasoning.
        include: "message.output_text.logprobs" asks for log-probabilities; other names with a dot,
            which are OpenAI's, add nothing. A name without one is that of a step part, such as
            "speculation", whose figures the response has as `part_figures`.
        top_logprobs: likeliest tokens per position; needs that.
        metadata: up to 16 texts, which the response has too.
        previous_response_id: a stored response, whose items, and those that it answers, come before
            the input. Its instructions do not.
        store: whether the response is kept, for `previous_response_id`; left out is true where the
            server has a store. Without one, it is answered as false.
        truncation: ignored and answered as "disabled".
        background: must be false.
        stop: strings that end the text.
    """

    limit_name: ClassVar[str] = "max_output_tokens"
    ignored: ClassVar[Mapping[str, str]] = {
        **{name: reason for name, reason in IGNORED.items() if name != "metadata"},
        "access_programs": "it is for the provider's own platform",
        "client_metadata": "it is for the provider's own platform",
        "background_options": "nothing runs in the background",
        "image": "the model reads text alone",
        "prompt_cache_options": "cached prompts are found by their content",
    }
    refused: ClassVar[Mapping[str, str]] = {
        **REFUSED,
        "context_management": _NO_CONVERSATIONS,
        "conversation": _NO_CONVERSATIONS,
        "max_tool_calls": "there are no hosted tools, and calls are the caller's to make",
        "moderation": "there is no moderation",
        "prompt": "there are no stored prompts; send instructions and input",
    }

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: list[FunctionTool | CustomTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedFunctions
    ) = "auto"
    parallel_tool_calls: bool = True
    include: list[str] = []
    top_logprobs: Annotated[int, Meta(ge=0)] = 0
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=16)] = {}
    previous_response_id: Annotated[str, Meta(min_length=1)] | None = None
    store: bool | None = None
    background: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"
    stream_options: ResponseStreamOptions | None = None
    stop: str | list[str] | UnsetType = UNSET
    chat_template_kwargs: dict[str, Any] | None = None

    without_hosted_tools = staticmethod(without_hosted_tools)
    unenforced = staticmethod(unenforced_formats)

    @staticmethod
    def prepared(fields: dict[str, Any]) -> dict[str, Any]:
        """Return a body with the types of all items; see `Service.read`.

        Raises:
            RequestError: something in it is known and not supported.
        """
        tools, choice = fields.get("tools"), fields.get("tool_choice")
        if isinstance(tools, list):
            tools = flat_tools(tools)
            fields = {**fields, "tools": tools}
        for index, tool in enumerate(tools if isinstance(tools, list) else ()):
            _refuse_hosted(tool, f"tools[{index}]")
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = choice.get("tools")
            for index, tool in enumerate(allowed if isinstance(allowed, list) else ()):
                _refuse_hosted(tool, f"tool_choice.tools[{index}]")
        else:
            _refuse_hosted(choice, "tool_choice")
        return {**fields, "input": prepared_input(fields["input"])} if "input" in fields else fields

    @property
    def logprobs(self) -> int | None:
        """The likeliest tokens per position; None is no log-probabilities.

        Raises:
            RequestError: there is a number for what was not asked for.
        """
        if _LOGPROBS in self.include:
            return self.top_logprobs
        if self.top_logprobs:
            raise RequestError(f'top_logprobs: expected include to hold "{_LOGPROBS}" with it')
        return None

    def answer_forms(self) -> dict[str, dict[str, Any]]:
        """Return the fields for the form of the answer; see the base."""
        found = super().answer_forms()
        match self.text.format:
            case JsonObjectFormat():
                found["text.format"] = {"json_object": True}
            case TextSchemaFormat(schema=schema, strict=strict):
                found["text.format"] = {"json": schema, "lenient": strict is not True}
        return found

    def tools_and_choice(self) -> tuple[list[dict[str, Any]] | None, Any]:
        """Return the tools and the choice, as the engine takes them.

        Raises:
            RequestError: the choice is of a tool that the request does not have, or a tool cannot
                be called.
        """
        tools, choice = self.tools or [], self.tool_choice
        for index, tool in enumerate(tools):
            if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
                raise RequestError(
                    f'tools[{index}].allowed_callers: expected "direct" among them: no programs '
                    "are run that could call the tool"
                )
        known = [tool.flat_name for tool in tools]
        if isinstance(choice, FunctionChoice):
            check_known(choice.flat_name, known, "tool_choice.name")
        if isinstance(choice, AllowedFunctions):
            for index, named in enumerate(choice.tools):
                check_known(named.flat_name, known, f"tool_choice.tools[{index}].name")
            names = [named.flat_name for named in choice.tools]
            return [tool.plain() for tool in tools if tool.flat_name in names], choice.mode
        return (
            None if self.tools is None else [tool.plain() for tool in tools],
            {"name": choice.flat_name} if isinstance(choice, FunctionChoice) else choice,
        )

    def items(self) -> list[InputItem]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    def messages(self, before: Sequence[InputItem] = ()) -> list[dict[str, Any]]:
        """Return the conversation.

        Args:
            before: items of the previous response, and those that it answers.

        Raises:
            RequestError: an item does not fit those before it.
        """
        conversation = ItemConverter(self.instructions, before)
        for index, item in enumerate(self.items()):
            conversation.add(item, f"input[{index}]")
        return conversation.messages


class InputTokens(msgspec.Struct):
    """The number of tokens of a conversation."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


def _refuse_hosted(tool: Any, path: str) -> None:
    type_ = tool.get("type") if isinstance(tool, dict) else "function"
    if isinstance(type_, str) and type_ not in CALLABLE:
        raise RequestError(
            f"{path}.type: {type_[:100]!r} is not supported: there are no hosted tools, expected "
            '"function" or "custom"'
        )


class ResponsesDialect(Dialect[ResponsesRequest, RequestOutput]):
    """Conversations as items."""

    takes_messages = True
    path = "/v1/responses"
    summary = "Answer a conversation of items."
    body_type = ResponsesRequest
    response_type = ResponseObject
    id_prefix = "resp_"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        owned = service.response_store
        self._stored = None if owned is None else StoredResponses(service, owned)

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
        """Return the number of tokens of a conversation, those of previous responses included."""
        call, body = await self._service.read(request, ResponsesRequest)
        model, adapter = await self._service.model(body.model)
        check_limits(body, self._service.settings.limits)
        asked = ParsedRequest(call, body, model, "", "", adapter)

        async def counted() -> InputTokens:
            before, known = await self._gone_on(asked)
            conversation = self._conversation(asked.call, known, before)
            prompt = await self._service.engine.model.apply_chat_template(**conversation)
            return InputTokens(len(await self._service.engine.model.prompt_tokens(prompt)))

        return await self._service.answer(request, call, counted)

    async def begin(
        self, asked: ParsedRequest[ResponsesRequest]
    ) -> tuple[AsyncGenerator[RequestOutput, None], ResponseAnswer]:
        """Return the outputs and the answer; see the base."""
        engine, body = self._service.engine, asked.body
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
        before, body = await self._gone_on(asked)
        outputs = engine.chat(
            **self._conversation(asked.call, body, before),
            sampling_params=params,
            request_id=asked.request_id,
            parallel_tool_calls=body.parallel_tool_calls,
            **self._service.extras(asked.call, body, asked.adapter),
        )
        keep, response = self._keep(asked, body, before), _response(asked, params)
        response.store = keep is not None
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
        self, asked: ParsedRequest[ResponsesRequest]
    ) -> tuple[Sequence[InputItem], ResponsesRequest]:
        """Return the items of the responses before, and the body with the conversation's session.

        Raises:
            AnswerError: there is no such response.
            RequestError: nothing is stored, or the conversation has too many items.
        """
        body, stored = asked.body, self._stored
        if stored is None:
            if body.previous_response_id is not None:
                raise RequestError(f"previous_response_id: not supported: {_NOTHING_STORED}")
            return (), body
        before: Sequence[InputItem] = ()
        session, seconds = body.session, body.retain_seconds
        if body.previous_response_id is not None:
            previous = await stored.previous(asked.call.client, body.previous_response_id)
            before = previous.items()
            if session is None:
                session = previous.session
            if seconds is None and session == previous.session:
                seconds = previous.retain_seconds
        if seconds is None and body.session is None and body.store is not False:
            seconds = stored.retain_seconds
        if seconds is not None and session is None and body.store is not False:
            session = asked.answer_id
        limit, number = self._service.settings.limits.messages, len(before) + len(body.items())
        if number > limit:
            raise RequestError(
                f"previous_response_id: expected a conversation of at most {limit} items on this "
                f"server, got {number}"
            )
        return before, msgspec.structs.replace(body, session=session, retain_seconds=seconds)

    def _keep(
        self,
        asked: ParsedRequest[ResponsesRequest],
        body: ResponsesRequest,
        before: Sequence[InputItem],
    ) -> Callable[[ResponseObject], Awaitable[None]] | None:
        stored, client = self._stored, asked.call.client
        if stored is None or body.store is False:
            return None

        async def keep(response: ResponseObject) -> None:
            items = [*before, *body.items()]
            await stored.keep(client, response, items, body.session, body.retain_seconds)

        return keep


def _response(asked: ParsedRequest[ResponsesRequest], params: SamplingParams) -> ResponseObject:
    body = asked.body
    (text,) = echoed([body.text])
    (reasoning,) = echoed([body.reasoning])
    choice = body.tool_choice
    return ResponseObject(
        id=asked.answer_id,
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata,
        model=asked.model,
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
