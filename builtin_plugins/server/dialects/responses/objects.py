"""The response object of `/v1/responses` and its items."""

from __future__ import annotations

from collections.abc import (
    Mapping,
    Sequence,
)
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from hardpoint.builtin_plugins.server.dialects.chat.logprobs import TokenLogprob
from hardpoint.builtin_plugins.server.routes.answers import (
    EncodedArrays,
)
from hardpoint.plugins.requests import WeightRun
from hardpoint.plugins.server import ToolCall

from .custom_tools import OutputCustomCall, custom_input
from .input import ReasoningTextPart, Status

RESPONSE_PREFIX = "resp_"
"""Beginning of the ids of responses."""


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """The answer."""

    id: str
    role: str = "assistant"
    status: Status
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """The reasoning before the answer, as it is: there are no summaries."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningTextPart]
    status: Status


class OutputFunctionCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class RequestedTool(msgspec.Struct, frozen=True):
    """A tool as the request names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


RequestedTools = Mapping[str, RequestedTool]
"""Tools of a namespace and custom tools, by the name that the model sees."""


OutputItem = OutputReasoning | OutputMessage | OutputFunctionCall | OutputCustomCall


class InputDetails(msgspec.Struct):
    """The cached tokens of a prompt."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """The reasoning tokens of an answer."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response ended early."""

    reason: str


class ConversationReference(msgspec.Struct):
    """The stored conversation that a response is a part of."""

    id: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, with the fields of the request that it answers.

    Attributes:
        store: whether it is stored.
        truncation: "disabled": prompts that are too long are refused.
        warning: what an output parser finds wrong.
        validation_error: what is wrong with an answer that is JSON of a schema that is not strict.
        part_figures: figures of step parts that the request includes.
        part_arrays: numbers of positions that step parts give.
        weight_runs: versions of the weights, see `CompletionOutput.weight_runs`.
    """

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    conversation: ConversationReference | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    warning: str | UnsetType = UNSET
    validation_error: str | UnsetType = UNSET
    part_figures: dict[str, Any] | UnsetType = UNSET
    part_arrays: EncodedArrays | UnsetType = UNSET
    weight_runs: list[WeightRun] | UnsetType = UNSET


def reasoning_item(item_id: str, text: str, status: Status = "completed") -> OutputReasoning:
    """Return an item of reasoning."""
    return OutputReasoning(id=item_id, content=[ReasoningTextPart(text=text)], status=status)


def message_item(
    item_id: str, text: str, logprobs: list[TokenLogprob], status: Status = "completed"
) -> OutputMessage:
    """Return an item with the text of the answer."""
    content = [OutputText(text=text, logprobs=logprobs)]
    return OutputMessage(id=item_id, content=content, status=status)


def tool_call_item(
    item_id: str, call: ToolCall, names: RequestedTools, status: Status = "completed"
) -> OutputFunctionCall | OutputCustomCall:
    """Return an item of a call, as the request names its tool."""
    tool = names.get(call.name or "", RequestedTool(call.name or ""))
    fields: dict[str, Any] = {
        "id": item_id,
        "call_id": call.id or "",
        "name": tool.name,
        "namespace": tool.namespace or UNSET,
        "status": status,
    }
    if tool.is_custom:
        text = custom_input(call.arguments) if status == "completed" else ""
        return OutputCustomCall(input=text, **fields)
    return OutputFunctionCall(arguments=call.arguments, **fields)


def echoed(items: Sequence[msgspec.Struct]) -> list[Any]:
    """Return parts of a request as a response shows them, without fields that are unset."""
    plain: list[dict[str, Any]] = msgspec.to_builtins(list(items))
    return [{name: v for name, v in item.items() if v is not None} for item in plain]
