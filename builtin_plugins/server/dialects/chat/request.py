"""The body of `/v1/chat/completions`: messages, tools and their conversion for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from hardpoint.builtin_plugins.server.routes.compatibility_fields import ThinkingMode
from hardpoint.builtin_plugins.server.routes.fields import (
    IGNORED,
    TEXT_REFUSED,
    TextFields,
    check_known,
)
from hardpoint.builtin_plugins.server.routes.images import placed_images
from hardpoint.plugins import RequestError
from hardpoint.typed import Strict

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Message(Strict):
    """One message of a conversation.

    Attributes:
        content: a text, or parts `{"type": "text", "text": ...}`; of a model that takes images,
            also `{"type": "image_url", "image_url": {"url": ...}}`; of the assistant, also
            `{"type": "refusal", "refusal": ...}`, which is read as a text.
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
        content = self.content if self.content is not None else ""
        if self.role == "assistant" and isinstance(content, list):
            content = list(map(_as_text, content))
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        if (reasoning := self.reasoning or self.reasoning_content) is not None:
            message["reasoning"] = message["reasoning_content"] = reasoning
        for name in ("name", "tool_calls", "tool_call_id"):
            if getattr(self, name):
                message[name] = getattr(self, name)
        return message


def _as_text(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of an answer; of a refusal, its text."""
    if part.get("type") == "refusal" and isinstance(text := part.get("refusal"), str):
        return {"type": "text", "text": text}
    return part


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates have them, with images under their places."""
    plain = [message.plain() for message in messages]
    for index, message in enumerate(plain):
        message["content"] = placed_images(message["content"], f"messages[{index}].content")
    return plain


class ChatTool(Strict):
    """A function that the model may call; the engine checks its definition."""

    type: Literal["function"]
    function: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates have it, without members that are null."""
        function = {name: value for name, value in self.function.items() if value is not None}
        return {"type": self.type, "function": function}


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
    """The tools of the request that may be called."""

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
    tools: list[ChatTool] | None = None
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
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: expected logprobs to be true with it")
        if (request.max_completion_tokens or request.max_tokens) == 0:
            raise RequestError(f"{self.limit_field}: expected at least 1, got 0")
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
        before: str | list[dict[str, Any]] = self.messages[-1].plain()["content"]
        if isinstance(before, list):  # the engine joins parts so, and refuses others
            return "\n".join(part["text"] for part in before)
        return before

    def tools_and_choice(self) -> tuple[list[dict[str, Any]] | None, Any]:
        """Return the tools as chat templates have them, and the choice.

        Raises:
            RequestError: the choice is of a tool that the request does not have.
        """
        tools = plain_tools(self.tools)
        choice = self.tool_choice or "auto"
        if isinstance(choice, str):
            return tools, choice
        known = [tool["function"].get("name") for tool in tools or ()]
        if isinstance(choice, NamedTool):
            check_known(choice.function.name, known, "tool_choice.function.name")
            return tools, {"name": choice.function.name}
        for index, tool in enumerate(choice.allowed_tools.tools):
            path = f"tool_choice.allowed_tools.tools[{index}].function.name"
            check_known(tool.function.name, known, path)
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        allowed = [tool for tool in tools or () if tool["function"].get("name") in names]
        return allowed, choice.allowed_tools.mode


def plain_tools(tools: Sequence[ChatTool] | None) -> list[dict[str, Any]] | None:
    """Return tools as chat templates have them; None if there are none."""
    return [tool.plain() for tool in tools or ()] or None
