"""The answers of `/v1/chat/completions`: whole ones, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from hardpoint.builtin_plugins.server.dialects.choices import EndedChoice, ended
from hardpoint.builtin_plugins.server.dialects.chunks import ChunkAnswer, identity_of
from hardpoint.builtin_plugins.server.dialects.dialect import ParsedRequest
from hardpoint.builtin_plugins.server.routes.answers import (
    Usage,
    check_ended,
    only,
    prompt_logprobs,
)
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import CompletionOutput, RequestOutput, Tokenizer
from hardpoint.plugins.server import ToolCall

from .logprobs import ChoiceLogprobs, choice_logprobs
from .request import ChatCompletionRequest


class CalledFunction(msgspec.Struct, omit_defaults=True):
    """The name of a called tool and its arguments as JSON text."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPart(msgspec.Struct, omit_defaults=True):
    """A call of a tool, or the new part of a streamed call."""

    function: CalledFunction
    index: int | None = None
    id: str | None = None
    type: str | None = None


class AnswerMessage(msgspec.Struct, omit_defaults=True):
    """The message of an answer, or the new part of it in a chunk."""

    role: str | None = None
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    refusal: msgspec.UnsetType | None = msgspec.UNSET


class ChatChoice(EndedChoice, kw_only=True):
    """One completion of an answer."""

    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(EndedChoice, kw_only=True):
    """The new part of one completion."""

    delta: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to a conversation."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Any] | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None


def _choice(
    completion: CompletionOutput, body: ChatCompletionRequest, tokenizer: Tokenizer
) -> ChatChoice:
    message = AnswerMessage("assistant", completion.content or None, refusal=None)
    if body.include_reasoning and completion.reasoning:
        message.reasoning = message.reasoning_content = completion.reasoning
    if completion.tool_calls:
        message.tool_calls = [_whole_call(call) for call in completion.tool_calls]
    elif message.content is None:
        message.content = ""
    if before := body.continued():
        message.content = before + (message.content or "")
    return ChatChoice(
        index=completion.index,
        message=message,
        logprobs=_asked_logprobs(completion, body, tokenizer),
        finish_reason=completion.finish_reason,
        token_ids=completion.token_ids if body.return_token_ids else msgspec.UNSET,
        **ended(completion, tokenizer),
    )


def _whole_call(call: ToolCall) -> ToolCallPart:
    return ToolCallPart(CalledFunction(call.name, call.arguments), id=call.id, type="function")


def _asked_logprobs(
    completion: CompletionOutput, body: ChatCompletionRequest, tokenizer: Tokenizer
) -> ChoiceLogprobs | None:
    extra_ids = body.logprob_token_ids or ()
    shown_by = None if body.return_tokens_as_token_ids else tokenizer
    return choice_logprobs(completion, body.top_logprobs or 0, extra_ids, tokenizer=shown_by)


class ChatAnswer(ChunkAnswer[RequestOutput]):
    """Writes the answer to a conversation."""

    def __init__(
        self, service: Service, parsed: ParsedRequest[ChatCompletionRequest], num_choices: int
    ) -> None:
        self._asked, self._num_choices = parsed.body, num_choices
        self._identity = identity_of(parsed, "chat.completion")
        head = {**self._identity, "object": "chat.completion.chunk"}
        ids = [parsed.request_id] if parsed.body.wants_progress else []
        super().__init__(service, head, parsed.body.stream_options, ids)
        self._begun = False

    async def whole(self, outputs: AsyncGenerator[RequestOutput, None]) -> ChatCompletion:
        """Return the whole answer; see the base."""
        output, tokenizer = await only(outputs), self._service.engine.tokenizer
        for completion in output.outputs:
            check_ended(completion)
        self._usage.add(output)
        await self._measure()
        ids = output.prompt_token_ids if self._asked.return_token_ids else None
        return ChatCompletion(
            **self._identity,
            choices=[
                _choice(completion_output, self._asked, tokenizer)
                for completion_output in output.outputs
            ],
            usage=self._usage.usage(),
            prompt_logprobs=prompt_logprobs(output),
            prompt_token_ids=ids,
            kv_transfer_params=output.kv_transfer_params,
        )

    def _chunks(self, output: RequestOutput) -> bytes:
        self._usage.add(output)
        self._transfer = output.kv_transfer_params or self._transfer
        tail = self._usage_so_far() + b"}\n\n"
        parts: list[bytes] = []
        if not self._begun:
            self._begun = True
            parts += self._first_chunks(output)
        for completion in output.outputs:
            check_ended(completion)
            for choice in self._choices(completion):
                parts += (self._head, self._encode(choice), b"]", tail)
        return b"".join(parts)

    def _first_chunks(self, output: RequestOutput) -> Iterator[bytes]:
        """Yield the parts of the chunks with the role of each choice, before the first output.

        OpenAI's client appends each new choice to a list, so the choices have to begin in order.
        """
        about_prompt, usage = self._about_prompt(output), self._usage_so_far(completion_tokens=0)
        for index in range(self._num_choices):
            yield from (self._head, self._encode(self._first(index)), b"]")
            yield from (b"" if index else about_prompt, usage, b"}\n\n")

    def _about_prompt(self, output: RequestOutput) -> bytes:
        parts = b""
        if self._asked.return_token_ids:
            parts += b',"prompt_token_ids":' + self._encode(output.prompt_token_ids)
        if self._asked.prompt_logprobs is not None:
            parts += b',"prompt_logprobs":' + self._encode(prompt_logprobs(output))
        return parts

    def _first(self, index: int) -> ChunkChoice:
        return ChunkChoice(index=index, delta=AnswerMessage("assistant", self._asked.continued()))

    def _choices(self, completion: CompletionOutput) -> list[ChunkChoice]:
        """Return the new choices of a completion; an empty list if there are none.

        The end of calls is a chunk of its own: OpenAI's clients read calls before that alone.
        """
        body = self._asked
        delta = AnswerMessage()
        if completion.content:
            delta.content = completion.content
        if completion.reasoning and body.include_reasoning:
            delta.reasoning = delta.reasoning_content = completion.reasoning
        if completion.tool_calls:
            delta.tool_calls = list(map(_call_part, completion.tool_calls))
        choice = ChunkChoice(index=completion.index, delta=delta)
        if body.wants_logprobs:
            tokenizer = self._service.engine.tokenizer
            choice.logprobs = _asked_logprobs(completion, body, tokenizer)
        if body.return_token_ids:
            choice.token_ids = completion.token_ids
        if completion.finish_reason is None:
            is_new = body.wants_logprobs or body.return_token_ids or delta != AnswerMessage()
            return [choice] if is_new else []
        chunks = [choice]
        if delta.tool_calls is not None:
            choice = ChunkChoice(index=completion.index, delta=AnswerMessage())
            chunks.append(choice)
        choice.finish_reason = completion.finish_reason
        for name, value in ended(completion, self._service.engine.tokenizer).items():
            setattr(choice, name, value)
        return chunks


def _call_part(call: ToolCall) -> ToolCallPart:
    return ToolCallPart(
        CalledFunction(call.name, call.arguments),
        index=call.index,
        id=call.id,
        type=None if call.id is None else "function",
    )
