"""`/v1/messages` and `/v1/messages/count_tokens`: conversations, in Anthropic's shape."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.errors import MESSAGES_PATH
from hardpoint.builtin_plugins.server.routes.compatibility_fields import drop_thinking
from hardpoint.builtin_plugins.server.routes.fields import (
    REFUSED,
    GenerationFields,
    Renaming,
    reasoning_variables,
    renamed,
)
from hardpoint.builtin_plugins.server.routes.images import check_images, with_owner
from hardpoint.builtin_plugins.server.routes.request_limits import check_limits
from hardpoint.plugins import RequestError, RequestOutput
from hardpoint.plugins.server import Call, Route
from hardpoint.typed import Strict

from .dialect import Dialect, ParsedRequest
from .messages_events import MessageAnswer, MessageObject
from .messages_input import (
    AnyChoice,
    Choice,
    DisabledThinking,
    EnabledThinking,
    InputMessage,
    MessageConverter,
    NoneChoice,
    TextBlock,
    Thinking,
    ToolChoice,
    ToolDefinition,
    refuse_blocks,
    refuse_server_tools,
)

_IGNORED = {
    "cache_control": "cached prompts are found by their content",
    "context_management": "conversations are taken as they are given",
    "diagnostics": "there are none",
    "inference_geo": "it is for the provider's own platform",
    "metadata": "it is for the provider's own platform",
    "service_tier": "it is for the provider's own platform",
    "speed": "it is for the provider's own platform",
    "user_profile_id": "it is for the provider's own platform",
    "workspace_id": "it is for the provider's own platform",
}
_REFUSED = {
    **{name: why for name, why in REFUSED.items() if name != "thinking"},
    "n_predict": "use max_tokens",
    "thread": "nothing is stored; send all messages, in tool_runner() with thread=False",
    "container": "there are no server tools",
    "mcp_servers": "there are no server tools",
}
_NAMES: Renaming = (
    (re.compile(r"^(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^parallel_tool_calls\b"), "tool_choice.disable_parallel_tool_use"),
)
"""Names of fields in the engine's errors, and those of this route."""


class OutputSchemaFormat(Strict, tag_field="type", tag="json_schema"):
    """JSON of a schema; every keyword is enforced."""

    schema: dict[str, Any]


class OutputConfig(Strict):
    """The form of the answer.

    Attributes:
        effort: effort of the reasoning, for templates that have it.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchemaFormat | None = None


def _prepared(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body after a check for unsupported fields; see `RequestReader.read`.

    Raises:
        RequestError: there is such a thing.
    """
    refuse_blocks(fields.get("messages"), fields.get("system"))
    refuse_server_tools(fields.get("tools"))
    return fields


class MessagesRequest(GenerationFields):
    """A conversation to answer.

    Attributes:
        messages: the conversation; the last message is continued if it is the assistant's.
        system: the system prompt.
        max_tokens: maximum length of the answer with its thinking.
        stop_sequences: strings that end the text.
        thinking: left out, it is as the model's chat template has it.
    """

    ignored: ClassVar[Mapping[str, str]] = _IGNORED
    refused: ClassVar[Mapping[str, str]] = _REFUSED

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] = []
    tools: list[ToolDefinition] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] | None = None

    prepared = staticmethod(_prepared)

    def answer_forms(self) -> dict[str, dict[str, Any]]:
        """Return the fields for the form of the answer; see the base."""
        forms = super().answer_forms()
        if self.output_config.format is not None:
            forms["output_config.format"] = {"json": self.output_config.format.schema}
        return forms


class CountTokensRequest(Strict):
    """A conversation to count tokens of, with the fields of `MessagesRequest`."""

    ignored: ClassVar[Mapping[str, str]] = _IGNORED
    refused: ClassVar[Mapping[str, str]] = _REFUSED

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    prepared = staticmethod(_prepared)
    without_thinking = drop_thinking


class TokenCount(msgspec.Struct):
    """How many tokens the prompt of a conversation has."""

    input_tokens: int


class MessagesDialect(Dialect[MessagesRequest, RequestOutput]):
    """Messages with blocks."""

    path = MESSAGES_PATH
    summary = "Answer a conversation of messages with blocks."
    body_type = MessagesRequest
    response_type = MessageObject
    id_prefix = "msg_"

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            *super().routes(),
            Route(
                path=f"{MESSAGES_PATH}/count_tokens",
                endpoint=self.count_tokens,
                methods=("POST",),
                summary="Count the tokens of a conversation.",
                request_type=CountTokensRequest,
                response_type=TokenCount,
            ),
        ]

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation."""
        call, body = await self._service.requests.read(request, CountTokensRequest)
        await self._service.model(body.model)
        check_limits(body, self._service.settings.limits)
        conversation = self._conversation(call, body)

        async def counted() -> TokenCount:
            prompt = await self._service.engine.model.apply_chat_template(**conversation)
            return TokenCount(len(await self._service.engine.model.prompt_tokens(prompt)))

        return await self._service.answer(request, call, counted)

    async def begin(
        self, parsed: ParsedRequest[MessagesRequest]
    ) -> tuple[AsyncGenerator[RequestOutput, None], MessageAnswer]:
        """Return the outputs and the answer; see the base."""
        answer = MessageAnswer(self._service.engine.tokenizer, parsed, parsed.body.max_tokens)
        return renamed(self._outputs(parsed), _NAMES, parsed.body), answer

    def _outputs(
        self, parsed: ParsedRequest[MessagesRequest]
    ) -> AsyncGenerator[RequestOutput, None]:
        engine, body = self._service.engine, parsed.body
        fields: dict[str, Any] = {"max_tokens": body.max_tokens}
        if body.stop_sequences:
            fields["stop"] = body.stop_sequences
        params = self._params(body, **fields)
        parallel = not getattr(body.tool_choice, "disable_parallel_tool_use", False)
        arguments: dict[str, Any] = {
            **self._conversation(parsed.call, body),
            "request_id": parsed.request_id,
            "parallel_tool_calls": parallel,
            **self._service.extras(parsed.call, body, parsed.adapter),
        }
        if not isinstance(body.thinking, EnabledThinking):
            return engine.chat(sampling_params=params, **arguments)
        if body.thinking_token_budget is not UNSET:
            raise RequestError("thinking_token_budget: expected none together with thinking")
        budget = body.thinking.budget_tokens
        limited = msgspec.structs.replace(params, thinking_token_budget=budget)
        return _limited(
            engine.chat(sampling_params=limited, **arguments),
            lambda: engine.chat(sampling_params=params, **arguments),
        )

    def _conversation(
        self, call: Call, body: MessagesRequest | CountTokensRequest
    ) -> dict[str, Any]:
        """Return a conversation as the engine takes it.

        Raises:
            RequestError: it is malformed or too long.
        """
        conversation = MessageConverter(body.system)
        for index, message in enumerate(body.messages):
            conversation.add(message, f"messages[{index}]")
        messages = conversation.messages
        check_images(self._service.engine, messages, "image")
        if all(message["role"] == "system" for message in messages):
            raise RequestError("messages: expected at least one message of the user")
        last = messages[-1]
        if "tool_calls" in last:
            raise RequestError(
                f"messages[{len(body.messages) - 1}]: expected a message with the tool_result of "
                "each tool_use after it"
            )
        tools = None if body.tools is None else [tool.plain() for tool in body.tools]
        self._service.check_prompt(messages, tools, name="messages")
        return {
            "messages": with_owner(messages, self._service.owner_of(call)),
            "tools": tools,
            "tool_choice": _choice(body.tool_choice),
            "continue_final_message": last["role"] == "assistant",
            "chat_template_kwargs": _variables(
                body, self._service.engine.tokenizer.chat_template or ""
            ),
        }


async def _limited(
    outputs: AsyncGenerator[RequestOutput, None],
    without: Callable[[], AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs of a request with a budget of thinking.

    Where the engine refuses the budget, since the model has no thinking that it knows of, there is
    nothing to limit. Which of the enabled parsers the model's chat template shows, it alone knows.

    Args:
        outputs: with the budget.
        without: returns the same without it.
    """
    begun = False
    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                begun = True
                yield output
            return
    except RequestError as error:
        if begun or not str(error).startswith("thinking_token_budget:"):
            raise
    async with contextlib.aclosing(without()) as unlimited:
        async for output in unlimited:
            yield output


def _choice(choice: Choice | None) -> Any:
    """Return whether tools may be called, as the engine takes it."""
    match choice:
        case AnyChoice():
            return "required"
        case ToolChoice(name=name):
            return {"name": name}
        case NoneChoice():
            return "none"
    return "auto"


def _variables(body: MessagesRequest | CountTokensRequest, template: str) -> dict[str, Any] | None:
    variables = dict(body.chat_template_kwargs or {})
    effort: str | None = body.output_config.effort
    if isinstance(body.thinking, DisabledThinking):
        effort = "none"
    elif body.thinking is not None and "enable_thinking" in template:
        variables.setdefault("enable_thinking", True)
    if body.thinking is not None and body.enable_thinking is not None:
        raise RequestError("thinking and enable_thinking: expected one of them, got both")
    return reasoning_variables(template, effort, variables, enable_thinking=body.enable_thinking)
