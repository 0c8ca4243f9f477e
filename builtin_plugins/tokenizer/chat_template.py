"""Chat templates: the messages are checked, then rendered in a process with limits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.plugins import RequestError
from hardpoint.toolkit.limited import LimitedProcess

from . import chat_process

_MAX_BYTES = 512 << 20
_MAX_ESCAPED = 12  # characters of JSON per character of text


class ChatRenderer:
    """Renders chat templates in a process of its own, which starts with the first conversation.

    Usable from several threads, which wait for each other.
    """

    def __init__(self, seconds: float, max_characters: int) -> None:
        """Start nothing.

        Args:
            seconds: time limit for rendering a conversation.
            max_characters: maximum length of a conversation's text.
        """
        self._seconds = seconds
        self._process = LimitedProcess(
            str(chat_process.__file__),
            "to render chat templates",
            seconds=seconds,
            max_bytes=_MAX_BYTES,
            max_answer_bytes=_MAX_ESCAPED * max_characters + 10_000,
            needs="jinja2",
            settings={"max_characters": max_characters},
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: mappings with `role` and `content`.
            template: Jinja source; it runs in a sandbox.
            add_generation_prompt: whether the text ends with the beginning of the assistant's
                message.
            variables: further variables of the template, such as `bos_token` and `tools`.

        Raises:
            RequestError: the messages are malformed, the template rejects them, or it takes too
                long.
            HardpointError: no process can be started.
        """
        request = {
            **variables,
            "messages": _check(messages),
            "template": template,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            encoded = json.dumps(request, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as cause:
            raise RequestError(f"messages: expected plain data: {cause}") from cause
        reply = self._ask(encoded)
        if (text := reply.get("text")) is None:
            raise RequestError(f"messages: the chat template refuses them: {reply['error']}")
        return text

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(self, request: bytes) -> dict[str, str]:
        if (answer := self._process.ask(request)) is not None:
            reply: dict[str, str] = json.loads(answer)
            return reply
        return {
            "error": f"it takes more than {self._seconds:g} s (the option template_seconds of the "
            f"tokenizer) or too much memory"
        }


def _plain(value: Any) -> Any:
    """Return a value of another type as plain data, or else the name of its type."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for name in ("model_dump", "item"):  # pydantic models; scalars of numpy and torch
        if callable(method := getattr(value, name, None)):
            with contextlib.suppress(Exception):
                return method()
    return f"<{type(value).__name__}>"


def _check(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f'messages: expected a list of {{"role": ..., "content": ...}}, got {messages!r}'
        )
    if not messages:
        raise RequestError("messages: expected at least one message, got an empty list")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f'{where}: expected {{"role": ..., "content": ...}}, got {message!r}'
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f"{where}.role: expected a string such as 'user', got {message.get('role')!r}"
            )
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise RequestError(f"{where}.content: expected a string, got {content!r}")
    return [dict(message) for message in messages]
