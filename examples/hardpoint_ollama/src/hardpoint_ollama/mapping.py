"""Mapping of Ollama's requests to OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hardpoint.plugins import RequestError

from .fields import ChatRequest, GenerateRequest, Message, Options, TextRequest

_SAME_NAME = (
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
)
_EFFORTS = ("low", "medium", "high", "max")
_SIGNATURES = {
    "/9j/": "image/jpeg",
    "iVBORw0KGgo": "image/png",
    "UklGR": "image/webp",
    "R0lGOD": "image/gif",
}
"""Media types by the first characters in base64."""


def chat_body(chat: ChatRequest) -> dict[str, Any]:
    """Return the body of `/v1/chat/completions` for a conversation.

    Raises:
        RequestError: a field has no counterpart.
    """
    body = {**_common(chat), "messages": _messages(chat.messages), **_thinking(chat)}
    if chat.tools:
        body["tools"] = [{"type": "function", **tool} for tool in chat.tools]
    if chat.logprobs:
        body |= {"logprobs": True, "top_logprobs": chat.top_logprobs or 0}
    return body


def generate_body(request: GenerateRequest) -> tuple[str, dict[str, Any]]:
    """Return the path and the body for a prompt.

    A prompt is a message of the user; `raw` and `suffix` go to `/v1/completions`.

    Raises:
        RequestError: a field has no counterpart.
    """
    if request.template:
        raise RequestError("template: not supported; render the prompt and send raw = true")
    if request.context:
        raise RequestError("context: not supported; send the conversation to /api/chat")
    if request.raw or request.suffix:
        return "/v1/completions", _completion(request)
    messages = [Message(role="user", content=request.prompt, images=request.images)]
    if request.system:
        messages.insert(0, Message(role="system", content=request.system))
    body = {**_common(request), "messages": _messages(messages), **_thinking(request)}
    if request.logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return "/v1/chat/completions", body


def _completion(request: GenerateRequest) -> dict[str, Any]:
    for name in ("system", "images", "logprobs"):
        if getattr(request, name):
            raise RequestError(f"{name}: not supported with raw or suffix")
    body = {**_common(request), "prompt": request.prompt}
    if request.suffix:
        body["suffix"] = request.suffix
    return body


def _common(request: TextRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **_sampling(request.options or Options()),
    }
    if isinstance(request.format, dict):
        schema = {"name": "answer", "schema": request.format}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif request.format == "json":
        body["response_format"] = {"type": "json_object"}
    elif request.format:
        raise RequestError(f'format: expected "json" or a JSON schema, got {request.format!r}')
    return body


def _sampling(options: Options) -> dict[str, Any]:
    body = {name: getattr(options, name) for name in _SAME_NAME}
    limit = options.num_predict or 0
    body["n_predict"] = limit if limit > 0 else -1
    if options.repeat_last_n != 0:
        body["repetition_penalty"] = options.repeat_penalty
    if options.typical_p is not None and options.typical_p < 1:
        body["typical_p"] = options.typical_p
    if options.mirostat:
        names = ("mirostat", "mirostat_tau", "mirostat_eta")
        body |= {name: getattr(options, name) for name in names}
    return {name: value for name, value in body.items() if value is not None}


def _thinking(request: TextRequest) -> dict[str, Any]:
    if request.think is None or request.think == "":
        return {}
    if isinstance(request.think, bool):
        return {"enable_thinking": request.think}
    if request.think not in _EFFORTS:
        raise RequestError(
            f"think: expected true, false or one of {', '.join(_EFFORTS)}, got {request.think!r}"
        )
    return {"reasoning_effort": request.think}


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's shape; calls without ids get ids from their positions."""
    result: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        mapped: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.thinking:
            mapped["reasoning"] = message.thinking
        if message.tool_calls:
            mapped["tool_calls"] = calls = []
            for position, call in enumerate(message.tool_calls):
                call_id = call.id or f"call_{index}_{position}"
                open_calls.append((call_id, call.function.name))
                function = {
                    "name": call.function.name,
                    "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
                }
                calls.append({"id": call_id, "type": "function", "function": function})
        if message.role == "tool":
            mapped["tool_call_id"] = _answered_call(message, index, open_calls)
        result.append(mapped)
    return result


def _answered_call(message: Message, index: int, open_calls: list[tuple[str, str]]) -> str:
    """Return the id of the call that a result answers: by id, by name, or the oldest one."""
    for position, (call_id, name) in enumerate(open_calls):
        if message.tool_call_id is not None:
            matches = call_id == message.tool_call_id
        else:
            matches = message.tool_name in (None, "", name)
        if matches:
            del open_calls[position]
            return call_id
    raise RequestError(
        f"messages[{index}]: expected the result of an earlier tool call, got one of "
        f"{message.tool_call_id or message.tool_name or 'no tool'!r}"
    )


def _content(message: Message) -> str | list[dict[str, Any]]:
    text = message.content or ""
    if not message.images:
        return text
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _data_url(image)}} for image in message.images
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _data_url(image: str) -> str:
    types = (kind for start, kind in _SIGNATURES.items() if image.startswith(start))
    return f"data:{next(types, 'image/png')};base64,{image}"
