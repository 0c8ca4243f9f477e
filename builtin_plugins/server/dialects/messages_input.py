"""The input of `/v1/messages`: blocks, tools, and the conversation that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hardpoint.builtin_plugins.server.routes.images import Content, Part, added, image_part, joined
from hardpoint.plugins import RequestError
from hardpoint.typed import Strict

_NO_SERVER_TOOLS = "there are no server tools"
_SERVER_TOOLS = (
    "bash_code_execution",
    "code_execution",
    "text_editor_code_execution",
    "tool_search_tool",
    "web_fetch",
    "web_search",
)

REFUSED_BLOCKS = {
    "container_upload": _NO_SERVER_TOOLS,
    "document": "give its text, or images of its pages",
    "mcp_tool_result": _NO_SERVER_TOOLS,
    "mcp_tool_use": _NO_SERVER_TOOLS,
    "search_result": "give it as text",
    "server_tool_use": _NO_SERVER_TOOLS,
    "tool_reference": _NO_SERVER_TOOLS,
    **{f"{name}_tool_result": _NO_SERVER_TOOLS for name in _SERVER_TOOLS},
}
"""Types of blocks that are known and not supported, with the reason."""


class TextBlock(Strict, tag_field="type", tag="text"):
    """A text."""

    text: str
    cache_control: Any = None
    citations: Any = None


class Base64Image(Strict, tag_field="type", tag="base64"):
    """An image in the request.

    Attributes:
        media_type: not used: the content has the format.
    """

    data: str
    media_type: str = "image"

    def part(self, path: str) -> Part:
        """Return the image as conversations have it."""
        return image_part(f"data:;base64,{self.data}", f"{path}.data")


class UrlImage(Strict, tag_field="type", tag="url"):
    """An image elsewhere."""

    url: str

    def part(self, path: str) -> Part:
        """Return the image as conversations have it."""
        return image_part(self.url, f"{path}.url")


class ImageBlock(Strict, tag_field="type", tag="image"):
    """An image."""

    source: Base64Image | UrlImage
    cache_control: Any = None

    def part(self, path: str) -> Part:
        """Return the image as conversations have it."""
        return self.source.part(f"{path}.source")


class ThinkingBlock(Strict, tag_field="type", tag="thinking"):
    """The assistant's reasoning; signatures are not checked."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Strict, tag_field="type", tag="redacted_thinking"):
    """The reasoning of another server's assistant, encrypted: left out."""

    data: str


class ToolUseBlock(Strict, tag_field="type", tag="tool_use"):
    """A call that the assistant made.

    Attributes:
        cache_control, caller, toolset_name: ignored.
    """

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None
    toolset_name: Any = None


class ToolResultBlock(Strict, tag_field="type", tag="tool_result"):
    """The result of a call.

    Attributes:
        is_error: ignored: the content describes the failure.
        cache_control, toolset_name: ignored.
    """

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: Any = None


Block = (
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)


class InputMessage(Strict):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(Strict):
    """A tool that the model may call.

    Attributes:
        strict: whether calls have to keep to the schema.
        cache_control, eager_input_streaming, input_examples, defer_loading, allowed_callers:
            ignored.
    """

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None
    defer_loading: Any = None
    allowed_callers: Any = None

    def plain(self) -> dict[str, Any]:
        """Return the tool as conversations have it."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class AutoChoice(Strict, tag_field="type", tag="auto"):
    """The model may call tools."""

    disable_parallel_tool_use: bool = False


class AnyChoice(Strict, tag_field="type", tag="any"):
    """The model has to call a tool."""

    disable_parallel_tool_use: bool = False


class ToolChoice(Strict, tag_field="type", tag="tool"):
    """The model has to call this tool."""

    name: str
    disable_parallel_tool_use: bool = False


class NoneChoice(Strict, tag_field="type", tag="none"):
    """The model may call no tools."""


Choice = AutoChoice | AnyChoice | ToolChoice | NoneChoice


class EnabledThinking(Strict, tag_field="type", tag="enabled"):
    """The model thinks, up to a number of tokens.

    Attributes:
        display: ignored: the thinking is shown as it is.
    """

    budget_tokens: Annotated[int, Meta(ge=1)]
    display: str | None = None


class AdaptiveThinking(Strict, tag_field="type", tag="adaptive"):
    """The model thinks as much as it finds right.

    Attributes:
        display: ignored: the thinking is shown as it is.
    """

    display: str | None = None


class DisabledThinking(Strict, tag_field="type", tag="disabled"):
    """The model does not think."""


Thinking = EnabledThinking | AdaptiveThinking | DisabledThinking


def refuse_blocks(messages: Any, system: Any) -> None:
    """Raise an error if there is a block of a type that is refused by name.

    Args:
        messages, system: as a body has them, of any type.

    Raises:
        RequestError: there is one.
    """
    _refuse(system, "system")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, Mapping):
            _refuse(message.get("content"), f"messages[{index}].content")


def _refuse(blocks: Any, path: str) -> None:
    for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if not isinstance(block, Mapping):
            continue
        type_, place = block.get("type"), f"{path}[{index}]"
        if isinstance(type_, str) and type_ in REFUSED_BLOCKS:
            raise RequestError(f"{place}.type: {type_!r} is not supported: {REFUSED_BLOCKS[type_]}")
        if type_ == "tool_result":
            _refuse(block.get("content"), f"{place}.content")


def refuse_server_tools(tools: Any) -> None:
    """Raise an error if the caller does not run a tool.

    Raises:
        RequestError: there is one.
    """
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        type_ = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(type_, str) and type_ != "custom":
            raise RequestError(
                f"tools[{index}].type: {type_[:100]!r} is not supported: {_NO_SERVER_TOOLS}, and "
                "tools of the caller have a name and an input_schema"
            )


def content_of(content: str | Sequence[TextBlock | ImageBlock] | None, path: str) -> Content:
    """Return the content of a system prompt or of a tool's result."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined(
        [
            block.text if isinstance(block, TextBlock) else block.part(f"{path}[{index}]")
            for index, block in enumerate(content)
        ]
    )


class MessageConverter:
    """Makes a conversation of messages with blocks."""

    def __init__(self, system: str | Sequence[TextBlock] | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        if text := content_of(system, "system"):
            self.messages.append({"role": "system", "content": text})

    def add(self, message: InputMessage, path: str) -> None:
        """Add a message.

        Raises:
            RequestError: it holds a block that messages of its role cannot hold, or the result of
                a call that is not there; or it is not the assistant's and holds no block.
        """
        if isinstance(message.content, str):
            self._add(message.role, message.content)
        elif message.role == "assistant":  # whose answer may be empty
            self._add_turn(message.content, f"{path}.content")
        elif not message.content:
            raise RequestError(f"{path}.content: expected at least one block")
        else:
            self._add_blocks(message.role, message.content, f"{path}.content")

    def _add(self, role: str, content: Content) -> None:
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == role and role != "assistant":
            last["content"] = added(last["content"], content)  # of one role, they make one turn
        else:
            self.messages.append({"role": role, "content": content})

    def _add_blocks(self, role: str, blocks: Sequence[Block], path: str) -> None:
        for index, block in enumerate(blocks):
            place = f"{path}[{index}]"
            match block:
                case TextBlock():
                    self._add(role, block.text)
                case ImageBlock() if role == "user":
                    self._add(role, [block.part(place)])
                case ToolResultBlock() if role == "user":
                    self._add_result(block, place)
                case _:
                    raise _misplaced(block, role, place)

    def _add_result(self, block: ToolResultBlock, path: str) -> None:
        if block.tool_use_id not in self._names:
            raise RequestError(
                f"{path}.tool_use_id: expected the id of a tool_use before it, got "
                f"{block.tool_use_id[:100]!r}"
            )
        name = self._names[block.tool_use_id]
        message = {"role": "tool", "tool_call_id": block.tool_use_id, "name": name}
        content = content_of(block.content, f"{path}.content")
        self.messages.append({**message, "content": content})

    def _add_turn(self, blocks: Sequence[Block], path: str) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    reasoning.append(block.thinking)
                case RedactedThinkingBlock():
                    continue
                case ToolUseBlock():
                    self._names[block.id] = block.name
                    arguments = msgspec.json.encode(block.input).decode()
                    function = {"name": block.name, "arguments": arguments}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case _:
                    raise _misplaced(block, "assistant", f"{path}[{index}]")
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if reasoning:
            message["reasoning"] = message["reasoning_content"] = "\n".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)


def _misplaced(block: Block, role: str, path: str) -> RequestError:
    type_ = msgspec.to_builtins(block)["type"]
    return RequestError(f"{path}.type: messages of role {role!r} cannot hold {type_!r}")
