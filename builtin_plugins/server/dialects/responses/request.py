"""The body of `/v1/responses`: its fields, its tools, and their conversion for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hardpoint.builtin_plugins.server.routes.fields import (
    IGNORED,
    REFUSED,
    GenerationFields,
    check_known,
)
from hardpoint.builtin_plugins.server.routes.response_formats import JsonObjectFormat, TextFormat
from hardpoint.plugins import RequestError
from hardpoint.typed import Strict

from .custom_tools import CustomTool, unenforced_formats
from .input import InputItem, ItemConverter, MessageItem, prepared_items
from .tools import CALLABLE, flat_name, flat_tools, without_hosted_tools

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]
_LOGPROBS = "message.output_text.logprobs"


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
        members = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": members}


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
    """The functions of the request that may be called.

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


class NamedConversation(Strict):
    """A stored conversation of `/v1/conversations`."""

    id: Annotated[str, Meta(min_length=1)]


class ResponsesRequest(GenerationFields):
    """A conversation to answer.

    Attributes:
        input: a text of the user, or items: messages, calls, their results, and reasoning. It may
            be left out with `previous_response_id` or `conversation`.
        instructions: the system message.
        max_output_tokens: maximum length of the answer with its reasoning.
        include: "message.output_text.logprobs" asks for log-probabilities; other names with a dot,
            which are OpenAI's, add nothing. A name without one is that of a step part, such as
            "speculation", whose figures the response has as `part_figures`.
        top_logprobs: likeliest tokens per position; needs that.
        metadata: up to 16 texts, which the response has too.
        previous_response_id: a stored response, whose items, and those that it answers, come before
            the input. Its instructions do not.
        conversation: a stored conversation, or its id. Its items come before the input. The input
            and the answer are added to it.
        store: whether the response is kept, for `previous_response_id`; left out is true where the
            server has a store. Without one, it is answered as false.
        truncation: ignored and answered as "disabled".
        background: must be false.
        stop: strings that end the text.
    """

    limit_name: ClassVar[str] = "max_output_tokens"
    list_limits: ClassVar[Mapping[str, str]] = {"input": "messages"}
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
        "context_management": "POST /v1/responses/compact compacts a conversation",
        "max_tool_calls": "there are no hosted tools, and calls are the caller's to make",
        "moderation": "there is no moderation",
        "prompt": "there are no stored prompts; send instructions and input",
    }

    input: str | list[InputItem] = []
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
    metadata: Metadata = {}
    previous_response_id: Annotated[str, Meta(min_length=1)] | None = None
    conversation: Annotated[str, Meta(min_length=1)] | NamedConversation | None = None
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
        return (
            {**fields, "input": prepared_items(fields["input"], "input")}
            if "input" in fields
            else fields
        )

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
        forms = super().answer_forms()
        match self.text.format:
            case JsonObjectFormat():
                forms["text.format"] = {"json_object": True}
            case TextSchemaFormat(schema=schema, strict=strict):
                forms["text.format"] = {"json": schema, "lenient": strict is not True}
        return forms

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

    @property
    def conversation_id(self) -> str | None:
        """The id of the stored conversation; None without one.

        Raises:
            RequestError: the request also names a previous response.
        """
        reference = self.conversation
        if reference is not None and self.previous_response_id is not None:
            raise RequestError(
                "conversation: expected none with previous_response_id, because both name the "
                "items before the input"
            )
        return reference.id if isinstance(reference, NamedConversation) else reference

    def items(self) -> list[InputItem]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    def messages(self, before: Sequence[InputItem] = ()) -> list[dict[str, Any]]:
        """Return the conversation.

        Args:
            before: stored items, see `ItemConverter`.

        Raises:
            RequestError: an item does not fit those before it.
        """
        field = "previous_response_id" if self.conversation is None else "conversation"
        conversation = ItemConverter(self.instructions, before, field)
        for index, item in enumerate(self.items()):
            conversation.add(item, f"input[{index}]")
        return conversation.messages


def _refuse_hosted(tool: Any, path: str) -> None:
    type_ = tool.get("type") if isinstance(tool, dict) else "function"
    if isinstance(type_, str) and type_ not in CALLABLE:
        raise RequestError(
            f"{path}.type: {type_[:100]!r} is not supported: there are no hosted tools, expected "
            '"function" or "custom"'
        )
