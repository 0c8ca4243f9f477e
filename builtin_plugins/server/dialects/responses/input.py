"""The input of `/v1/responses`: items, and the conversation that they make."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from hardpoint.builtin_plugins.server.routes.images import Content, image_part, joined
from hardpoint.plugins import RequestError
from hardpoint.typed import Strict, shown

from .custom_tools import as_arguments
from .tools import flat_name

Status = Literal["in_progress", "completed", "incomplete"]

REFUSED_ITEMS = {
    "input_file": "give its text, or images of its pages",
    "input_audio": "there is no audio",
    "input_video": "there is no video",
    "additional_tools": "give all tools in the field tools",
    "compaction_trigger": "POST /v1/responses/compact compacts a conversation",
    "configuration_update": "give the configuration in the request's own fields",
    "apply_patch_call": "there are no hosted tools",
    "apply_patch_call_output": "there are no hosted tools",
    "code_interpreter_call": "there are no hosted tools",
    "computer_call": "there are no hosted tools",
    "computer_call_output": "there are no hosted tools",
    "file_search_call": "there are no hosted tools",
    "image_generation_call": "there are no hosted tools",
    "local_shell_call": "there are no hosted tools",
    "local_shell_call_output": "there are no hosted tools",
    "mcp_approval_request": "there are no hosted tools",
    "mcp_approval_response": "there are no hosted tools",
    "mcp_call": "there are no hosted tools",
    "mcp_list_tools": "there are no hosted tools",
    "program": "there are no hosted tools",
    "program_output": "there are no hosted tools",
    "shell_call": "there are no hosted tools",
    "shell_call_output": "there are no hosted tools",
    "tool_search_call": "there are no hosted tools",
    "tool_search_output": "there are no hosted tools",
    "web_search_call": "there are no hosted tools",
}
"""Types of items and of their parts that are known and not supported, with the reason."""


class InputText(Strict, tag_field="type", tag="input_text"):
    """A text of the user, or of a tool."""

    text: str
    prompt_cache_breakpoint: Any = None


class InputImage(Strict, tag_field="type", tag="input_image"):
    """An image of the user, or of a tool.

    Attributes:
        image_url: a data URL; others where the operator allows them.
        detail: must be "auto" or None: the model's processor decides how large an image is read.
        file_id: must be None: nothing is stored.
    """

    image_url: str
    detail: Any = None
    file_id: None = None
    prompt_cache_breakpoint: Any = None


class AssistantText(Strict, tag_field="type", tag="output_text"):
    """A text of the assistant."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Strict, tag_field="type", tag="refusal"):
    """The assistant's refusal, instead of an answer."""

    refusal: str

    @property
    def text(self) -> str:
        """The text of an answer."""
        return self.refusal


class MessageItem(Strict, tag_field="type", tag="message"):
    """A message; items without a type are messages."""

    tag_is_optional: ClassVar[bool] = True

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | AssistantText | Refusal]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None

    def text(self, path: str) -> str:
        """Return the message's text.

        Raises:
            RequestError: it has an image.
        """
        content = self.parts(path)
        if isinstance(content, str):
            return content
        index = next(i for i, part in enumerate(self.content) if isinstance(part, InputImage))
        raise RequestError(
            f"{path}.content[{index}].type: messages of role {self.role!r} cannot hold "
            f"'input_image'"
        )

    def parts(self, path: str) -> Content:
        """Return the message's text, or its texts and images."""
        return _content(self.content, f"{path}.content")


class ReasoningTextPart(Strict, tag_field="type", tag="reasoning_text"):
    """A text of the assistant's reasoning."""

    text: str


class SummaryText(Strict, tag_field="type", tag="summary_text"):
    """A summary of the assistant's reasoning."""

    text: str


class ReasoningItem(Strict, tag_field="type", tag="reasoning"):
    """The assistant's reasoning; a summary counts where there is nothing else.

    Attributes:
        encrypted_content: ignored: this server gives reasoning as text.
    """

    summary: list[SummaryText] = []
    content: list[ReasoningTextPart] | None = None
    id: str | None = None
    encrypted_content: str | None = None
    status: Status | None = None

    def text(self) -> str:
        """Return the reasoning."""
        parts: Sequence[ReasoningTextPart | SummaryText] = self.content or self.summary
        return "\n".join(part.text for part in parts)


class _CallItem(Strict, kw_only=True):
    """A call that the assistant made.

    Attributes:
        async, caller: ignored: all calls are the assistant's, of the caller's tools.
        namespace: namespace of the tool.
    """

    call_id: str
    name: str
    id: str | None = None
    status: Status | None = None
    async_: Any = msgspec.field(default=None, name="async")
    caller: Any = None
    namespace: Any = None


class FunctionCallItem(_CallItem, tag_field="type", tag="function_call", kw_only=True):
    """A call of a function."""

    arguments: str


class CustomCallItem(_CallItem, tag_field="type", tag="custom_tool_call", kw_only=True):
    """A call of a custom tool."""

    input: str

    @property
    def arguments(self) -> str:
        """The arguments of the function that stands for the tool."""
        return as_arguments(self.input)


class FunctionOutputItem(Strict, tag_field="type", tag="function_call_output"):
    """The result of a call.

    Attributes:
        caller, name, namespace: ignored: the call has them.
    """

    call_id: str
    output: str | list[InputText | InputImage]
    id: str | None = None
    status: Status | None = None
    caller: Any = None
    name: str | None = None
    namespace: Any = None

    def parts(self, path: str) -> Content:
        """Return the result: its text, or its texts and images."""
        return _content(self.output, f"{path}.output")


class CustomOutputItem(FunctionOutputItem, tag_field="type", tag="custom_tool_call_output"):
    """The result of a call of a custom tool, with the fields of a function's result."""


class CompactionItem(Strict, tag_field="type", tag="compaction"):
    """The summary of a conversation, which `/v1/responses/compact` has written.

    Attributes:
        encrypted_content: the summary in base64.
        created_by: ignored.
    """

    encrypted_content: str
    id: str | None = None
    created_by: str | None = None

    def text(self, path: str) -> str:
        """Return the message that holds the summary.

        Raises:
            RequestError: the content was not written by this API.
        """
        try:
            summary = base64.b64decode(self.encrypted_content, validate=True).decode()
        except ValueError:
            raise RequestError(
                f"{path}.encrypted_content: expected the content of an item of "
                f"/v1/responses/compact, got {self.encrypted_content[:50]!r}"
            ) from None
        return f"Summary of the conversation so far:\n{summary}"


class ItemReference(Strict, tag_field="type", tag="item_reference"):
    """An item of a stored answer, by its id."""

    id: str


def _content(
    content: str | Sequence[InputText | InputImage | AssistantText | Refusal], path: str
) -> Content:
    if isinstance(content, str):
        return content
    return joined(
        [
            image_part(part.image_url, f"{path}[{index}].image_url", part.detail)
            if isinstance(part, InputImage)
            else part.text
            for index, part in enumerate(content)
        ]
    )


InputItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | FunctionOutputItem
    | CustomCallItem
    | CustomOutputItem
    | CompactionItem
    | ItemReference
)


def prepared_items(items: Any, field: str, refused: Mapping[str, str] = REFUSED_ITEMS) -> Any:
    """Return a field of items with the types of messages written out.

    Args:
        items: value of the field; returned as it is unless it is a list.
        field: name of the field, for messages.
        refused: types that are not supported, with the reason.

    Raises:
        RequestError: an item, or a part of one, has a type that is not supported.
    """
    if not isinstance(items, list):
        return items
    return [
        _prepared(item, f"{field}[{index}]", refused) if isinstance(item, dict) else item
        for index, item in enumerate(items)
    ]


def _prepared(item: dict[str, Any], path: str, refused: Mapping[str, str]) -> dict[str, Any]:
    _refuse(item, path, refused)
    for name in ("content", "output"):
        parts = item.get(name)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict):
                _refuse(part, f"{path}.{name}[{index}]", refused)
    return item if "type" in item else {"type": "message", **item}


def _refuse(item: Mapping[str, Any], path: str, refused: Mapping[str, str]) -> None:
    type_ = item.get("type")
    if isinstance(type_, str) and type_ in refused:
        raise RequestError(f"{path}.type: {type_!r} is not supported: {refused[type_]}")


class ItemConverter:
    """Makes a conversation of items; the items of an assistant's turn become one message."""

    def __init__(
        self,
        instructions: str | None,
        before: Sequence[InputItem] = (),
        field: str = "previous_response_id",
    ) -> None:
        """Begin with the instructions and stored items.

        Args:
            instructions: the system message.
            before: items of the previous response and of its input, or of the conversation.
            field: name of the field that refers to the stored items, for messages.
        """
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        if instructions:
            self.messages.append({"role": "system", "content": instructions})
        for index, item in enumerate(before):
            self.add(item, f"{field}[{index}]")

    def add(self, item: InputItem, path: str) -> None:
        """Add an item.

        Raises:
            RequestError: it is the result of a call that is not there, or an unknown reference.
        """
        match item:
            case MessageItem(role="assistant"):
                turn = self._turn()
                turn["content"] += item.text(path)
            case MessageItem(role="user"):
                self.messages.append({"role": "user", "content": item.parts(path)})
            case MessageItem():
                self._add_system(item.text(path))
            case CompactionItem():
                self.messages.append({"role": "user", "content": item.text(path)})
            case ReasoningItem():
                self._add_reasoning(item.text())
            case FunctionCallItem() | CustomCallItem():
                name = flat_name(item.namespace, item.name)
                self._names[item.call_id] = name
                function = {"name": name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._turn(with_answer=True).setdefault("tool_calls", []).append(call)
            case FunctionOutputItem():
                self._add_output(item, path)
            case ItemReference():
                raise RequestError(
                    f"{path}.id: no item {shown(item.id, 150)} of a response is stored for this key"
                )

    def _add_system(self, text: str) -> None:
        only = self.messages[0] if len(self.messages) == 1 else None
        if only is not None and only["role"] == "system":
            # Templates look for one system message, at the beginning.
            only["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def _add_reasoning(self, text: str) -> None:
        if not text:
            return
        turn = self._turn()
        before = turn.get("reasoning")
        turn["reasoning"] = turn["reasoning_content"] = f"{before}\n{text}" if before else text

    def _add_output(self, item: FunctionOutputItem, path: str) -> None:
        if item.call_id not in self._names:
            raise RequestError(
                f"{path}.call_id: expected the call_id of a function_call before it, or of the "
                f"previous response or the conversation; got {item.call_id[:100]!r}"
            )
        name = self._names[item.call_id]
        message = {"role": "tool", "tool_call_id": item.call_id, "name": name}
        self.messages.append({**message, "content": item.parts(path)})

    def _turn(self, *, with_answer: bool = False) -> dict[str, Any]:
        """Return the message of the assistant's turn, a new one unless the last one goes on.

        Args:
            with_answer: whether a turn that has its answer, and no calls, may go on.
        """
        for last in self.messages[-1:]:
            goes_on = with_answer or not last["content"] or "tool_calls" in last
            if last["role"] == "assistant" and goes_on:
                return last
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        self.messages.append(turn)
        return turn
