"""The answers of `/v1/messages`: the message, its blocks, and the events of a streamed one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from hardpoint.builtin_plugins.server.errors import MESSAGES_PATH, AnswerError, error_body
from hardpoint.builtin_plugins.server.routes.answers import UsageCount
from hardpoint.plugins import CompletionOutput, Tokenizer
from hardpoint.plugins.server import ToolCall

from .dialect import ParsedRequest
from .items import ItemAnswer, Kind, in_order, whole_arguments


class OutputTextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """The answer."""

    text: str


class OutputThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """The reasoning of the model.

    Attributes:
        signature: empty: none is needed to send the block back.
    """

    thinking: str
    signature: str = ""


class OutputToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


OutputBlock = OutputThinkingBlock | OutputTextBlock | OutputToolUseBlock


class ThinkingDetails(msgspec.Struct):
    """The reasoning tokens of an answer."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Tokens of a request.

    Attributes:
        input_tokens: tokens of the prompt that were not cached.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails | UnsetType = UNSET


class MessageObject(msgspec.Struct, kw_only=True):
    """The answer to a conversation.

    Attributes:
        stop_reason: Anthropic's, or "timeout", "repetition" or "abort".
        warning: what an output parser finds wrong.
        validation_error: what is wrong with an answer that is JSON of a schema.
    """

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    warning: str | UnsetType = UNSET
    validation_error: str | UnsetType = UNSET


def _usage(count: UsageCount, *, whole: bool = True) -> MessageUsage:
    usage = count.usage()
    cached = 0
    if usage.prompt_tokens_details is not None:
        cached = usage.prompt_tokens_details.cached_tokens
    output_tokens = usage.completion_tokens if whole else 0
    message_usage = MessageUsage(usage.prompt_tokens - cached, 0, cached, output_tokens)
    if whole and usage.completion_tokens_details is not None:
        thinking = usage.completion_tokens_details.reasoning_tokens
        message_usage.output_tokens_details = ThinkingDetails(thinking)
    return message_usage


def _ended(completion: CompletionOutput, num_tokens: int, max_tokens: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"stop_sequence": None}
    match completion.finish_reason:
        case "stop" if isinstance(completion.stop_reason, str):
            fields |= {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        case "stop":
            fields["stop_reason"] = "end_turn"
        case "tool_calls":
            fields["stop_reason"] = "tool_use"
        case "length" if num_tokens < max_tokens:
            fields["stop_reason"] = "model_context_window_exceeded"
        case "length":
            fields["stop_reason"] = "max_tokens"
        case other:
            fields["stop_reason"] = other
    if completion.warning:
        fields["warning"] = completion.warning
    if completion.validation_error:
        fields["validation_error"] = completion.validation_error
    return fields


_DELTAS: dict[Kind, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageAnswer(ItemAnswer):
    """Writes a message; the common part of the deltas of a block is encoded once.

    A call is held back until it has ended: a client that runs calls as their blocks end must get no
    half ones, and the text of a broken call is text.
    """

    heartbeat = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, tokenizer: Tokenizer, parsed: ParsedRequest[Any], max_tokens: int) -> None:
        super().__init__(tokenizer)
        self._id, self._model, self._max_tokens = parsed.answer_id, parsed.model, max_tokens
        self._arguments: list[str] = []
        self._head = b""

    def _whole(self, completion: CompletionOutput) -> MessageObject:
        content: list[OutputBlock] = []
        if completion.reasoning:
            content.append(OutputThinkingBlock(completion.reasoning))
        for part in in_order(completion.content, completion.tool_calls or ()):
            if isinstance(part, str):
                content.append(OutputTextBlock(part))
            elif (arguments := whole_arguments(part.arguments)) is not None:
                content.append(OutputToolUseBlock(part.id or "", part.name or "", arguments))
        ended = _ended(completion, self._usage.completion_tokens, self._max_tokens)
        usage = _usage(self._usage)
        return MessageObject(id=self._id, model=self._model, content=content, usage=usage, **ended)

    def failed(self, error: AnswerError) -> bytes:
        """Return the last events of a stream that an error ends."""
        last = b"event: error\ndata: " + error_body(error, MESSAGES_PATH) + b"\n\n"
        return b"".join([*self._close(), last])  # without a call that has not ended

    def _event(self, type_: str, **fields: Any) -> bytes:
        data = self._encode({"type": type_, **fields})
        return b"event: " + type_.encode() + b"\ndata: " + data + b"\n\n"

    def _first(self) -> Iterator[bytes]:
        usage = _usage(self._usage, whole=False)
        message = MessageObject(id=self._id, model=self._model, content=[], usage=usage)
        yield self._event("message_start", message=message)

    def _called(self, calls: Iterable[ToolCall]) -> Iterator[bytes]:
        for call in calls:
            if self._call is None or self._call.index != call.index:
                yield from self._released()
                self._call, self._arguments = call, []
            self._arguments.append(call.arguments)

    def _released(self) -> Iterator[bytes]:
        call, self._call = self._call, None
        arguments = "".join(self._arguments)
        if call is None or call.index in self._void_calls or whole_arguments(arguments) is None:
            return
        yield from self._block("call", OutputToolUseBlock(call.id or "", call.name or "", {}))
        yield self._delta(arguments)
        yield from self._close()

    def _opened(self, kind: Kind) -> Iterator[bytes]:
        yield from self._released()
        if self._open != kind:
            is_text = kind == "text"
            yield from self._block(
                kind, OutputTextBlock("") if is_text else OutputThinkingBlock("")
            )

    def _block(self, kind: Kind, block: OutputBlock) -> Iterator[bytes]:
        yield from self._close()
        self._open, index = kind, self._num_items
        delta, field = _DELTAS[kind]
        fields = {"type": "content_block_delta", "index": index}
        head = self._encode({**fields, "delta": {"type": delta}})
        self._head = b"event: content_block_delta\ndata: " + head[:-2] + f',"{field}":'.encode()
        yield self._event("content_block_start", index=index, content_block=block)

    def _delta(self, text: str) -> bytes:
        return self._head + self._encode(text) + b"}}\n\n"

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        index = self._num_items
        if self._open == "reasoning":
            delta = {"type": "signature_delta", "signature": ""}
            yield self._event("content_block_delta", index=index, delta=delta)
        self._open = None
        self._num_items += 1
        yield self._event("content_block_stop", index=index)

    def _end(self, completion: CompletionOutput) -> Iterator[bytes]:
        yield from self._released()
        yield from self._close()
        ended = _ended(completion, self._usage.completion_tokens, self._max_tokens)
        yield self._event("message_delta", delta=ended, usage=_usage(self._usage))
        yield self._event("message_stop")
