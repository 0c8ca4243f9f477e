"""Conversations: messages and tools as chat templates and output parsers get them."""

from __future__ import annotations

import inspect
import re
import typing as t
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hardpoint.core.frontend.requests.plugin_arguments import CallRules
from hardpoint.errors import shown
from hardpoint.plugins import RequestError, Tokenizer
from hardpoint.plugins.request_options import ChatOptions
from hardpoint.toolkit.user_text import UserText
from hardpoint.typed import copied, is_list
from hardpoint.typed.schema_check import check_depth, check_schema, without_nulls

from . import typed
from .chat_templates import named_template, shows_tools, with_role
from .images import IMAGE_PARTS, PromptImages, image_of

_IMAGE = {"type": "image"}

_OTHER_PARTS = frozenset(
    {
        "audio",
        "audio_embeds",
        "audio_url",
        "document",
        "file",
        "image_embeds",
        "input_audio",
        "input_file",
        "prompt_embeds",
        "video",
        "video_embeds",
        "video_url",
    }
)
"""Types of parts that others read, and no model here does."""

Messages = Sequence[Mapping[str, Any]]

_ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s+(.*)")
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Example|Examples|Note):")


class Function(msgspec.Struct, kw_only=True):
    """A function that a model may call.

    Attributes:
        name: name of the function.
        description: description for the model.
        parameters: JSON schema of its arguments, an object.
        strict: whether calls have to keep to the schema.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]
    description: str | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] = {}
    strict: bool | msgspec.UnsetType | None = msgspec.UNSET


class Tool(typed.Strict):
    """A tool that a model may call, as OpenAI's API has it."""

    type: Literal["function"]
    function: Function


def read_tools(tools: Any) -> list[Tool]:
    """Return tools, checked.

    Args:
        tools: a list of JSON schemas or functions.

    Raises:
        RequestError: one of them is neither, or two have the same name.
    """
    if not is_list(tools):
        raise RequestError(f"tools: expected a list of tools, got {type(tools).__name__}")
    read: dict[str, Tool] = {}
    for index, definition in enumerate(copied(tools, "tools")):
        path = f"tools[{index}]"
        tool = (
            _of_function(definition, path) if callable(definition) else _of_schema(definition, path)
        )
        if (name := tool.function.name) in read:
            other = list(read).index(name)
            raise RequestError(f"{path}.function.name: {name!r} is the name of tools[{other}], too")
        read[name] = tool
    return list(read.values())


def _of_schema(definition: Any, path: str) -> Tool:
    function = definition.get("function") if isinstance(definition, Mapping) else None
    if isinstance(function, Mapping):
        present = {k: v for k, v in function.items() if v is not None or k == "name"}
        definition = {**definition, "function": present}
    tool = typed.convert(definition, Tool, path=path, error=RequestError)
    check_depth(tool.function.parameters, f"{path}.function.parameters")
    tool.function.parameters = without_nulls(tool.function.parameters)
    schema, place = tool.function.parameters, f"{path}.function.parameters"
    if schema.get("type", "object") != "object":
        raise RequestError(
            f'{place}.type: expected "object", because arguments have names, got '
            f"{shown(schema['type'])}"
        )
    check_schema(schema, place)
    return tool


def _of_function(function: Callable[..., Any], path: str) -> Tool:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        hints = t.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (NameError, TypeError, ValueError) as cause:
        raise RequestError(f"{path}: the signature of {name}() cannot be read: {cause}") from cause
    description, about = _described(inspect.getdoc(function) or "")
    fields: list[Any] = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise RequestError(f"{path}: {name}() has *{parameter.name}; expected named parameters")
        if parameter.name not in hints:
            raise RequestError(f"{path}: the parameter {parameter.name!r} of {name}() has no type")
        hint = hints[parameter.name]
        if parameter.name in about:
            hint = Annotated[hint, Meta(description=about[parameter.name])]
        required = parameter.default is parameter.empty
        # The default itself may be of any type, and the model need not know it.
        fields.append((parameter.name, hint) if required else (parameter.name, hint, msgspec.UNSET))
    try:
        arguments = msgspec.defstruct(name, fields, kw_only=True)
        (reference,), components = msgspec.json.schema_components(
            [arguments], ref_template="#/$defs/{name}"
        )
    except (TypeError, ValueError) as cause:
        raise RequestError(f"{path}: the types of {name}() have no JSON schema: {cause}") from cause
    schema = components.pop(reference["$ref"].removeprefix("#/$defs/"))
    schema.pop("title", None)
    if components:
        schema["$defs"] = components
    schema["additionalProperties"] = False  # the function takes no others
    return typed.convert(
        {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": schema},
        },
        Tool,
        path=path,
        error=RequestError,
    )


def _described(docstring: str) -> tuple[str, dict[str, str]]:
    summary: list[str] = []
    about: dict[str, str] = {}
    section, name = "", ""
    for line in docstring.splitlines():
        if match := _SECTION.match(line):
            section = match[1]
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            if match := _ARGUMENT.match(line.strip()):
                name = match[1]
                about[name] = match[2]
            elif name:
                about[name] += f" {line.strip()}"
    return "\n".join(summary).strip(), about


GivenImages = list[tuple[str, Any]]
"""Images as they were given, each with its place."""


class PartReader:
    """Takes the parts of messages that are no texts.

    Attributes:
        found: images, in the order of the conversation.
    """

    def __init__(self, *, takes_images: bool) -> None:
        """Take images if the model does."""
        self.found: GivenImages = []
        self._takes_images = takes_images

    def without_images(self, messages: Any) -> Any:
        """Return messages with image parts as `{"type": "image"}`.

        Raises:
            RequestError: a part is of a type that the model does not take, or has no image.
        """
        if not is_list(messages):
            return messages
        return [
            self._message(message, f"messages[{index}]")
            for index, message in enumerate(copied(messages, "messages"))
        ]

    def _message(self, message: Any, path: str) -> Any:
        if not isinstance(message, Mapping):
            return message
        plain = copied(message, path)
        content = plain.get("content")
        if not is_list(content):
            return message
        parts = copied(content, f"{path}.content")
        if not any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts):
            return message
        read = [self._part(part, f"{path}.content[{index}]") for index, part in enumerate(parts)]
        return {**plain, "content": read}

    def _part(self, part: Any, path: str) -> Any:
        type_ = part.get("type") if isinstance(part, Mapping) else None
        if type_ in IMAGE_PARTS and self._takes_images:
            self.found.append(image_of(copied(part, path), type_, path))
            return dict(_IMAGE)
        if isinstance(type_, str) and type_ != "text":
            raise unreadable_part(type_, f"{path}.type", takes_images=self._takes_images)
        return part


def unreadable_part(type_: str, place: str, *, takes_images: bool) -> RequestError:
    """Return the error of a part of another type."""
    takes = "text and images alone" if takes_images else "text alone"
    expected = '"text" or "image_url"' if takes_images else '"text"'
    known = type_ in _OTHER_PARTS or type_ in IMAGE_PARTS
    reason = f"; the model reads {takes}" if known else ""
    return RequestError(f"{place}: expected {expected}, got {shown(type_)}{reason}")


def read_messages(messages: Any, parts: PartReader | None = None) -> Any:
    """Return the messages of a conversation as plain data; the tokenizer checks their form.

    Content in parts is joined unless it has images, and arguments of earlier tool calls that are
    JSON text become objects, as chat templates want both.

    Args:
        parts: takes the images, for each of which a part `{"type": "image"}` is left; None refuses
            them.

    Raises:
        RequestError: a message holds what is no plain data, a text that UTF-8 cannot hold, or a
            part that is no text and no image that the model takes.
    """
    parts = PartReader(takes_images=False) if parts is None else parts
    messages = parts.without_images(messages)
    plain = typed.convert(messages, object, path="messages", error=RequestError)
    if not isinstance(plain, list):
        return plain
    return [
        _read_message(with_role(message, f"messages[{index}]"), f"messages[{index}]")
        if isinstance(message, dict)
        else message
        for index, message in enumerate(plain)
    ]


def _read_message(message: dict[str, Any], path: str) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        parts = [_part_of(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
        texts = [part for part in parts if isinstance(part, str)]
        message = {**message, "content": "\n".join(texts)}
        if len(texts) < len(parts):
            shown_parts = [
                {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
            ]
            message = {**message, "content": shown_parts}
    if isinstance(calls, list):
        message = {**message, "tool_calls": list(map(_with_object, calls))}
    return message


def _part_of(part: Any, path: str) -> str | dict[str, Any]:
    """Return the text of a part; an image's part as it is."""
    if isinstance(part, str):
        return part
    if part == _IMAGE:
        return dict(_IMAGE)
    if not isinstance(part, dict):
        raise RequestError(f'{path}: expected {{"type": "text", "text": ...}}, got {shown(part)}')
    if part.get("type") != "text":
        raise RequestError(f'{path}.type: expected "text", got {shown(part.get("type"))}')
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{path}.text: expected a string, got {shown(part.get('text'))}")
    text: str = part["text"]
    return text


def _with_object(call: Any) -> Any:
    """Return a tool call with its arguments as an object, if they are the JSON text of one.

    No arguments, null and an empty text are an empty object.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        return call
    try:
        text = (arguments or "").strip() or "{}"
        arguments = msgspec.json.decode(text, type=dict[str, Any] | None) or {}
    except (msgspec.DecodeError, RecursionError):  # a template may show what the model wrote
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class Chat:
    """How conversations become prompts.

    Attributes:
        tools: tools that the model may call, as chat templates get them.
        schemas: JSON schemas of the arguments of the tools that the model may call, by name; None
            without tools.
        calls: rules for the calls that are allowed; None leaves the model free.
    """

    def __init__(
        self,
        tools: Any = None,
        tool_choice: Any = "auto",
        *,
        parallel_tool_calls: Any = True,
        add_generation_prompt: Any = None,
        continue_final_message: Any = False,
        chat_template: Any = None,
        chat_template_kwargs: Any = None,
    ) -> None:
        """Check the arguments of a caller.

        Raises:
            RequestError: the tools or another argument is malformed.
        """
        read = [] if tools is None else read_tools(tools)
        _check_flag("parallel_tool_calls", parallel_tool_calls, bool)
        self.calls = _call_rules(read, tool_choice, parallel=parallel_tool_calls)
        shown_tools = [] if tool_choice == "none" else read
        self.tools = [_definition(tool) for tool in shown_tools]
        self.schemas = {
            tool.function.name: tool.function.parameters for tool in shown_tools
        } or None
        _check_flag("add_generation_prompt", add_generation_prompt, bool | None)
        _check_flag("continue_final_message", continue_final_message, bool)
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message: expected false where add_generation_prompt is true, for "
                "the prompt ends with the last message or with the beginning of another one"
            )
        self._begins = not continue_final_message
        if add_generation_prompt is not None:
            self._begins = add_generation_prompt
        self._continues = continue_final_message
        self._template = chat_template
        self._variables: dict[str, Any] = {}
        if chat_template_kwargs is not None:
            self._variables = typed.convert(
                chat_template_kwargs,
                dict[str, Any],
                path="chat_template_kwargs",
                error=RequestError,
            )

    @classmethod
    def taken_from(cls, options: Mapping[str, Any]) -> tuple[Chat, dict[str, Any]]:
        """Return the chat of a call's options, and the options of its requests.

        Raises:
            RequestError: the tools or another option is malformed.
        """
        keys = ChatOptions.__optional_keys__
        chat = cls(**{name: value for name, value in options.items() if name in keys})
        rest = {name: value for name, value in options.items() if name not in keys}
        return chat, {**rest, "tools": chat.schemas, "calls": chat.calls}

    def rendered(
        self,
        tokenizer: Tokenizer,
        messages: Any,
        images: PromptImages | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return a conversation as a prompt that is tokenized already.

        Args:
            images: reads images; None refuses them.
            lock: held while the tokenizer is used, but not while images are read.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages; an image is
                wrong.
        """
        tokens = () if images is None else images.tokens
        parts = PartReader(takes_images=bool(tokens))
        read = read_messages(messages, parts)
        pictures = [] if images is None else images.read(parts.found)
        with nullcontext() if lock is None else lock:
            text, ids = self._encoded(tokenizer, read, tokens)
        prompt = {"type": "token", "prompt_token_ids": ids, "prompt": text}
        if not pictures:
            return prompt
        if (count := ids.count(tokens[0])) != len(pictures):
            raise RequestError(
                f"messages: the chat template shows the model {count} of {len(pictures)} images; "
                f"some templates show only images of users"
            )
        return {**prompt, "multi_modal_data": {"image": pictures}}

    @property
    def _must_call(self) -> bool:
        return self.calls is not None and self.calls.required is not None

    def _encoded(
        self, tokenizer: Tokenizer, read: Any, media_tokens: Sequence[int]
    ) -> tuple[str, list[int]]:
        template = named_template(tokenizer, self._template)
        tools = self.tools
        if self._must_call and not shows_tools(tokenizer, template):
            tools = []  # a grammar writes the call
        texts = UserText(tokenizer, read, tools, self._variables, media_tokens=media_tokens)
        options = {
            "tools": texts.marked(tools),
            "continue_final_message": self._continues,
            "template": template,
            "variables": texts.marked(self._variables),
        }
        rendered = tokenizer.apply_chat_template(
            texts.marked(read),
            add_generation_prompt=self._begins,
            **{name: value for name, value in options.items() if value},
        )
        typed.check_text(rendered, "messages: the text of the chat template", RequestError)
        return texts.encode(rendered)


def _definition(tool: Tool) -> dict[str, Any]:
    """Return the tool for the chat template, without `strict`: it asks for a grammar."""
    definition: dict[str, Any] = msgspec.to_builtins(tool)
    definition["function"].pop("strict", None)
    return definition


def _check_flag(name: str, value: Any, type_: Any) -> None:
    if not isinstance(value, type_):
        raise RequestError(f"{name}: expected true or false, got {shown(value)}")


def _call_rules(tools: Sequence[Tool], choice: Any, *, parallel: bool) -> CallRules | None:
    """Return the calls that are allowed; None if the model is free.

    Raises:
        RequestError: the choice is malformed, or there is no such tool.
    """
    functions = [tool.function for tool in tools]
    strict = [function.name for function in functions if function.strict is True]
    if choice == "none":
        return None
    if choice == "auto":
        is_free = not strict and (parallel or not tools)
        return None if is_free else CallRules(strict=strict, parallel=parallel)
    names = [function.name for function in functions]
    if choice == "required":
        if not names:
            raise RequestError('tool_choice: "required" needs tools, got none')
        return CallRules(required=names, strict=strict, parallel=parallel)
    name = _named(choice)
    if name is None:
        raise RequestError(
            f'tool_choice: expected "none", "auto", "required" or {{"name": ...}}, '
            f"got {shown(choice)}"
        )
    if name not in names:
        known = ", ".join(names) or "none"
        raise RequestError(
            f"tool_choice.name: expected one of the tools ({known}), got {shown(name)}"
            f"{typed.suggest(name, names)}"
        )
    return CallRules(required=[name], strict=strict, parallel=False)


def _named(choice: Any) -> str | None:
    if isinstance(choice, Mapping) and set(choice) == {"type", "function"}:
        choice = choice["function"]
    if not isinstance(choice, Mapping) or set(choice) != {"name"}:
        return None
    return choice["name"] if isinstance(choice["name"], str) else None
