"""`/v1/chat/completions`: conversations, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from hardpoint.builtin_plugins.server.routes.answers import (
    EncodedArrays,
    Usage,
    check_ended,
    encoded_arrays,
    finite,
    likeliest,
    only,
    prompt_logprobs,
    token_bytes,
    token_text,
)
from hardpoint.builtin_plugins.server.routes.compatibility_fields import ThinkingMode
from hardpoint.builtin_plugins.server.routes.fields import (
    IGNORED,
    TEXT_REFUSED,
    TextFields,
    check_known,
    reasoning_variables,
    renamed,
)
from hardpoint.builtin_plugins.server.routes.images import placed_images, with_owner
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import CompletionOutput, Logprob, RequestError, RequestOutput, Tokenizer
from hardpoint.plugins.requests import WeightRun
from hardpoint.plugins.server import ToolCall
from hardpoint.toolkit.trace import TRACE, CompletionTrace, completion_trace
from hardpoint.typed import Strict

from .chunks import ChunkAnswer, identity_of
from .dialect import Dialect, ParsedRequest

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Message(Strict):
    """One message of a conversation.

    Attributes:
        content: a text, or parts `{"type": "text", "text": ...}` and, of a model that takes images,
            `{"type": "image_url", "image_url": {"url": ...}}`.
        reasoning, reasoning_content: what the assistant thought; two names of one thing.
        tool_calls: calls that the assistant made.
        tool_call_id: id of the call that a message of role "tool" answers.
        refusal, audio, function_call, annotations, parsed: fields of answers that are sent back;
            ignored.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    parsed: Any = None

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates have it, with both names of the reasoning."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content if self.content is not None else "",
        }
        if (reasoning := self.reasoning or self.reasoning_content) is not None:
            message["reasoning"] = message["reasoning_content"] = reasoning
        for name in ("name", "tool_calls", "tool_call_id"):
            if getattr(self, name):
                message[name] = getattr(self, name)
        return message


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates have them, with images under their places."""
    plain = [message.plain() for message in messages]
    for index, message in enumerate(plain):
        message["content"] = placed_images(message["content"], f"messages[{index}].content")
    return plain


class NamedFunction(Strict):
    """The name of a tool."""

    name: str


class NamedTool(Strict, tag_field="type", tag="function"):
    """The tool that has to be called."""

    function: NamedFunction


class AllowedTools(Strict):
    """Some of the tools.

    Attributes:
        mode: whether the model may call them, or has to call one.
    """

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedToolChoice(Strict, tag_field="type", tag="allowed_tools"):
    """The tools that may be called, of those that the request has."""

    allowed_tools: AllowedTools


_TAKEN = ("chat_template", "thinking")


class ChatCompletionRequest(TextFields):
    """A conversation to answer.

    Attributes:
        messages: from the first to the last.
        tools: functions that the model may call, in OpenAI's shape.
        tool_choice: "none" shows the model no tools; "required" and a named one make it call one.
        parallel_tool_calls: whether it may call several at once.
        modalities: "text" alone.
        add_generation_prompt: whether the prompt ends with the beginning of an answer; None is
            unless the last message is continued.
        continue_final_message: go on with the last message, of the assistant.
        chat_template: name of one of the model's templates; by default the one for tools, where
            there are tools and such a template.
        chat_template_kwargs: variables of the template that the operator allows.
        max_completion_tokens: maximum length of the answer with its reasoning; `max_tokens` is the
            same.
        logprobs: whether choices hold log-probabilities.
        top_logprobs: likeliest tokens per position; needs `logprobs`.
        reasoning_effort: for templates that have it; "none" asks for no reasoning.
        thinking: the same as `enable_thinking`, or an object with `type` and `budget_tokens`.
        include_reasoning: whether the answer holds the reasoning.
        reasoning_format: "hidden" leaves the reasoning out of the answer; the others give it as
            `reasoning` and `reasoning_content`.
        echo: whether the answer begins with the message that it continues.
    """

    ignored: ClassVar[Mapping[str, str]] = {
        **IGNORED,
        "prompt_cache_options": "cached prompts are found by their content",
        "prediction": "drafts are made by the speculators that the operator enables",
        "store": "nothing is stored",
        "verbosity": "ask for it in the messages",
    }
    refused: ClassVar[Mapping[str, str]] = {
        **{name: why for name, why in TEXT_REFUSED.items() if name not in _TAKEN},
        "audio": "the model writes text alone",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "prompt": "send it to /v1/completions",
        "moderation": "there is no moderation",
        "web_search_options": "there are no hosted tools",
    }

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    thinking: bool | ThinkingMode | None = None
    include_reasoning: bool = True
    reasoning_format: Literal["auto", "deepseek", "parsed", "hidden"] | None = None
    add_special_tokens: Literal[False] = False
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool = False

    @property
    def limit_field(self) -> str:
        """The field that has the maximum number of tokens."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().limit_field

    def resolved(self) -> Self:
        """Return the request with the counterparts of other servers' fields; see the base."""
        request = super().resolved()
        changes: dict[str, Any] = {}
        if self.reasoning_format == "hidden":
            changes["include_reasoning"] = False
        if isinstance(self.thinking, ThinkingMode) and self.thinking.budget_tokens is not None:
            if self.thinking_token_budget is not msgspec.UNSET:
                raise RequestError(
                    "thinking.budget_tokens and thinking_token_budget: expected one of them, "
                    "got both"
                )
            changes["thinking_token_budget"] = self.thinking.budget_tokens
        return msgspec.structs.replace(request, **changes) if changes else request

    def continued(self) -> str:
        """Return the text that the answer begins with: of the message that it continues."""
        if not (self.echo and self.continue_final_message):
            return ""
        before = self.messages[-1].content
        if isinstance(before, list):  # the engine joins parts so, and refuses others
            return "\n".join(part["text"] for part in before)
        return before or ""

    def tools_and_choice(self) -> tuple[list[dict[str, Any]] | None, Any]:
        """Return the tools, of which members that are null are left out, and the choice.

        Raises:
            RequestError: the choice is of a tool that the request does not have.
        """
        tools = plain_tools(self.tools)
        choice = self.tool_choice or "auto"
        if isinstance(choice, str):
            return tools, choice
        known = [_tool_name(tool) for tool in tools or ()]
        if isinstance(choice, NamedTool):
            check_known(choice.function.name, known, "tool_choice.function.name")
            return tools, {"name": choice.function.name}
        for index, tool in enumerate(choice.allowed_tools.tools):
            path = f"tool_choice.allowed_tools.tools[{index}].function.name"
            check_known(tool.function.name, known, path)
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        allowed = [tool for tool in tools or () if _tool_name(tool) in names]
        return allowed, choice.allowed_tools.mode


def plain_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools without their members that are null; None if there are none."""
    return [_without_nulls(tool) for tool in tools or ()] or None


def _without_nulls(tool: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in tool.items() if value is not None}
    if isinstance(function := kept.get("function"), dict):
        kept["function"] = {name: value for name, value in function.items() if value is not None}
    return kept


def _tool_name(tool: dict[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


class CalledFunction(msgspec.Struct, omit_defaults=True):
    """The name of a called tool and its arguments as JSON text."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPart(msgspec.Struct, omit_defaults=True):
    """A call of a tool; of a streamed one, what is new."""

    function: CalledFunction
    index: int | None = None
    id: str | None = None
    type: str | None = None


class TopLogprob(msgspec.Struct):
    """A likely token of a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The token of a position, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of a choice."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, omit_defaults=True):
    """The message of an answer, or of a chunk what is new of it."""

    role: str | None = None
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    refusal: msgspec.UnsetType | None = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One completion of an answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    warning: str | msgspec.UnsetType = msgspec.UNSET
    validation_error: str | msgspec.UnsetType = msgspec.UNSET
    part_figures: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    part_arrays: EncodedArrays | msgspec.UnsetType = msgspec.UNSET
    trace: CompletionTrace | msgspec.UnsetType = msgspec.UNSET
    weight_runs: list[WeightRun] | msgspec.UnsetType = msgspec.UNSET
    num_resumes: int | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The new part of one completion."""

    index: int
    delta: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    warning: str | msgspec.UnsetType = msgspec.UNSET
    validation_error: str | msgspec.UnsetType = msgspec.UNSET
    part_figures: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    part_arrays: EncodedArrays | msgspec.UnsetType = msgspec.UNSET
    trace: CompletionTrace | msgspec.UnsetType = msgspec.UNSET
    weight_runs: list[WeightRun] | msgspec.UnsetType = msgspec.UNSET
    num_resumes: int | msgspec.UnsetType = msgspec.UNSET


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
        tools, choice = body.tools_and_choice()
        messages = plain_messages(body.messages)
        self._service.check_prompt(messages, tools, name="messages")
        outputs = engine.chat(
            with_owner(messages, self._service.owner_of(asked.call)),
            params,
            asked.request_id,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=body.parallel_tool_calls,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template or None,
            chat_template_kwargs=reasoning_variables(
                engine.tokenizer.chat_template,
                body.reasoning_effort,
                body.chat_template_kwargs,
                enable_thinking=body.enable_thinking,
                thinking=body.thinking,
            ),
            **self._service.extras(asked.call, body, asked.adapter),
        )
        return renamed(outputs, (), body), ChatAnswer(self._service, asked)


def _choice(
    completion: CompletionOutput, asked: ChatCompletionRequest, tokenizer: Tokenizer
) -> ChatChoice:
    message = AnswerMessage("assistant", completion.content or None, refusal=None)
    if asked.include_reasoning and completion.reasoning:
        message.reasoning = message.reasoning_content = completion.reasoning
    if completion.tool_calls:
        message.tool_calls = [_whole_call(call) for call in completion.tool_calls]
    elif message.content is None:
        message.content = ""
    if before := asked.continued():
        message.content = before + (message.content or "")
    return ChatChoice(
        index=completion.index,
        message=message,
        logprobs=_asked_logprobs(completion, asked, tokenizer),
        finish_reason=completion.finish_reason,
        token_ids=completion.token_ids if asked.return_token_ids else msgspec.UNSET,
        **ended(completion, tokenizer),
    )


def ended(completion: CompletionOutput, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Return the fields of a choice about how its completion ended.

    Args:
        completion: may still run.
        tokenizer: gives the texts of tokens in a trace; None leaves them out.
    """
    fields: dict[str, Any] = {}
    if completion.finish_reason is not None:
        fields["stop_reason"] = completion.stop_reason
    if completion.warning:
        fields["warning"] = completion.warning
    if completion.validation_error:
        fields["validation_error"] = completion.validation_error
    figures = dict(completion.part_figures or {})
    if figures.pop(TRACE, None):
        decode = None if tokenizer is None else tokenizer.decode
        fields["trace"] = completion_trace(completion, decode)
    if figures:
        fields["part_figures"] = figures
    if completion.part_arrays is not None:
        fields["part_arrays"] = encoded_arrays(completion.part_arrays)
    if completion.weight_runs is not None and completion.finish_reason is not None:
        fields["weight_runs"] = completion.weight_runs
    if completion.num_resumes:
        fields["num_resumes"] = completion.num_resumes
    return fields


def _whole_call(call: ToolCall) -> ToolCallPart:
    return ToolCallPart(CalledFunction(call.name, call.arguments), id=call.id, type="function")


def _asked_logprobs(
    completion: CompletionOutput, asked: ChatCompletionRequest, tokenizer: Tokenizer
) -> ChoiceLogprobs | None:
    given = asked.logprob_token_ids or ()
    shown_by = None if asked.return_tokens_as_token_ids else tokenizer
    return choice_logprobs(completion, asked.top_logprobs or 0, given, tokenizer=shown_by)


def choice_logprobs(
    completion: CompletionOutput,
    count: int,
    given: Collection[int] = (),
    *,
    tokenizer: Tokenizer | None = None,
) -> ChoiceLogprobs | None:
    """Return the log-probabilities of a completion's tokens.

    Args:
        count: likeliest tokens per position.
        given: tokens that are there besides.
        tokenizer: has the bytes of tokens; None shows tokens by their ids.
    """
    if completion.logprobs is None:
        return None
    content = [
        _position(position, token, likeliest(position, count, given), tokenizer)
        for position, token in zip(completion.logprobs, completion.token_ids, strict=False)
    ]
    return ChoiceLogprobs(content)


def _position(
    position: Mapping[int, Logprob],
    token: int,
    others: Sequence[tuple[int, Logprob]],
    tokenizer: Tokenizer | None,
) -> TokenLogprob:
    def shown(token: int, logprob: Logprob) -> tuple[str, float, list[int]]:
        text = token_text(logprob, token, as_id=tokenizer is None)
        own = list(text.encode()) if tokenizer is None else token_bytes(tokenizer, token, text)
        return text, finite(logprob.logprob), own

    top = [TopLogprob(*shown(other, logprob)) for other, logprob in others]
    return TokenLogprob(*shown(token, position[token]), top)


class ChatAnswer(ChunkAnswer[RequestOutput]):
    """Writes the answer to a conversation."""

    def __init__(self, service: Service, asked: ParsedRequest[ChatCompletionRequest]) -> None:
        self._asked = asked.body
        self._identity = identity_of(asked, "chat.completion")
        head = {**self._identity, "object": "chat.completion.chunk"}
        ids = [asked.request_id] if asked.body.wants_progress else []
        super().__init__(service, head, asked.body.stream_options, ids)
        self._begun: set[int] = set()

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
            choices=[_choice(one, self._asked, tokenizer) for one in output.outputs],
            usage=self._usage.usage(),
            prompt_logprobs=prompt_logprobs(output),
            prompt_token_ids=ids,
            kv_transfer_params=output.kv_transfer_params,
        )

    def _chunks(self, output: RequestOutput) -> bytes:
        before = self._usage.completion_tokens
        self._usage.add(output)
        self._transfer = output.kv_transfer_params or self._transfer
        tail = self._usage_so_far() + b"}\n\n"
        parts: list[bytes] = []
        for completion in output.outputs:
            if completion.index not in self._begun:
                first = self._encode(self._first(completion.index))
                usage = self._usage_so_far(before)  # the first chunk holds no token
                parts += (self._head, first, b"]", self._about_prompt(output), usage, b"}\n\n")
                self._begun.add(completion.index)
            check_ended(completion)
            for choice in self._choices(completion):
                parts += (self._head, self._encode(choice), b"]", tail)
        return b"".join(parts)

    def _about_prompt(self, output: RequestOutput) -> bytes:
        parts = b""
        if self._begun:
            return parts
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
        asked = self._asked
        delta = AnswerMessage()
        if completion.content:
            delta.content = completion.content
        if completion.reasoning and asked.include_reasoning:
            delta.reasoning = delta.reasoning_content = completion.reasoning
        if completion.tool_calls:
            delta.tool_calls = list(map(_call_part, completion.tool_calls))
        choice = ChunkChoice(index=completion.index, delta=delta)
        if asked.wants_logprobs:
            tokenizer = self._service.engine.tokenizer
            choice.logprobs = _asked_logprobs(completion, asked, tokenizer)
        if asked.return_token_ids:
            choice.token_ids = completion.token_ids
        if completion.finish_reason is None:
            is_new = asked.wants_logprobs or asked.return_token_ids or delta != AnswerMessage()
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
