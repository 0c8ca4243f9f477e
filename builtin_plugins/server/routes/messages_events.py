"""The answers of `/v1/messages`: the message, its blocks, and the events of a streamed one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from hardpoint.builtin_plugins.server.errors import MESSAGES_PATH, AnswerError, error_body
from hardpoint.plugins import CompletionOutput, RequestOutput, Tokenizer
from hardpoint.plugins.server import ToolCall

from .answers import UsageCount, WhiteSpace, check_ended, whole_text

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class OutputTextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """The answer."""

    text: str


class OutputThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought.

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
    """Of the answer's tokens, those of the thinking."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Tokens of a request.

    Attributes:
        input_tokens: of the prompt, those that were not cached.
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


def whole_message(
    output: RequestOutput, tokenizer: Tokenizer, *, message_id: str, model: str, max_tokens: int
) -> MessageObject:
    """Return a whole answer.

    Args:
        max_tokens: of the request.

    Raises:
        AnswerError: the answer ended with an error.
    """
    (completion,) = output.outputs
    check_ended(completion)
    count = UsageCount(tokenizer)
    count.add(output)
    content: list[OutputBlock] = []
    if completion.reasoning:
        content.append(OutputThinkingBlock(completion.reasoning))
    if text := whole_text(completion):
        content.append(OutputTextBlock(text))
    for call in completion.tool_calls or ():
        if (arguments := whole_arguments(call.arguments)) is not None:
            content.append(OutputToolUseBlock(call.id or "", call.name or "", arguments))
    return MessageObject(
        id=message_id,
        model=model,
        content=content,
        usage=_usage(count),
        **_ended(completion, count.completion_tokens, max_tokens),
    )


def whole_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if it was cut off or is malformed."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def split_calls(
    calls: Sequence[ToolCall] | None, opened: ToolCall | None
) -> tuple[Sequence[ToolCall], Sequence[ToolCall]]:
    """Return the parts of calls that go on with an open one, and those that begin others.

    What goes on with a call comes before any text of the same output.

    Args:
        calls: parts of one output.
        opened: the open call, if there is one.
    """
    given = calls or ()
    index = None if opened is None else opened.index
    going_on = [call for call in given if call.index == index]
    return going_on, [call for call in given if call.index != index]


def _usage(count: UsageCount, *, whole: bool = True) -> MessageUsage:
    usage = count.usage()
    cached = 0
    if usage.prompt_tokens_details is not None:
        cached = usage.prompt_tokens_details.cached_tokens
    output_tokens = usage.completion_tokens if whole else 0
    found = MessageUsage(usage.prompt_tokens - cached, 0, cached, output_tokens)
    if whole and usage.completion_tokens_details is not None:
        thinking = usage.completion_tokens_details.reasoning_tokens
        found.output_tokens_details = ThinkingDetails(thinking)
    return found


def _ended(completion: CompletionOutput, num_tokens: int, max_tokens: int) -> dict[str, Any]:
    """Return the fields that say how a completion ended, after a number of tokens."""
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


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageStream:
    """Writes the events of a streamed message; what the deltas of a block share, once.

    A call is held back until it has ended: a client that runs calls as their blocks end must get no
    half ones, and the text of a broken call is text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, message_id: str, model: str, max_tokens: int
    ) -> None:
        """Prepare the events of a request.

        Args:
            max_tokens: of the request.
        """
        self._id, self._model, self._max_tokens = message_id, model, max_tokens
        self._count = UsageCount(tokenizer)
        self._encode = msgspec.json.Encoder().encode
        self._begun = False
        self._num_blocks = 0
        self._open: str | None = None
        self._call: ToolCall | None = None
        self._arguments: list[str] = []
        self._has_calls = False
        self._space = WhiteSpace()
        self._head = b""

    async def events(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events, those of one output together.

        Raises:
            AnswerError: the answer ended with an error.
        """
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                self._count.add(output)
                written = self._begin()
                for completion in output.outputs:
                    check_ended(completion)
                    written += self._parts(completion)
                    if completion.finish_reason is not None:
                        written += self._end(completion)
                if written:
                    yield b"".join(written)

    def failed(self, error: AnswerError) -> bytes:
        """Return the last events of a stream that an error ends."""
        last = b"event: error\ndata: " + error_body(error, MESSAGES_PATH) + b"\n\n"
        return b"".join([*self._close(), last])  # without a call that has not ended

    def _event(self, type_: str, **fields: Any) -> bytes:
        data = self._encode({"type": type_, **fields})
        return b"event: " + type_.encode() + b"\ndata: " + data + b"\n\n"

    def _begin(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        usage = _usage(self._count, whole=False)
        message = MessageObject(id=self._id, model=self._model, content=[], usage=usage)
        return [self._event("message_start", message=message)]

    def _parts(self, completion: CompletionOutput) -> list[bytes]:
        """Return the events of what is new: thinking, text, calls."""
        written: list[bytes] = []
        going_on, begun = split_calls(completion.tool_calls, self._call)
        self._arguments += [call.arguments for call in going_on]
        if completion.reasoning:
            written += self._called()
            written += self._opened("thinking", OutputThinkingBlock(""))
            written.append(self._delta(completion.reasoning))
        is_open = self._open == "text" and self._call is None
        if text := self._space.text_of(completion, is_open=is_open):
            written += self._called()
            written += self._text(text)
        for call in begun:
            if self._call is None or self._call.index != call.index:
                written += self._called()
                self._call, self._arguments = call, []
            self._arguments.append(call.arguments)
        return written

    def _text(self, text: str) -> list[bytes]:
        return [*self._opened("text", OutputTextBlock("")), self._delta(text)]

    def _called(self) -> list[bytes]:
        """Return the events of the call that was held back; none of one that is broken."""
        call, self._call = self._call, None
        arguments = "".join(self._arguments)
        if call is None or whole_arguments(arguments) is None:
            return []
        self._has_calls = True
        block = OutputToolUseBlock(call.id or "", call.name or "", {})
        return [*self._opened("tool_use", block), self._delta(arguments), *self._close()]

    def _opened(self, kind: str, block: OutputBlock) -> list[bytes]:
        """Return the events that begin a block, unless it is open."""
        if self._open == kind:
            return []
        written = self._close()
        self._open = kind
        delta, field = _DELTAS[kind]
        fields = {"type": "content_block_delta", "index": self._num_blocks}
        head = self._encode({**fields, "delta": {"type": delta}})
        self._head = b"event: content_block_delta\ndata: " + head[:-2] + f',"{field}":'.encode()
        index = self._num_blocks
        return [*written, self._event("content_block_start", index=index, content_block=block)]

    def _delta(self, text: str) -> bytes:
        return self._head + self._encode(text) + b"}}\n\n"

    def _close(self) -> list[bytes]:
        """Return the events that end the open block, if there is one."""
        if self._open is None:
            return []
        written: list[bytes] = []
        index = self._num_blocks
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            written.append(self._event("content_block_delta", index=index, delta=delta))
        self._open = None
        self._num_blocks += 1
        return [*written, self._event("content_block_stop", index=index)]

    def _end(self, completion: CompletionOutput) -> list[bytes]:
        written = self._called()
        if rest := self._space.rest(has_calls=self._has_calls):
            written += self._text(rest)
        ended = _ended(completion, self._count.completion_tokens, self._max_tokens)
        usage = _usage(self._count)
        return [
            *written,
            *self._close(),
            self._event("message_delta", delta=ended, usage=usage),
            self._event("message_stop"),
        ]
